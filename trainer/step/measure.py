"""What the step measures of its summed, unscaled gradients."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import scaling
from trainer.step.gradients import numbers, squares_in_float32


def global_norm(gradients: list[Any]) -> tf.Tensor:
    """Returns the 2-norm of all gradients together, in float32: shape ().

    It is finite only if every element is. In bfloat16, elements of 1e30 are finite while
    their squares, which Adam would keep, are not: then it is infinite.
    """
    return tf.sqrt(2.0 * tf.add_n([squares_in_float32(gradient) for gradient in gradients]))


class Measured(NamedTuple):
    """What was measured; the fields of `Outcome` of these names."""

    max_magnitude: tf.Tensor
    magnitude_counts: tf.Tensor
    underflow: tf.Tensor


def measure(
    gradients: list[Any],
    state: Any,
    positions: Sequence[int],
    *,
    magnitude: bool,
    recorded: int,
) -> Measured:
    """Measures the unscaled gradients as far as somebody has asked for it.

    Args:
        gradients: coalesced; a missing one has no numbers.
        state: the loss-scale rule's.
        positions: of their variables in `model.trainable_variables`.
        magnitude: whether the largest magnitude is wanted: a pass over the gradients.
        recorded: the number of trainable variables if magnitudes shall be counted, too: a few
            more passes; 0 if not.
    """
    if recorded:
        stats = scaling.gradient_stats(gradients, state)
        places = tf.reshape(tf.constant(positions, tf.int32), [-1, 1])
        return Measured(
            tf.reduce_max(stats.max_magnitude),
            tf.reduce_sum(stats.counts, axis=0),
            tf.scatter_nd(places, stats.underflow, [recorded]),
        )
    nothing = tf.zeros([0])
    if magnitude:
        present = [numbers(gradient) for gradient in gradients if gradient is not None]
        largest = [tf.cast(tf.reduce_max(tf.abs(values)), tf.float32) for values in present]
        return Measured(tf.reduce_max(tf.stack(largest)), nothing, nothing)
    return Measured(tf.constant(math.nan), nothing, nothing)
