"""Clips the gradients: the last operation on them before the optimizer."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from scaling.base.argument_checks import is_number, shown
from scaling.base.number_formats import as_float
from trainer.step.gradients import gradient_values
from trainer.step.types import Gradient

# A smaller bound is 0 in float32. With a larger one, the product of a gradient and the bound, which
# `tf.clip_by_norm` computes, could be inf: a gradient that passes the verdict is below 2^64.
SMALLEST, LARGEST = 2.0**-126, 2.0**63


@dataclasses.dataclass(frozen=True)
class Clip:
    """A bound on the gradients, or no bound. The arguments are named as in Keras's optimizers.

    Args:
        global_clipnorm: maximum 2-norm of all gradients together; all are scaled by one factor.
        clipnorm: maximum 2-norm of each variable's gradient.
        clipvalue: maximum magnitude of each element.

    Raises:
        ValueError: if a bound is not from 2^-126 to 2^63, or if there is more than one.

    Source:
        Pascanu et al., "On the difficulty of training recurrent neural networks", ICML
        2013, section 3.2, https://arxiv.org/abs/1211.5063, for clipping by norm.

    Example:
        >>> gradients = [tf.constant([3.0, 4.0]), None]
        >>> clipped, _ = clip(gradients, tf.constant(5.0), Clip(global_clipnorm=1.0))
        >>> [round(float(value), 2) for value in clipped]
        [0.6, 0.8]
    """

    global_clipnorm: float | None = None
    clipnorm: float | None = None
    clipvalue: float | None = None

    def __post_init__(self) -> None:
        """Checks the bounds."""
        bounds = self.bounds()
        for name, bound in bounds.items():
            if not is_number(bound) or not SMALLEST <= as_float(bound) <= LARGEST:
                what = "magnitude of an element" if name == "clipvalue" else "norm"
                raise ValueError(
                    f"`{name}` must be None, or a number from 2^-126 to 2^63; got {shown(bound)}. "
                    f"The bound is the maximum {what} after clipping, in float32. Use 1.0, for "
                    "example."
                )
        if len(bounds) > 1:
            found = ", ".join(f"{name}={bound!r}" for name, bound in bounds.items())
            raise ValueError(
                f"`{next(iter(bounds))}` must be None if another bound is set; got {found}. "
                "Gradients can be clipped only once. Set only one bound."
            )

    def bounds(self) -> dict[str, float]:
        """Returns a dict of the bounds that are set, keyed by name."""
        return {name: bound for name, bound in vars(self).items() if bound is not None}


def clip(gradients: list[Gradient], gradient_norm: tf.Tensor, bound: Clip) -> list[Gradient]:
    """Returns the gradients, clipped.

    Args:
        gradients: the summed, unscaled and coalesced gradients; None stays None.
        gradient_norm: their global norm: shape (), float32.
        bound: the bound; with `Clip()` the gradients are returned unchanged.
    """
    if bound.global_clipnorm is not None:
        factor = bound.global_clipnorm / tf.maximum(gradient_norm, bound.global_clipnorm)
        return map_values(gradients, lambda values: values * tf.cast(factor, values.dtype))
    if bound.clipnorm is not None:
        return map_values(gradients, lambda values: tf.clip_by_norm(values, bound.clipnorm))
    if bound.clipvalue is not None:
        largest = bound.clipvalue
        return map_values(gradients, lambda values: tf.clip_by_value(values, -largest, largest))
    return gradients


def map_values(
    gradients: list[Gradient], function: Callable[[tf.Tensor], tf.Tensor]
) -> list[Gradient]:
    """Applies a function to each gradient's values; for a sparse gradient, to its stored rows."""

    def mapped(gradient: Gradient) -> Gradient:
        if gradient is None:
            return None
        values = function(gradient_values(gradient))
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return values

    return [mapped(gradient) for gradient in gradients]
