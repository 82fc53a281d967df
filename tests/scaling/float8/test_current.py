"""`CurrentScaling` against NumPy and torchao, and over shares of a batch."""

import contextlib
import math
import warnings

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling.float8 import CurrentScaling, dequantize, losses_of_cast, quantize
from scaling.float8.cast import FORMATS

NUMPY = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
NUMBERS = st.one_of(
    st.just(0.0),
    st.floats(2.0**-60, 2.0**60, width=32),
    st.floats(-(2.0**60), -(2.0**-60), width=32),
)
TENSORS = st.lists(NUMBERS, min_size=1, max_size=12).map(lambda row: np.array(row, np.float32))
RULES = st.builds(
    CurrentScaling,
    dtype=st.sampled_from([*FORMATS]),
    margin=st.integers(-2, 3),
    power_of_two=st.booleans(),
)


def cast(rule, x):
    """What a product sees of a tensor, its scale, and how many numbers saturate and flush."""
    scale = rule.choose_scale(rule.initial_state(), rule.amax(x))
    seen = dequantize(quantize(x, scale, rule.dtype), scale)
    return seen.numpy(), scale, *(int(each) for each in losses_of_cast(x, scale, rule.dtype))


@settings(max_examples=40)
@given(RULES, TENSORS)
def test_a_cast_is_that_of_numpy(rule, x):
    """The scale is the quotient of the magnitudes or the power of two above it, and the numbers are
    those of ml_dtypes; what saturates and what flushes is counted.
    """
    limit, largest = np.float32(FORMATS[rule.dtype].largest), np.max(np.abs(x))
    scale = largest / limit * np.float32(2.0**rule.margin)
    if rule.power_of_two and largest:
        mantissa, exponent = math.frexp(largest / FORMATS[rule.dtype].largest)
        scale = np.float32(2.0 ** (exponent - (mantissa == 0.5) + rule.margin))
    ratio = x / (scale if largest else np.float32(1))
    expected = np.clip(ratio, -limit, limit).astype(NUMPY[rule.dtype]).astype(np.float32)
    with np.errstate(over="ignore"):
        plain = ratio.astype(NUMPY[rule.dtype]).astype(np.float32)

    seen, found, saturated, flushed = cast(rule, x)
    assert float(found) == (scale if largest else 1.0)
    np.testing.assert_array_equal(seen, expected * found)
    assert saturated == np.count_nonzero(~np.isfinite(plain))
    assert flushed == np.count_nonzero((plain == 0) & (ratio != 0))
    assert rule.margin < 0 or not saturated


@settings(max_examples=40)
@given(st.sampled_from([*FORMATS]), TENSORS, st.integers(0, 3))
def test_a_cast_is_as_exact_as_the_format(dtype, x, margin):
    """The error is at most half a unit in the last place: eps / 2 of the number, or half of the
    smallest number times the scale. A power of two adds no rounding of its own.
    """
    info = ml_dtypes.finfo(NUMPY[dtype])
    seen, scale, *_ = cast(CurrentScaling(dtype, margin), x)
    bound = np.maximum(
        np.abs(x) * (float(info.eps) / 2), float(scale) * float(info.smallest_subnormal) / 2
    )
    assert (np.abs(seen.astype(np.float64) - x) <= bound).all()


@settings(max_examples=40)
@given(st.sampled_from([*FORMATS]), st.integers(-60, 60), st.integers(0, 2**32 - 1))
def test_numbers_of_the_format_come_back_at_any_power_of_two(dtype, exponent, seed):
    """From 1 up to the largest, times a power of two: no bit changes."""
    codes = np.arange(256, dtype=np.uint8).view(NUMPY[dtype]).astype(np.float32)
    codes = codes[np.isfinite(codes) & (np.abs(codes) >= 1)]
    chosen = np.random.default_rng(seed).choice(codes, 20)
    x = chosen * np.float32(2.0**exponent)
    np.testing.assert_array_equal(cast(CurrentScaling(dtype), x)[0], x)


@settings(max_examples=40)
@given(RULES, st.lists(TENSORS, min_size=1, max_size=4))
def test_the_maximum_over_shares_gives_the_scale_of_one_device(rule, shares):
    """Every share, cast at that scale, is what it is in the whole batch, bit for bit."""
    whole = np.concatenate(shares)
    seen, scale, *_ = cast(rule, whole)
    amax = tf.reduce_max([rule.amax(share) for share in shares])
    agreed = rule.choose_scale(rule.initial_state(), amax)
    assert agreed.numpy().tobytes() == scale.numpy().tobytes()
    parts = [dequantize(quantize(share, agreed, rule.dtype), agreed) for share in shares]
    assert tf.concat(parts, axis=0).numpy().tobytes() == seen.tobytes()


def test_a_rule_without_memory_passes_through_loops_and_checkpoints():
    """Its state is an empty structure, which a loop of TensorFlow carries."""
    rule = CurrentScaling()

    @tf.function
    def last_scale(steps):
        state, scale = rule.initial_state(), tf.constant(0.0)
        for x in steps:
            scale = rule.choose_scale(state, rule.amax(x))
            state = rule.advance(state, rule.amax(x))
        return scale

    assert float(last_scale(tf.constant([[1.0], [3.5]]))) == 2.0**-7
    assert tf.nest.flatten(rule.initial_state((3,))) == []


def test_a_tensor_that_is_not_finite_stays_recognisable():
    """NaN stays NaN and inf counts as saturated, at a scale of 1."""
    seen, scale, saturated, _ = cast(CurrentScaling(), np.float32([1.0, np.nan, np.inf]))
    np.testing.assert_array_equal(seen, [1.0, np.nan, 448.0])
    assert (float(scale), saturated) == (1.0, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", FORMATS)
def test_scales_are_those_of_torchao(dtype):
    """Its dynamic scaling multiplies by the reciprocal, so ours is 1 / theirs; 10,000 tensors with
    powers of two, and quotients rounded once instead of twice.
    """
    torch = pytest.importorskip("torch", reason="needs the extra: pip install -e '.[oracles]'")
    with warnings.catch_warnings(), contextlib.redirect_stderr(None):
        warnings.simplefilter("ignore")  # of its own code, while it is imported
        utils = pytest.importorskip("torchao.float8.float8_utils")
    rng = np.random.default_rng(0)
    tensors = np.float32(rng.normal(size=(10_000, 8)) * 2.0 ** rng.uniform(-30, 60, (10_000, 1)))
    largest = np.abs(tensors).max(axis=1)
    rule = CurrentScaling(dtype)
    ours = rule.choose_scale(rule.initial_state(), largest).numpy()
    one = rule.choose_scale(rule.initial_state(), rule.amax(tensors[0]))
    theirs = utils.amax_to_scale(torch.tensor(largest), getattr(torch, dtype), True).numpy()
    assert float(one) == ours[0]
    np.testing.assert_array_equal(1 / theirs, ours)
    rule = CurrentScaling(dtype, power_of_two=False)
    ours = rule.choose_scale(rule.initial_state(), largest).numpy().astype(np.float64)
    theirs = utils.amax_to_scale(torch.tensor(largest), getattr(torch, dtype)).numpy()
    np.testing.assert_allclose(1 / theirs.astype(np.float64), ours, rtol=2.0**-23)
