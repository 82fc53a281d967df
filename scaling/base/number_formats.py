"""Powers of two, and where float16 ends: the arithmetic that all of this room rests on."""

import math
from typing import Any

import tensorflow as tf

from scaling.base.argument_checks import is_number

# Every scale and its reciprocal is a normal float32, so scaling loses no bit.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126

HALF_MAX = 65504.0  # the largest finite float16
# The largest magnitude that float16 rounds to 0: half its smallest number, a tie, goes to even.
HALF_FLUSHED = 2.0**-25
HALF_NORMAL = 2.0**-14  # the smallest float16 that has all of its 11 bits
HALF_BITS = 40  # between the two: 2^15 < 65504 < 2^16


def floor_power_of_two(x: tf.Tensor) -> tf.Tensor:
    """Returns the largest power of two that is at most `x`. Exact: it clears the fraction's bits.

    Args:
        x: any shape, float32; positive, normal, finite.

    Example:
        >>> floor_power_of_two(tf.constant([7.9, 8.0, 2.0**-100])).numpy().tolist() == [
        ...     4.0, 8.0, 2.0**-100]
        True
    """
    return tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), 0x7F800000), tf.float32)


def two_to_the(exponent: tf.Tensor) -> tf.Tensor:
    """Returns 2^exponent, exactly; `tf.pow` promises no such thing.

    Args:
        exponent: any shape, int32, within [-126, 127].

    Example:
        >>> float(two_to_the(tf.constant(-3)))
        0.125
    """
    return tf.bitcast(tf.bitwise.left_shift(exponent + 127, 23), tf.float32)


def ceil_log2(x: tf.Tensor) -> tf.Tensor:
    """Returns the smallest integer e with x <= 2^e. Exact, for normal numbers.

    Args:
        x: any shape, float32; not negative. 0 and subnormals are at most 2^-126; what it
            returns for inf and NaN means nothing.

    Example:
        >>> ceil_log2(tf.constant([4.0, 4.1, 0.5])).numpy().tolist()
        [2, 3, -1]
    """
    bits = tf.bitcast(x, tf.int32)
    fraction = tf.bitwise.bitwise_and(bits, 0x7FFFFF)
    return tf.bitwise.right_shift(bits, 23) - 127 + tf.cast(fraction > 0, tf.int32)


def check_power_of_two(name: str, value: float, suggestion: float | None = None) -> None:
    """Raises ValueError, naming the argument, unless `value` is a power of two in range.

    Args:
        name: the argument.
        value: what was given.
        suggestion: what to use instead; None suggests the nearest power of two.
    """
    in_range = is_number(value) and SMALLEST_SCALE <= as_float(value) <= LARGEST_SCALE
    if not in_range or math.frexp(value)[0] != 0.5:
        raise ValueError(
            f"`{name}` must be a power of two between 2^-126 and 2^126; got {value!r}. Only "
            "multiplying by a power of two, and dividing again, returns the same bits. "
            f"Use {suggestion or nearest_power_of_two(value)!r}."
        )


def nearest_power_of_two(value: Any) -> float:
    """Returns the power of two to suggest in place of `value`."""
    if not is_number(value) or not 0 < as_float(value) < math.inf:
        return 2.0**15
    return 2.0 ** min(max(round(math.log2(value)), -126), 126)


def as_float(value: Any) -> float:
    """Returns a number as a Python float; an int beyond all floats becomes inf."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
