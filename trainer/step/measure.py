"""Measures the summed, unscaled gradients: their norm, largest magnitude and underflow."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

import scaling
from trainer.step.gradients import (
    gradient_values,
    half_squared_norm,
    half_squared_norm_in_rows,
)
from trainer.step.types import Gradient, ScaleState


def global_norm(gradients: list[Gradient], *, in_rows: bool = False) -> tf.Tensor:
    """Returns the 2-norm of all gradients together: shape (), float32.

    The norm is finite only if every element is. It is also infinite if only an element's square
    overflows, because Adam would store that square: a bfloat16 gradient of 1e30 is finite, but its
    square is not.

    Args:
        gradients: the gradients.
        in_rows: whether to add squares as XLA does fast on a CPU.
    """
    half = half_squared_norm_in_rows if in_rows else half_squared_norm
    return tf.sqrt(2.0 * tf.add_n([half(gradient) for gradient in gradients]))


class Measured(NamedTuple):
    """The measurements of a step; see the fields of `Outcome` with the same names."""

    max_magnitude: tf.Tensor
    magnitude_counts: tf.Tensor
    underflow: tf.Tensor


def measure(
    gradients: list[Gradient],
    scale_state: ScaleState,
    positions: Sequence[int],
    *,
    magnitude: bool,
    recorded: int,
) -> Measured:
    """Computes the measurements of the unscaled gradients that the rule or the user needs.

    Args:
        gradients: the coalesced gradients; a gradient that is None has no values.
        scale_state: the loss-scale rule's state.
        positions: positions of their variables in `model.trainable_variables`.
        magnitude: whether to find the largest magnitude, which takes a pass over the gradients.
        recorded: number of trainable variables if magnitudes are to be counted too, which takes a
            few more passes; 0 if not.
    """
    if recorded:
        stats = scaling.gradient_stats(gradients, scale_state)
        places = tf.reshape(tf.constant(positions, tf.int32), [-1, 1])
        return Measured(
            tf.reduce_max(stats.max_magnitude),
            tf.reduce_sum(stats.counts, axis=0),
            tf.scatter_nd(places, stats.underflow, [recorded]),
        )
    nothing = tf.zeros([0])
    if magnitude:
        present = [gradient_values(gradient) for gradient in gradients if gradient is not None]
        largest = [tf.cast(tf.reduce_max(tf.abs(values)), tf.float32) for values in present]
        return Measured(tf.reduce_max(tf.stack(largest)), nothing, nothing)
    return Measured(tf.constant(math.nan), nothing, nothing)
