"""The numbers in a gradient, be it dense, sparse or missing."""

from typing import Any

import tensorflow as tf


def numbers(gradient: Any) -> tf.Tensor:
    """Returns the numbers in a coalesced gradient; a missing one has none."""
    if gradient is None:
        return tf.zeros([0])
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def squares_in_float32(gradient: Any) -> tf.Tensor:
    """Returns half the sum of a gradient's squares, in float32: shape ()."""
    return tf.nn.l2_loss(tf.cast(numbers(gradient), tf.float32))


def count_nonfinite(tensor: tf.Tensor) -> tf.Tensor:
    """Returns how many elements of a tensor are inf, and how many NaN: shape (2,), int32."""
    kinds = (tf.math.is_inf(tensor), tf.math.is_nan(tensor))
    return tf.stack([tf.math.count_nonzero(kind, dtype=tf.int32) for kind in kinds])
