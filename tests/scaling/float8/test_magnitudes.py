"""Largest magnitudes and the scales for them, against NumPy, with inf and NaN, eager and compiled."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

from scaling.float8.cast import FORMATS
from scaling.float8.magnitudes import (
    largest_magnitude,
    octaves_above,
    own_scale,
)

NUMBERS = st.floats(width=32)  # also inf, NaN, -0 and subnormal numbers


@example([math.nan, math.inf])
@example([])
@given(st.lists(NUMBERS, max_size=8))
def test_the_largest_magnitude_is_that_of_numpy(numbers):
    """0 for nothing; NaN and inf are not left out, as XLA's maximum of floats would leave NaN."""
    x = np.array(numbers, np.float32)
    expected = np.max(np.abs(x), initial=0.0)
    found = largest_magnitude(x).numpy()
    np.testing.assert_array_equal(found, expected)
    assert not np.signbit(found)


def test_a_compiled_maximum_does_not_leave_nan_out():
    """On a CPU, XLA's own maximum of these is 3."""
    compiled = tf.function(largest_magnitude, jit_compile=True)
    assert math.isnan(compiled(tf.constant([1.0, math.nan, 3.0])))
    assert compiled(tf.constant([1.0, -math.inf, 3.0])) == math.inf
    assert compiled(tf.constant([-1e-40, 0.0])) == np.float32(1e-40)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_dtypes_are_measured_in_float32(dtype):
    """Float64 has numbers beyond it, which count as inf."""
    assert float(largest_magnitude(tf.constant([1.5, -2.5], dtype))) == 2.5
    assert float(largest_magnitude(tf.constant([1e300], tf.float64))) == math.inf


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("margin", [-3, 0, 2])
def test_a_scale_is_the_rounded_quotient_or_the_power_of_two_above(dtype, margin):
    """Of 20,000 magnitudes, and of those around the powers of two times the largest number."""
    limit, rng = np.float32(FORMATS[dtype].largest), np.random.default_rng(0)
    edges = limit * np.float32(2.0) ** np.arange(-60, 60, dtype=np.float32)
    around = [np.nextafter(edges, np.float32(to)) for to in (0, np.inf)]
    amax = np.concatenate([np.float32(2.0 ** rng.uniform(-90, 90, 20_000)), edges, *around])
    quotient = amax / limit * np.float32(2.0**margin)
    mantissa, exponent = np.frexp(amax.astype(np.float64) / FORMATS[dtype].largest)
    power = np.float32(2.0) ** (exponent - (mantissa == 0.5) + margin)
    for graph in (tf.function, lambda function: function):
        scales = graph(lambda x: [own_scale(x, dtype, margin, each) for each in (True, False)])
        found = scales(tf.constant(amax))
        np.testing.assert_array_equal(found[0], power)
        np.testing.assert_array_equal(found[1], quotient)


@pytest.mark.parametrize("power_of_two", [True, False])
def test_what_calls_for_no_scale_has_one(power_of_two):
    """The scale of 0, inf and NaN is 1; that of every other magnitude is within its bounds."""
    amax = tf.constant([0.0, math.inf, math.nan, 2.0**-149, 3.4e38])
    for margin in (-64, 64):
        found = own_scale(amax, "float8_e5m2", margin, power_of_two).numpy()
        np.testing.assert_array_equal(found[:3], 1.0)
        assert ((found >= 2.0**-126) & (found <= 2.0**126)).all()


@given(st.floats(2.0**-126, 2.0**127, width=32), st.sampled_from([1.0, 448.0, 57344.0]))
def test_octaves_are_counted_from_the_bits(x, limit):
    """The smallest e with x <= limit * 2^e, in exact arithmetic."""
    exponent = int(octaves_above(tf.constant(x), limit))
    assert x <= limit * 2.0**exponent
    assert x > limit * 2.0 ** (exponent - 1)
