"""What stands in the gradients: how many are inf, NaN or zero, and how large the others are."""

from typing import Any, NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import as_tensor, loss_scale_of
from scaling.base.number_formats import HALF_FLUSHED, HALF_NORMAL, ceil_log2, check_power_of_two
from scaling.ops.gradients import at_least_float32, coalesce

# A magnitude in (2^(e-1), 2^e] is counted under e; what lies outside goes to the end columns.
LOWEST_EXPONENT = -96
HIGHEST_EXPONENT = 31
EXPONENTS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
ZERO, INF, NAN = EXPONENTS, EXPONENTS + 1, EXPONENTS + 2
COUNTS = EXPONENTS + 3


class GradientStats(NamedTuple):
    """The counts of some gradients, one row a variable; every share follows from them.

    Example:
        >>> import scaling
        >>> state = scaling.FixedLossScale(4.0).initial_state()
        >>> stats = scaling.gradient_stats([tf.constant([0.0, 2.0**-27, 3.0, 4.0])], state)
        >>> [float(stats.flushed(factor)[0]) for factor in (0.5, 1.0, 2.0)]
        [0.25, 0.25, 0.0]
    """

    loss_scale: tf.Tensor  # shape=(), float32: the scale the gradients were computed at
    counts: tf.Tensor  # shape=(variables, COUNTS), float32: elements by exponent, 0, inf, NaN
    max_magnitude: tf.Tensor  # shape=(variables,), float32: of the finite ones, unscaled

    @property
    def size(self) -> tf.Tensor:
        """Elements: shape (variables,), float32."""
        return tf.reduce_sum(self.counts, axis=1)

    @property
    def zero_count(self) -> tf.Tensor:
        """Elements that are zero, flushed ones among them: shape (variables,), float32."""
        return self.counts[:, ZERO]

    @property
    def inf_count(self) -> tf.Tensor:
        """Elements that are inf or -inf: shape (variables,), float32."""
        return self.counts[:, INF]

    @property
    def nan_count(self) -> tf.Tensor:
        """Elements that are NaN: shape (variables,), float32."""
        return self.counts[:, NAN]

    @property
    def underflow(self) -> tf.Tensor:
        """The share of elements that underflow in float16: shape (variables,), float32, in [0, 1].

        Those are zero when they are scaled, or at most 2^-14, where float16 begins to lose bits.
        True zeros are among them: float16 does not tell one from what it flushed.
        """
        low = magnitudes_up_to(HALF_NORMAL / self.loss_scale, self.counts)
        return tf.math.divide_no_nan(low + self.zero_count, self.size)

    def flushed(self, factor: float = 1.0) -> tf.Tensor:
        """Returns the share of elements that float16 flushes to zero, now or at another scale.

        Those are the elements, not zero, that are at most 2^-25 when they are scaled.

        Args:
            factor: what to multiply the loss scale by; a power of two. 1 is now, 2 and 0.5
                are one growth and one backoff away.

        Returns:
            Shape (variables,), float32, in [0, 1].

        Raises:
            ValueError: if the factor is no power of two.
        """
        check_power_of_two("factor", factor, suggestion=2.0)
        return flushed_share(self.counts, self.loss_scale * factor)


def gradient_stats(gradients: Any, state: Any) -> GradientStats:
    """Counts what stands in the gradients. Does not wait for the device; costs a pass or two.

    What has been through float16 has already lost what it flushes now: such elements are
    zeros, and `flushed()` then says only what a lower scale would lose. Gradients of a
    float32 pass show all of it, at every scale.

    Args:
        gradients: any structure of unscaled gradients, as `unscale_gradients` returns them:
            any shape and float dtype; rows of `tf.IndexedSlices` are summed first; None has
            no elements.
        state: the state that their loss was scaled with.

    Returns:
        One row for each gradient, in the order of `tf.nest.flatten`. A count above 2^24 is
        rounded to float32.

    Raises:
        TypeError: if a gradient is not of a float dtype, or the state holds no scale.

    Example:
        >>> import scaling
        >>> state = scaling.FixedLossScale(1.0).initial_state()
        >>> stats = scaling.gradient_stats({"w": tf.constant([0.0, 2.0**-25, -1.5])}, state)
        >>> int(stats.zero_count[0]), float(stats.max_magnitude[0])
        (1, 1.5)
    """
    loss_scale = tf.convert_to_tensor(loss_scale_of(state))
    rows = [row_of(gradient) for gradient in tf.nest.flatten(gradients)]
    counts, largest = zip(*rows, strict=True) if rows else ([], [])
    return GradientStats(
        loss_scale=loss_scale,
        counts=tf.reshape(tf.stack(counts) if counts else (), [-1, COUNTS]),
        max_magnitude=tf.reshape(tf.stack(largest) if largest else (), [-1]),
    )


def row_of(gradient: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns one gradient's counts, shape (COUNTS,), and its largest finite magnitude, ()."""
    if gradient is None:
        return tf.zeros([COUNTS]), tf.zeros([])
    gradient = coalesce(gradient)
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    magnitude = tf.abs(tf.cast(at_least_float32(as_tensor("gradients", values)), tf.float32))
    magnitude = tf.reshape(magnitude, [-1])
    finite = tf.math.is_finite(magnitude)
    column = tf.clip_by_value(ceil_log2(magnitude) - LOWEST_EXPONENT, 0, EXPONENTS - 1)
    column = tf.where(magnitude == 0, ZERO, column)
    column = tf.where(finite, column, tf.where(tf.math.is_nan(magnitude), NAN, INF))
    # Not tf.math.bincount: it computes its size, and XLA wants a constant.
    counts = tf.raw_ops.DenseBincount(
        input=column, size=COUNTS, weights=tf.zeros([0], tf.int32), binary_output=False
    )
    # The 0 is for a gradient without elements.
    largest = tf.reduce_max(tf.concat([tf.where(finite, magnitude, 0.0), [0.0]], axis=0))
    return tf.cast(counts, tf.float32), largest


def flushed_share(counts: tf.Tensor, loss_scale: tf.Tensor) -> tf.Tensor:
    """Returns the share of elements that are not zero, but would be in float16.

    Args:
        counts: shape (rows, COUNTS), float32.
        loss_scale: shape (), float32: a power of two.

    Returns:
        Shape (rows,), float32; 0 where there are no elements.
    """
    flushed = magnitudes_up_to(HALF_FLUSHED / loss_scale, counts)
    return tf.math.divide_no_nan(flushed, tf.reduce_sum(counts, axis=1))


def magnitudes_up_to(bound: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Returns how many elements of each row are not zero and at most a power of two: (rows,)."""
    exponents = tf.range(LOWEST_EXPONENT, HIGHEST_EXPONENT + 1)
    return tf.reduce_sum(
        tf.where(exponents <= ceil_log2(bound), counts[:, :EXPONENTS], 0.0), axis=1
    )
