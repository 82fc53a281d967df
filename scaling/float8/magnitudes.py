"""The largest magnitude of a tensor, and the scale that it calls for."""

from typing import Any

import tensorflow as tf

from scaling.base.argument_checks import check_bool, check_integer
from scaling.base.number_formats import two_to_the
from scaling.float8.cast import FORMATS

LARGEST_MARGIN = 64
INFINITE = 0x7F800000  # the bits of inf; those of a NaN are larger


def magnitude_bits(x: tf.Tensor) -> tf.Tensor:
    """Returns the bits of the magnitudes in float32, which are ordered as the magnitudes are.

    XLA's maximum of floats leaves NaN out on a CPU. As integers, inf lies above every finite
    number, and NaN above inf.

    Args:
        x: any shape, any float dtype. What is too large for float32 counts as inf.

    Returns:
        The shape of `x`, int32.
    """
    bits = tf.bitcast(tf.cast(x, tf.float32), tf.int32)
    return tf.bitwise.bitwise_and(bits, 0x7FFFFFFF)


def largest_magnitude(x: tf.Tensor) -> tf.Tensor:
    """Returns the largest magnitude of a tensor: shape (), float32.

    It is 0 for a tensor without elements, NaN if there is one, else inf if there is one.

    Example:
        >>> [float(largest_magnitude(x)) for x in ([1.0, -3.0], [float("nan"), 1.0])]
        [3.0, nan]
    """
    # The maximum of nothing is the smallest integer.
    return tf.bitcast(tf.maximum(tf.reduce_max(magnitude_bits(x)), 0), tf.float32)


def is_usable(amax: tf.Tensor) -> tf.Tensor:
    """Returns where magnitudes call for a scale: not for 0, inf and NaN. By the bits, because some
    processors take the smallest numbers for 0.
    """
    bits = tf.bitcast(amax, tf.int32)
    return (bits > 0) & (bits < INFINITE)


def power_of_two_scale(amax: tf.Tensor, limit: float, margin: int) -> tf.Tensor:
    """Returns the smallest power of two that brings magnitudes to at most `limit`.

    Args:
        amax: any shape, float32; positive, finite.
        limit: the largest number of the format.
        margin: number of factors of two by which the scale is larger.

    Returns:
        The shape of `amax`, float32, within [2^-126, 2^126].

    Example:
        >>> power_of_two_scale(tf.constant([448.0, 449.0, 7.0]), 448.0, 0).numpy().tolist()
        [1.0, 2.0, 0.015625]
    """
    exponent = octaves_above(amax, limit) + margin
    return two_to_the(tf.clip_by_value(exponent, -126, 126))


def own_scale(amax: tf.Tensor, dtype: str, margin: int, power_of_two: bool) -> tf.Tensor:
    """Returns the scale of tensors or blocks with these largest magnitudes; 1 for 0, inf and NaN.

    Args:
        amax: any shape, float32.
        dtype: the float8 format.
        margin: as for `power_of_two_scale`.
        power_of_two: whether the scale is a power of two, or else amax / limit * 2^margin.

    Example:
        >>> own_scale(tf.constant([0.0, 3.5, 1e30]), "float8_e4m3fn", 0, True).numpy().tolist()
        [1.0, 0.0078125, 2.4758800785707605e+27]
    """
    usable, limit = is_usable(amax), FORMATS[dtype].largest
    amax = tf.where(usable, amax, limit)
    if power_of_two:
        found = power_of_two_scale(amax, limit, margin)
    else:
        # TensorFlow's graphs multiply by the reciprocal of a constant. In float64 this does not
        # change how the quotient is rounded to float32.
        quotient = tf.cast(amax, tf.float64) / limit * 2.0**margin
        found = tf.cast(tf.clip_by_value(quotient, 2.0**-126, 2.0**126), tf.float32)
    return tf.where(usable, found, 1.0)


def octaves_above(x: tf.Tensor, limit: float) -> tf.Tensor:
    """Returns the smallest integer e with x <= limit * 2^e: the shape of `x`, int32.

    It is computed from the bits: a division would be rounded, and differently under XLA.

    Args:
        x: any shape, float32; positive, finite. Subnormal numbers count as 2^-127 or a little more.
        limit: a positive float32.

    Example:
        >>> octaves_above(tf.constant([448.0, 448.1, 7.0, 7.1]), 448.0).numpy().tolist()
        [0, 1, -6, -5]
    """
    bits, of_limit = tf.bitcast(x, tf.int32), tf.bitcast(tf.constant(limit), tf.int32)
    shift, fraction = tf.bitwise.right_shift, 0x7FFFFF
    above = tf.bitwise.bitwise_and(bits, fraction) > tf.bitwise.bitwise_and(of_limit, fraction)
    return shift(bits, 23) - shift(of_limit, 23) + tf.cast(above, tf.int32)


def check_constants(rule: Any) -> None:
    """Checks what all rules have: the margin, and whether scales are powers of two.

    Raises:
        ValueError: if the margin is out of range.
        TypeError: if `power_of_two` is not a bool.
    """
    check_integer("margin", rule.margin, -LARGEST_MARGIN, LARGEST_MARGIN)
    check_bool("power_of_two", rule.power_of_two)
