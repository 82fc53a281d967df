"""Scales of float8 tensors, as pure rules, and casts that saturate."""

from scaling.float8.cast import dequantize, losses_of_cast, quantize
from scaling.float8.current import CurrentScaling, CurrentScalingState
from scaling.float8.delayed import DelayedScaling, DelayedScalingState
from scaling.float8.presets import preset

__all__ = [
    "CurrentScaling",
    "CurrentScalingState",
    "DelayedScaling",
    "DelayedScalingState",
    "dequantize",
    "losses_of_cast",
    "preset",
    "quantize",
]
