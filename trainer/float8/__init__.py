"""Models whose large products are computed in float8."""

from trainer.float8.convert import convert_to_float8

__all__ = ["convert_to_float8"]
