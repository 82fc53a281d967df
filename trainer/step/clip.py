"""Clips the gradients: the last operation on them before the optimizer."""

from collections.abc import Callable

import tensorflow as tf

from trainer.step.measure import gradient_values
from trainer.step.types import Gradient
from trainer.step.updates import Updates


def clip(gradients: list[Gradient], gradient_norm: tf.Tensor, updates: Updates) -> list[Gradient]:
    """Returns the gradients, clipped.

    Args:
        gradients: the summed, unscaled and coalesced gradients; None stays None.
        gradient_norm: their global norm: shape (), float32.
        updates: the settings with the bound; without one, the gradients are returned unchanged.

    Source:
        Pascanu et al., "On the difficulty of training recurrent neural networks", ICML
        2013, section 3.2, https://arxiv.org/abs/1211.5063, for clipping by norm.

    Example:
        >>> gradients = [tf.constant([3.0, 4.0]), None]
        >>> clipped, _ = clip(gradients, tf.constant(5.0), Updates(global_clipnorm=1.0))
        >>> [round(float(value), 2) for value in clipped]
        [0.6, 0.8]
    """
    if updates.global_clipnorm is not None:
        factor = updates.global_clipnorm / tf.maximum(gradient_norm, updates.global_clipnorm)
        return map_values(gradients, lambda values: values * tf.cast(factor, values.dtype))
    if updates.clipnorm is not None:
        return map_values(gradients, lambda values: tf.clip_by_norm(values, updates.clipnorm))
    if updates.clipvalue is not None:
        largest = updates.clipvalue
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
