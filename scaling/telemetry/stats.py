"""Gradient statistics, and the loss scale that they recommend.

The statistics count inf, NaN and zero, and are a histogram of binary exponents.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from scaling.base.number_formats import (
    HALF_FLUSHED,
    HALF_MAX,
    HALF_NORMAL,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    ceil_log2,
    check_power_of_two,
)
from scaling.ops.gradients import Gradient, Structure, at_least_float32, coalesce
from scaling.rules.rule import RuleState

# A magnitude in (2^(e-1), 2^e] is counted in the column of exponent e. Smaller
# magnitudes are counted in the first column, larger ones in the last.
LOWEST_EXPONENT = -96
HIGHEST_EXPONENT = 31
EXPONENTS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
ZERO, INF, NAN = EXPONENTS, EXPONENTS + 1, EXPONENTS + 2
COUNTS = EXPONENTS + 3


class GradientStats(NamedTuple):
    """Counts of gradient elements by magnitude, one row per variable.

    Example:
        >>> import scaling
        >>> state = scaling.FixedLossScale(4.0).initial_state()
        >>> stats = scaling.gradient_stats([tf.constant([0.0, 2.0**-27, 3.0, 4.0])], state)
        >>> [float(stats.flushed(factor)[0]) for factor in (0.5, 1.0, 2.0)]
        [0.25, 0.25, 0.0]
    """

    loss_scale: tf.Tensor  # shape=(), float32: the scale at which the gradients were computed
    # shape=(variables, COUNTS), float32: number of elements with each exponent, then the numbers
    # of zeros, infs and NaNs
    counts: tf.Tensor
    max_magnitude: tf.Tensor  # shape=(variables,), float32: largest finite magnitude, unscaled

    @property
    def size(self) -> tf.Tensor:
        """Number of elements: shape (variables,), float32."""
        return tf.reduce_sum(self.counts, axis=1)

    @property
    def zero_count(self) -> tf.Tensor:
        """Number of zeros, including flushed elements: shape (variables,), float32."""
        return self.counts[:, ZERO]

    @property
    def inf_count(self) -> tf.Tensor:
        """Number of elements that are inf or -inf: shape (variables,), float32."""
        return self.counts[:, INF]

    @property
    def nan_count(self) -> tf.Tensor:
        """Number of elements that are NaN: shape (variables,), float32."""
        return self.counts[:, NAN]

    @property
    def underflow(self) -> tf.Tensor:
        """Fraction of elements that underflow in float16: shape (variables,), float32, in [0, 1].

        These are the elements that are at most 2^-14 after scaling, where float16 begins to lose
        bits. Zeros count too: a true zero looks the same as an element that float16 has flushed.
        """
        low = magnitudes_up_to(HALF_NORMAL / self.loss_scale, self.counts)
        return tf.math.divide_no_nan(low + self.zero_count, self.size)

    def flushed(self, factor: float = 1.0) -> tf.Tensor:
        """Returns the fraction of elements that float16 flushes to zero at a multiple of the scale.

        These are the nonzero elements that are at most 2^-25 after scaling.

        Args:
            factor: the factor by which to multiply the loss scale; a power of two. For example,
                1 means the current scale, 2 the scale after one growth, and 0.5 the scale after
                one backoff.

        Returns:
            Shape (variables,), float32, in [0, 1].

        Raises:
            ValueError: if the factor is not a power of two.
        """
        check_power_of_two("factor", factor)
        return flushed_share(self.counts, self.loss_scale * float(factor))


def gradient_stats(gradients: Structure, state: RuleState) -> GradientStats:
    """Counts gradient elements by magnitude. Does not wait for the device.

    Costs one or two passes over the gradients. If the gradients were computed in float16,
    flushed elements are already zeros, and `flushed()` reports only what a smaller scale would
    flush in addition. If they were computed in float32, `flushed()` is complete for every
    scale from 2^-55 to 2^71, and an upper bound beyond.

    Args:
        gradients: any structure of unscaled gradients, as `unscale_gradients` returns them:
            any shape and float dtype. Rows of `tf.IndexedSlices` that share an index are
            summed first. None counts as a gradient without elements.
        state: the rule's state that was passed to `scale_loss`.

    Returns:
        The counts, one row per gradient in the order of `tf.nest.flatten`. Counts above 2^24
        are rounded to float32.

    Raises:
        TypeError: if a gradient does not have a float dtype, or the state has no `loss_scale`.

    Example:
        >>> import scaling
        >>> state = scaling.FixedLossScale(1.0).initial_state()
        >>> stats = scaling.gradient_stats({"w": tf.constant([0.0, 2.0**-25, -1.5])}, state)
        >>> int(stats.zero_count[0]), float(stats.max_magnitude[0])
        (1, 1.5)
    """
    loss_scale = tf.convert_to_tensor(state.loss_scale)
    rows = [count_elements(gradient) for gradient in tf.nest.flatten(gradients)]
    counts, largest = zip(*rows, strict=True) if rows else ([], [])
    return GradientStats(
        loss_scale=loss_scale,
        counts=tf.reshape(tf.stack(counts) if counts else (), [-1, COUNTS]),
        max_magnitude=tf.reshape(tf.stack(largest) if largest else (), [-1]),
    )


def count_elements(gradient: Gradient) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a gradient's counts, shape (COUNTS,), and its largest finite magnitude, shape ()."""
    if gradient is None:
        return tf.zeros([COUNTS]), tf.zeros([])
    gradient = coalesce(gradient)
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    magnitude = tf.abs(at_least_float32("gradients", tf.convert_to_tensor(values)))
    magnitude = tf.reshape(tf.cast(in_range_of_float32(magnitude), tf.float32), [-1])
    finite = tf.math.is_finite(magnitude)
    column = tf.clip_by_value(ceil_log2(magnitude) - LOWEST_EXPONENT, 0, EXPONENTS - 1)
    column = tf.where(magnitude == 0, ZERO, column)
    column = tf.where(finite, column, tf.where(tf.math.is_nan(magnitude), NAN, INF))
    # Not tf.math.bincount, because it computes its output size at run time, and XLA needs a
    # constant.
    counts = tf.raw_ops.DenseBincount(
        input=column, size=COUNTS, weights=tf.zeros([0], tf.int32), binary_output=False
    )
    # Append a 0, so that the maximum is 0 for a gradient without elements.
    largest = tf.reduce_max(tf.concat([tf.where(finite, magnitude, 0.0), [0.0]], axis=0))
    return tf.cast(counts, tf.float32), largest


