"""The values of a gradient, whether it is dense, sparse or missing."""

import tensorflow as tf

from trainer.step.types import Gradient


def gradient_values(gradient: Gradient) -> tf.Tensor:
    """Returns a coalesced gradient's values: its rows if it is sparse; shape (0,) if it is None."""
    if gradient is None:
        return tf.zeros([0])
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def half_squared_norm(gradient: Gradient) -> tf.Tensor:
    """Returns half the sum of a gradient's squares: shape (), float32."""
    return tf.nn.l2_loss(tf.cast(gradient_values(gradient), tf.float32))


def count_nonfinite(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the numbers of inf and NaN elements: shape (2,), int32."""
    flags = (tf.math.is_inf(tensor), tf.math.is_nan(tensor))
    return tf.stack([tf.math.count_nonzero(flag, dtype=tf.int32) for flag in flags])
