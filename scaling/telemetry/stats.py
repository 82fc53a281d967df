"""Gradient statistics: counts of inf, NaN and zero, and a histogram of binary exponents."""

from typing import NamedTuple

import tensorflow as tf

from scaling.base.number_formats import HALF_FLUSHED, HALF_NORMAL, ceil_log2, check_power_of_two
from scaling.base.types import Gradient, RuleState, Structure
from scaling.ops.gradients import at_least_float32, coalesce

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