def in_range_of_float32(magnitude: tf.Tensor) -> tf.Tensor:
    """Returns magnitudes that stay finite, and stay different from 0, as float32."""
    if magnitude.dtype == tf.float32:
        return magnitude
    # TensorFlow takes float32 below 2^-126 for 0.
    inside = tf.clip_by_value(magnitude, 2.0**-126, tf.float32.max)
    as_it_is = (magnitude == 0) | ~tf.math.is_finite(magnitude)
    return tf.where(as_it_is, magnitude, inside)


def flushed_share(counts: tf.Tensor, loss_scale: tf.Tensor) -> tf.Tensor:
    """Returns the fraction of elements that are nonzero but would be flushed to zero by float16.

    Args:
        counts: shape (rows, COUNTS), float32.
        loss_scale: shape (), float32: a power of two.

    Returns:
        Shape (rows,), float32; 0 where there are no elements.
    """
    flushed = magnitudes_up_to(HALF_FLUSHED / loss_scale, counts)
    return tf.math.divide_no_nan(flushed, tf.reduce_sum(counts, axis=1))


def magnitudes_up_to(bound: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Returns the number of nonzero elements up to `bound`, a power of two: shape (rows,).

    The first and the last column hold everything beyond them. Where the bound lies there too, they
    are counted whole, which is at most too many.
    """
    exponents = tf.range(LOWEST_EXPONENT, HIGHEST_EXPONENT + 1)
    last = tf.maximum(ceil_log2(bound), LOWEST_EXPONENT)
    return tf.reduce_sum(tf.where(exponents <= last, counts[:, :EXPONENTS], 0.0), axis=1)


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A recommended loss scale, and what float16 would flush to zero at that scale.

    `str` returns the recommendation as a text.

    Example:
        >>> advice = Recommendation(8192.0, {"conv1": 0.004}, "Reason.")
        >>> print(advice)
        2^13 would lose 0.40% of conv1. Reason.
    """

    loss_scale: float  # a power of two
    # Fraction of each variable's elements that would be flushed to zero, largest first;
    # variables that would lose nothing are left out.
    lost: dict[str, float]
    reason: str

    def __str__(self) -> str:
        """Returns the recommendation as one to three sentences."""
        losses = [f"{describe_share(share)} of {name}" for name, share in self.lost.items()]
        lost = ", ".join(losses[:5]) + (f" and {len(losses) - 5} more" if len(losses) > 5 else "")
        return f"2^{math.log2(self.loss_scale):.0f} would lose {lost or 'nothing'}. {self.reason}"


def recommend(
    stats: GradientStats, names: Sequence[str] | None = None, headroom_bits: int = 4
) -> Recommendation:
    """Returns the largest loss scale that leaves headroom above the largest gradient.

    If a gradient contains inf or NaN, returns half of the scale at which it was computed.
    Waits for the device.

    Args:
        stats: statistics of one step's gradients, preferably computed in float32 (see
            `gradient_stats`).
        names: one name per gradient, such as `[v.path for v in model.trainable_variables]`;
            with None, the gradients are numbered.
        headroom_bits: number of factors of two to leave between the largest gradient and
            65504; the default is that of `HeadroomLossScale`.

    Returns:
        The scale, and the fraction of each variable's elements that it would flush to zero.

    Raises:
        ValueError: if the numbers of names and gradients differ, or two names are the same.

    Example:
        >>> import scaling
        >>> state = scaling.FixedLossScale(1.0).initial_state()
        >>> gradient = tf.constant([2.0**-5] * 3 + [2.0**-50])
        >>> print(recommend(scaling.gradient_stats([gradient], state), ["dense/kernel"]))
        2^16 would lose 25.00% of dense/kernel. The largest gradient, 0.03125 in dense/kernel, ...
    """
    variables = int(stats.max_magnitude.shape[0])
    names = [f"gradient {index}" for index in range(variables)] if names is None else names
    # What a gradient would lose is told under its name, and `name` is the same in many layers.
    if len(set(names)) < len(names) or len(names) != variables:
        raise ValueError(f"`names` must be {variables} different names; got {len(set(names))}")
    magnitudes = np.asarray(stats.max_magnitude)
    scale = float(stats.loss_scale)
    bad = int(np.sum(stats.inf_count) + np.sum(stats.nan_count))
    if bad:
        return advise(
            stats,
            names,
            scale / 2.0,
            f"At 2^{math.log2(scale):.0f}, {bad} elements were inf or NaN. Try at most half of "
            "that scale; a smaller one may not help if the model itself overflows.",
        )
    if not magnitudes.any():
        return Recommendation(
            min(scale * 2.0**20, LARGEST_SCALE),
            {},
            "Every gradient is zero: either float16 has flushed them, or they are truly zero. "
            "Try a scale that is 2^20 times as large.",
        )
    largest = int(np.argmax(magnitudes))
    largest_scale = HALF_MAX / 2.0**headroom_bits / float(magnitudes[largest])
    return advise(
        stats,
        names,
        2.0 ** math.floor(math.log2(largest_scale)),
        f"The largest gradient, {magnitudes[largest]:.4g} in {names[largest]}, stays at least "
        f"{headroom_bits} factors of two below the largest float16.",
    )


def advise(stats: GradientStats, names: Sequence[str], scale: float, reason: str) -> Recommendation:
    """Returns a recommendation of `scale`, clipped to the valid range, with what it would lose."""
    scale = min(max(scale, SMALLEST_SCALE), LARGEST_SCALE)
    shares = np.asarray(flushed_share(stats.counts, tf.constant(scale)))
    order = sorted(range(len(names)), key=lambda index: -shares[index])
    lost = {names[index]: float(shares[index]) for index in order if shares[index]}
    return Recommendation(scale, lost, reason)


def describe_share(share: float) -> str:
    """Returns a fraction as text, in percent.

    Example:
        >>> describe_share(0.004), describe_share(1e-6)
        ('0.40%', 'less than 0.01%')
    """
    return f"{share:.2%}" if share >= 1e-4 else "less than 0.01%"
