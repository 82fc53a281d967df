"""The values of a gradient, whether it is dense, sparse or missing."""

import tensorflow as tf

from trainer.step.types import Gradient

ROWS = 32  # the longest sum that XLA does not split on a CPU


def gradient_values(gradient: Gradient) -> tf.Tensor:
    """Returns a coalesced gradient's values: its rows if it is sparse; shape (0,) if it is None."""
    if gradient is None:
        return tf.zeros([0])
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def half_squared_norm(gradient: Gradient) -> tf.Tensor:
    """Returns half the sum of a gradient's squares: shape (), float32."""
    return tf.nn.l2_loss(tf.cast(gradient_values(gradient), tf.float32))


def half_squared_norm_in_rows(gradient: Gradient) -> tf.Tensor:
    """Returns `half_squared_norm` up to rounding, in a form that XLA computes faster on a CPU.

    There XLA splits each sum over more than 32 numbers, and writes the squares to memory before it
    adds them. A sum over 32 rows is not split, and the squares stay in registers. `abs` changes no
    sum of squares; without it, XLA would make one sum of the two again.
    """
    values = tf.cast(gradient_values(gradient), tf.float32)
    size = values.shape.num_elements()
    if size is None or size < ROWS**2:
        return half_squared_norm(gradient)
    flat = tf.reshape(values, [-1])
    rows = tf.reshape(flat[: size // ROWS * ROWS], [ROWS, -1])
    total = tf.reduce_sum(tf.abs(tf.reduce_sum(rows * rows, axis=0)))
    rest = flat[size // ROWS * ROWS :]
    return (total + tf.reduce_sum(rest * rest)) / 2.0


def count_nonfinite(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the numbers of inf and NaN elements; integers are neither: shape (2,), int32."""
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return tf.zeros([2], tf.int32)
    # Few operations: a step has them for each variable, and they are traced before its first step.
    flags = tf.reshape(tf.stack([tf.math.is_inf(tensor), tf.math.is_nan(tensor)]), [2, -1])
    return tf.reduce_sum(tf.cast(flags, tf.int32), axis=1)
