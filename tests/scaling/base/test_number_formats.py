"""Exact arithmetic with powers of two, and the checks and suggestions for them."""

import math

import numpy as np
import pytest
import tensorflow as tf

from scaling.base.number_formats import (
    ceil_log2,
    check_power_of_two,
    floor_power_of_two,
    is_power_of_two,
    two_to_the,
)


def normal_numbers():
    """Some float32 numbers between each power of two and the next, both ends included."""
    fractions = [1.0, 1.0 + 2.0**-23, 1.25, 1.5, 2.0 - 2.0**-23]
    return np.array(
        [math.ldexp(fraction, e) for e in range(-126, 128) for fraction in fractions], np.float32
    )


@pytest.mark.parametrize("jit_compile", [False, True])
def test_powers_of_two_are_exact_at_every_exponent(jit_compile):
    """L1: rounding down and up to a power of two agrees with `math.frexp` at every exponent."""
    numbers = normal_numbers()
    down, up = (tf.function(f, jit_compile=jit_compile) for f in (floor_power_of_two, ceil_log2))
    parts = [math.frexp(number) for number in numbers.tolist()]  # in [0.5, 1), and an exponent

    assert [math.ldexp(0.5, e) for _, e in parts] == down(tf.constant(numbers)).numpy().tolist()
    assert [e - (m == 0.5) for m, e in parts] == up(tf.constant(numbers)).numpy().tolist()


@pytest.mark.parametrize("jit_compile", [False, True])
def test_two_to_the_is_exact_at_every_exponent(jit_compile):
    """L1: 2^exponent agrees with `math.ldexp` for all exponents of normal float32 numbers."""
    exponents = range(-126, 128)
    powers = tf.function(two_to_the, jit_compile=jit_compile)(tf.range(-126, 128))

    assert [math.ldexp(1.0, exponent) for exponent in exponents] == powers.numpy().tolist()


@pytest.mark.parametrize("small", [0.0, 2.0**-149, 2.0**-127])
def test_ceil_log2_of_zero_and_subnormal_numbers(small):
    """Numbers below 2^-126 have an exponent of at most -126."""
    assert int(ceil_log2(tf.constant(small, tf.float32))) <= -126


@pytest.mark.parametrize(
    "value",
    [0, -2.0, 3, 2.0**-127, 2.0**127, 2**5000, math.inf, math.nan, True, "8", None, [8.0]],
    ids=lambda value: str(value)[:12],
)
def test_what_is_not_a_power_of_two_in_range_is_an_error(value):
    """L3: only powers of two between 2^-126 and 2^126 are loss scales, whatever their type."""
    assert not is_power_of_two(value)
    with pytest.raises(ValueError, match=r"^`factor` must be a power of two"):
        check_power_of_two("factor", value)


@pytest.mark.parametrize("value", [1, 2.0**-126, 2.0**126, np.float16(0.5), np.int64(8), 2**126])
def test_powers_of_two_of_every_type_are_accepted(value):
    """L3: floats and ints from Python and NumPy, up to both ends of the range."""
    assert is_power_of_two(value)
    check_power_of_two("factor", value)
