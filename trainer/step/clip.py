"""Clipping: the last thing that happens to a gradient before the optimizer sees it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from scaling.base.argument_checks import is_number
from trainer.step.gradients import numbers


@dataclasses.dataclass(frozen=True)
class Clip:
    """At most one bound on the gradients; None is no bound. Named as Keras's optimizers name them.

    Args:
        global_clipnorm: on the 2-norm of all gradients together: they are scaled down alike.
        clipnorm: on the 2-norm of each variable's gradient.
        clipvalue: on the magnitude of each element.

    Raises:
        ValueError: if one is not positive and finite, or there are two.

    Source:
        Pascanu et al., "On the difficulty of training recurrent neural networks", ICML
        2013, section 3.2, https://arxiv.org/abs/1211.5063, for the norms.

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
        for name, bound in self.bounds().items():
            if not is_number(bound) or not 0 < bound < math.inf:
                raise ValueError(
                    f"`{name}` must be None or positive and finite; got {bound!r}. It is the "
                    "largest that a gradient's norm or element may be. 1.0 is usual."
                )
        if len(self.bounds()) > 1:
            found = ", ".join(f"{name}={bound!r}" for name, bound in self.bounds().items())
            raise ValueError(
                f"`{next(iter(self.bounds()))}` must be None beside another bound; got {found}. "
                "Clipping twice is never meant. Set one of them."
            )

    def bounds(self) -> dict[str, float]:
        """Returns the bounds that are set, by name."""
        return {
            name: bound for name, bound in dataclasses.asdict(self).items() if bound is not None
        }


def clip(gradients: list[Any], gradient_norm: tf.Tensor, bound: Clip) -> list[Any]:
    """Returns the gradients within their bound.

    Args:
        gradients: summed, unscaled and coalesced; None survives.
        gradient_norm: their global norm: shape (), float32.
        bound: which.
    """
    if bound.global_clipnorm is not None:
        factor = bound.global_clipnorm / tf.maximum(gradient_norm, bound.global_clipnorm)
        return changed(gradients, lambda values: values * tf.cast(factor, values.dtype))
    if bound.clipnorm is not None:
        return changed(gradients, lambda values: tf.clip_by_norm(values, bound.clipnorm))
    if bound.clipvalue is not None:
        largest = bound.clipvalue
        return changed(gradients, lambda values: tf.clip_by_value(values, -largest, largest))
    return gradients


def changed(gradients: list[Any], change: Callable[[tf.Tensor], tf.Tensor]) -> list[Any]:
    """Applies a function to each gradient's numbers, sparse ones' rows included."""

    def with_changed_numbers(gradient: Any) -> Any:
        if gradient is None:
            return None
        values = change(numbers(gradient))
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return values

    return [with_changed_numbers(gradient) for gradient in gradients]
