"""What the step measures of its summed, unscaled gradients."""

import math
from typing import Any

import tensorflow as tf

import scaling
from trainer.step.gradients import numbers, squares_in_float32


def global_norm(gradients: list[Any]) -> tf.Tensor:
    """Returns the 2-norm of all gradients together, in float32: shape ().

    It is finite only if every element is. In bfloat16, elements of 1e30 are finite while
    their squares, which Adam would keep, are not: then it is infinite.
    """
    return tf.sqrt(2.0 * tf.add_n([squares_in_float32(gradient) for gradient in gradients]))


def measure(
    gradients: list[Any], state: Any, *, magnitude: bool, counts: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Measures the unscaled gradients as far as somebody has asked for it.

    Args:
        gradients: coalesced; a missing one has no numbers.
        state: the loss-scale rule's.
        magnitude: whether the largest magnitude is wanted: a pass over the gradients.
        counts: whether the magnitudes shall be counted too: a few more passes.

    Returns:
        The largest magnitude, shape (), float32, or NaN; and the counts of
        `scaling.GradientStats`, summed over variables, shape (COUNTS,), or (0,).
    """
    if counts:
        stats = scaling.gradient_stats(gradients, state)
        return tf.reduce_max(stats.max_magnitude), tf.reduce_sum(stats.counts, axis=0)
    if magnitude:
        present = [numbers(gradient) for gradient in gradients if gradient is not None]
        largest = [tf.cast(tf.reduce_max(tf.abs(values)), tf.float32) for values in present]
        return tf.reduce_max(tf.stack(largest)), tf.zeros([0])
    return tf.constant(math.nan), tf.zeros([0])
