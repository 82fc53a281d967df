"""The formats and casts against ml_dtypes, and at their edges."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from versions import XLA_ROUNDS_ONCE

from scaling.float8 import dequantize, losses_of_cast, quantize
from scaling.float8.cast import FORMATS

NUMPY = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_number_of_the_format_comes_back(dtype):
    """All 256 bit patterns survive, at every power of two; what is not a number stays so."""
    codes = np.arange(256, dtype=np.uint8).view(NUMPY[dtype])
    values = codes.astype(np.float32)
    finite = np.isfinite(values)
    for exponent in (-100, -1, 0, 7, 100):
        scale = 2.0**exponent
        found = dequantize(quantize(values * np.float32(scale), scale, dtype), scale).numpy()
        np.testing.assert_array_equal(found[finite], values[finite] * np.float32(scale))
        assert np.isnan(found[np.isnan(values)]).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_cast_is_that_of_ml_dtypes_but_for_what_is_too_large(dtype):
    """100,000 random numbers, over the range of the format and beyond it."""
    rng = np.random.default_rng(0)
    x = np.float32(2.0 ** rng.uniform(-22, 20, 100_000) * rng.choice([-1.0, 1.0], 100_000))
    largest = FORMATS[dtype].largest
    expected = np.clip(x, -largest, largest).astype(NUMPY[dtype]).astype(np.float32)
    np.testing.assert_array_equal(dequantize(quantize(x, 1.0, dtype), 1.0), expected)
    plain = x.astype(NUMPY[dtype]).astype(np.float32)
    saturated, flushed = losses_of_cast(x, 1.0, dtype)
    assert int(saturated) == np.count_nonzero(~np.isfinite(plain)) > 1000
    assert int(flushed) == np.count_nonzero(plain == 0) > 1000


@pytest.mark.parametrize("dtype", FORMATS)
def test_xla_casts_by_way_of_float16_before_tensorflow_2_21(dtype):
    """What differs from one rounding is what two roundings give; docs/float8.md says so."""
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=100_000) * 2.0 ** rng.uniform(-12, 7, 100_000))

    def both_ways(x):
        return dequantize(quantize(x, 1.0, dtype), 1.0)

    once = both_ways(tf.constant(x)).numpy()
    twice = both_ways(tf.constant(x.astype(np.float16).astype(np.float32))).numpy()
    compiled = tf.function(both_ways, jit_compile=True)(tf.constant(x)).numpy()
    assert 50 < np.count_nonzero(once != twice) < 500
    np.testing.assert_array_equal(compiled, once if XLA_ROUNDS_ONCE else twice)


@pytest.mark.parametrize(
    ("dtype", "edge", "beyond"),
    [("float8_e4m3fn", 464.0, 465.0), ("float8_e5m2", 61439.0, 61440.0)],
)
def test_what_is_too_large_saturates(dtype, edge, beyond):
    """Where TensorFlow's own cast makes NaN or inf, and for inf itself."""
    largest = FORMATS[dtype].largest
    x = tf.constant([edge, beyond, -beyond, np.inf, -np.inf, np.nan])
    found = dequantize(quantize(x, 1.0, dtype), 1.0).numpy()
    np.testing.assert_array_equal(found, [largest, largest, -largest, largest, -largest, np.nan])
    assert [int(each) for each in losses_of_cast(x, 1.0, dtype)] == [4, 0]
    assert not np.isfinite(tf.cast(tf.cast(x[1], FORMATS[dtype].dtype), tf.float32))


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_dtypes_are_divided_in_float32_at_least(dtype):
    """A scale beyond float16 does not overflow a float16 tensor."""
    x = tf.constant([2.0, 3.0], dtype)
    found = dequantize(quantize(x, 2.0**-20, "float8_e5m2"), 2.0**-20)
    np.testing.assert_array_equal(found, [57344 * 2.0**-20] * 2)
    found = dequantize(quantize(x, 2.0**-14, "float8_e5m2"), 2.0**-14)
    np.testing.assert_array_equal(found, [2.0, 3.0])


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (2, 3)])
def test_a_scale_may_have_any_shape_that_broadcasts(shape):
    """Also an integer, and sizes that are not known in advance."""
    x, scale = np.float32([[1, 2, 3], [4, 5, 6]]), np.full(shape, 2)

    @tf.function(input_signature=[tf.TensorSpec([None, None]), tf.TensorSpec(None, tf.int64)])
    def seen(x, scale):
        return dequantize(quantize(x, scale, "float8_e4m3fn"), scale, tf.float16)

    np.testing.assert_array_equal(seen(x, scale), x)
    np.testing.assert_array_equal(dequantize(quantize(x, scale, "float8_e4m3fn"), scale), x)


@pytest.mark.parametrize("name", FORMATS)
def test_the_limits_are_those_of_ml_dtypes(name):
    """The largest number, and the dtype of that name."""
    assert FORMATS[name].largest == float(ml_dtypes.finfo(name).max)
    assert FORMATS[name].dtype.name == name
