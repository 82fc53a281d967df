"""The limits of float16, and exact arithmetic with powers of two."""

import math
from typing import Any

import tensorflow as tf

from scaling.base.argument_checks import is_number, shown

# All scales in this range, and their reciprocals, are normal float32 numbers: scaling is exact.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126

SMALLEST_NORMAL = 2.0**-126  # of float32
HALF_MAX = 65504.0  # the largest finite float16
# The largest magnitude that float16 rounds to 0: half the smallest positive float16,
# because ties round to even.
HALF_FLUSHED = 2.0**-25
HALF_NORMAL = 2.0**-14  # the smallest normal float16; below it, precision is lost
# Number of factors of two between 2^-24, the smallest positive float16, and 2^16, just above
# HALF_MAX.
HALF_BITS = 40


def floor_power_of_two(x: tf.Tensor) -> tf.Tensor:
    """Returns the largest power of two that is at most `x`, exactly, by clearing the fraction bits.

    Args:
        x: any shape, float32; positive, normal, finite.

    Example:
        >>> floor_power_of_two(tf.constant([7.9, 8.0, 2.0**-100])).numpy().tolist() == [
        ...     4.0, 8.0, 2.0**-100]
        True
    """
    return tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), 0x7F800000), tf.float32)


def two_to_the(exponent: tf.Tensor) -> tf.Tensor:
    """Returns 2^exponent exactly, which `tf.pow` does not guarantee.

    Args:
        exponent: any shape, int32, within [-126, 127].

    Example:
        >>> float(two_to_the(tf.constant(-3)))
        0.125
    """
    return tf.bitcast(tf.bitwise.left_shift(exponent + 127, 23), tf.float32)


def ceil_log2(x: tf.Tensor) -> tf.Tensor:
    """Returns the smallest integer e with x <= 2^e; exact for normal numbers.

    Args:
        x: any shape, float32; not negative. For 0 and subnormals the result is at most -126;
            for inf and NaN it is meaningless.

    Example:
        >>> ceil_log2(tf.constant([4.0, 4.1, 0.5])).numpy().tolist()
        [2, 3, -1]
    """
    bits = tf.bitcast(x, tf.int32)
    fraction = tf.bitwise.bitwise_and(bits, 0x7FFFFF)
    return tf.bitwise.right_shift(bits, 23) - 127 + tf.cast(fraction > 0, tf.int32)


def check_power_of_two(name: str, value: Any) -> None:
    """Raises ValueError, naming the argument, unless `value` can be a loss scale.

    Only powers of two scale and unscale gradients without changing their bits.
    """
    if not is_power_of_two(value):
        raise ValueError(
            f"`{name}` must be a power of two from 2^-126 to 2^126; got {shown(value)}"
        )


def is_power_of_two(value: Any) -> bool:
    """Returns whether `value` is a number that can be a loss scale: a power of two in range.

    Example:
        >>> is_power_of_two(0.25), is_power_of_two(3), is_power_of_two(2.0**127)
        (True, False, False)
    """
    try:
        mantissa, exponent = math.frexp(value) if is_number(value) else (0.0, 0)
    except OverflowError:  # an int beyond every float
        return False
    return mantissa == 0.5 and SMALLEST_SCALE <= 2.0 ** (exponent - 1) <= LARGEST_SCALE
