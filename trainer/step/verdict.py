"""The verdict: measures the summed, unscaled gradients, judges whether to apply them, and clips."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

import scaling
from trainer.step.settings import Updates
from trainer.step.types import Gradient, ScaleState, Values


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


def judge(
    *,
    losses_finite: tf.Tensor,
    statistics_finite: tf.Tensor,
    gradient_norm: tf.Tensor,
) -> tf.Tensor:
    """Decides whether a step is applied: only if everything in it was finite on every replica.

    One inf or NaN in any gradient makes the global norm non-finite, so testing the norm tests
    every element. The norm is computed in float32 from the unscaled sum over replicas, so it also
    covers an overflow in the sum, in the unscaling, and in the squares that Adam would keep.

    Every argument is a result of the all-reduce, so every replica reaches the same verdict
    without another collective.

    Args:
        losses_finite: whether the unscaled loss was finite on every replica: shape (), bool.
        statistics_finite: whether the variables that the step assigns, but for the weights, stay
            finite; see `stay_finite`: shape (), bool.
        gradient_norm: global norm of the summed, unscaled gradients, before clipping: shape (),
            float32.

    Returns:
        Whether to apply the step: shape (), bool.

    Source:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2, for skipping an
        update whose gradients are not finite.

    Example:
        >>> good, norm = tf.constant(True), tf.constant(float("inf"))
        >>> bool(judge(losses_finite=good, statistics_finite=good, gradient_norm=norm))
        False
    """
    return losses_finite & statistics_finite & tf.math.is_finite(gradient_norm)


def stay_finite(written: Values, before: Values) -> tf.Tensor:
    """Returns whether every variable that is finite now would stay finite: shape (), bool.

    A moving average that becomes inf or NaN would never become finite again.

    Args:
        written: what would be assigned; floats are already those of all replicas.
        before: the values of the same variables before the step.
    """
    floats = {position: value for position, value in written.items() if value.dtype.is_floating}
    if not floats:
        return tf.constant(True)
    now = tf.stack([scaling.all_finite(value) for value in floats.values()])
    earlier = tf.stack([scaling.all_finite(before[position]) for position in floats])
    return tf.reduce_all(now | ~earlier)


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
