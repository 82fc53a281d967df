"""`DelayedScaling` against plain Python, over replicas, and its errors."""

import collections
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

from scaling.base.number_formats import is_power_of_two
from scaling.float8 import DelayedScaling
from scaling.float8.cast import FORMATS

MAGNITUDES = st.one_of(
    st.floats(2.0**-100, 2.0**100, width=32), st.sampled_from([0.0, 448.0, 896.0, 57344.0])
)
ODD = st.sampled_from([math.inf, math.nan])
RULES = st.builds(
    DelayedScaling,
    dtype=st.sampled_from([*FORMATS]),
    history_length=st.integers(1, 5),
    algorithm=st.sampled_from(["max", "most_recent"]),
    margin=st.integers(-3, 3),
    includes_newest=st.booleans(),
)


def expected_scale(rule, largest, scale):
    """The power of two for a largest magnitude, in float64."""
    if not largest > 0:
        return scale
    mantissa, exponent = math.frexp(largest / FORMATS[rule.dtype].largest)
    return 2.0 ** (exponent - (mantissa == 0.5) + rule.margin)


@given(RULES, st.lists(st.one_of(MAGNITUDES, ODD), max_size=12))
def test_the_scale_is_that_of_a_queue_in_plain_python(rule, magnitudes):
    """Every scale is the power of two for the magnitudes of the last steps; what is not finite moves
    no bit of the state.
    """
    state, scale = rule.initial_state(), 1.0
    queue = collections.deque([0.0] * rule.history_length, maxlen=rule.history_length)
    for amax in magnitudes:
        before, seen = state, list(queue)
        state = rule.advance(state, amax)
        if not math.isfinite(amax):
            assert [each.numpy().tobytes() for each in state] == [
                each.numpy().tobytes() for each in before
            ]
            continue
        queue.append(float(np.float32(amax)))
        seen = list(queue) if rule.includes_newest else seen
        largest = max(seen) if rule.algorithm == "max" else seen[-1]
        scale = expected_scale(rule, largest, scale)
        assert float(state.scale) == scale
        assert is_power_of_two(float(state.scale))
        assert sorted(state.history.numpy().tolist()) == sorted(queue)


@given(RULES, st.lists(st.lists(MAGNITUDES, min_size=3, max_size=3), max_size=8))
def test_the_maximum_over_replicas_gives_the_state_of_one_device(rule, steps):
    """Shares of a batch have the largest magnitude of the whole batch between them."""
    one = several = rule.initial_state()
    for shares in steps:
        whole = tf.concat([[share, -share] for share in shares], axis=0)
        one = rule.advance(one, tf.reduce_max(tf.abs(whole)))
        several = rule.advance(several, tf.reduce_max([tf.abs(share) for share in shares]))
    assert [each.numpy().tobytes() for each in one] == [each.numpy().tobytes() for each in several]


def test_one_state_holds_many_scales():
    """With a shape, every scale moves as it would alone."""
    rule = DelayedScaling(history_length=3)
    magnitudes = np.float32(2.0 ** np.random.default_rng(0).uniform(-20, 20, (9, 4)))
    together = rule.initial_state((4,))
    alone = [rule.initial_state() for _ in range(4)]
    for row in magnitudes:
        together = rule.advance(together, tf.constant(row))
        alone = [rule.advance(state, amax) for state, amax in zip(alone, row, strict=True)]
    np.testing.assert_array_equal(together.scale, [float(state.scale) for state in alone])
    np.testing.assert_array_equal(
        together.history, np.stack([state.history for state in alone], axis=1)
    )


@example(float(np.nextafter(np.float32(448), np.float32(449))), "float8_e4m3fn")
@example(448.0, "float8_e4m3fn")
@given(st.floats(2.0**-80, 2.0**80, width=32), st.sampled_from([*FORMATS]))
def test_nothing_saturates_at_the_scale_of_its_own_magnitude(amax, dtype):
    """The scale brings the largest magnitude into the upper octave of the format, and not above it."""
    rule = DelayedScaling(dtype)
    ratio = amax / float(rule.advance(rule.initial_state(), amax).scale)
    largest = FORMATS[dtype].largest
    assert largest / 2 < ratio <= largest


def test_a_compiled_rule_has_the_same_bits():
    """Powers of two come from the bits of the magnitude, so that no compiler rounds them."""
    rule = DelayedScaling(history_length=1)
    edges = np.float32(448.0) * np.float32(2.0) ** np.arange(-30, 30, dtype=np.float32)
    around = np.concatenate([np.nextafter(edges, np.float32(to)) for to in (0, np.inf)] + [edges])
    state = rule.initial_state(around.shape)
    compiled = tf.function(rule.advance, jit_compile=True)(state, tf.constant(around))
    np.testing.assert_array_equal(compiled.scale, rule.advance(state, tf.constant(around)).scale)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-126, 3.4e38])
def test_the_scale_of_an_extreme_magnitude_is_finite_and_positive(power_of_two, amax):
    """A scale of 0 or inf would make every later number NaN."""
    rule = DelayedScaling(power_of_two=power_of_two)
    scale = float(rule.advance(rule.initial_state(), amax).scale)
    assert 2.0**-126 <= scale <= 2.0**126


@pytest.mark.parametrize(
    "arguments",
    [
        {"history_length": 0},
        {"algorithm": "mean"},
        {"margin": 65},
        {"margin": 0.5},
        {"margin": np.int8(-128)},  # whose magnitude is -128 again
        {"power_of_two": "no"},
        {"includes_newest": 1},
    ],
)
def test_constants_out_of_range_are_refused(arguments):
    """Another name of an algorithm, for instance, would mean the newest magnitude."""
    with pytest.raises((TypeError, ValueError), match=f"^`{next(iter(arguments))}`"):
        DelayedScaling(**arguments)


def test_a_scale_that_is_no_power_of_two_is_rounded_right():
    """TensorFlow's graphs compute 1 / x in float32 by an approximation, even where x is a power of two."""
    rule = DelayedScaling(history_length=1, power_of_two=False)
    largest = np.float32(2.0 ** np.random.default_rng(0).uniform(-60, 60, 1000))
    state = tf.function(rule.advance)(rule.initial_state((1000,)), tf.constant(largest))
    again = tf.function(rule.advance)(state, tf.zeros([1000]))
    expected = np.float32(1) / (np.float32(448) / largest)
    np.testing.assert_array_equal(state.scale, expected)
    np.testing.assert_array_equal(again.scale, np.float32(1) / (np.float32(1) / expected))
