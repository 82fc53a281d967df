"""Float8 rules over recorded magnitudes, against plain Python and the rules themselves."""

import collections
import math

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from scaling.float8 import CurrentScaling, DelayedScaling, preset
from scaling.float8.formats import FORMATS
from scaling.telemetry.float8_record import TensorRecord
from scaling.telemetry.simulate_float8 import (
    compare_float8,
    groups,
    outcome_of,
    simulate_float8_rule,
)

NUMPY = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def tensor(amax, dtype="float8_e4m3fn", scale=None, name="a"):
    """A recorded tensor, whose scale was 1 by default."""
    amax = np.array(amax, np.float32)
    scale = np.ones_like(amax) if scale is None else np.array(scale, np.float32)
    zeros = np.zeros(len(amax))
    return TensorRecord(name, dtype, np.arange(1, len(amax) + 1), amax, scale, zeros, zeros)


def power_above(largest, dtype):
    """The power of two that brings a magnitude to at most the format's largest number."""
    mantissa, exponent = math.frexp(largest / FORMATS[dtype].largest)
    return 2.0 ** (exponent - (mantissa == 0.5))


def scales_by_hand(amax, dtype, length):
    """The scales of the delayed rule in plain Python: each from the magnitudes before its step."""
    queue, scale, scales = collections.deque([0.0] * length, maxlen=length), 1.0, []
    for magnitude in amax:
        scales.append(scale)
        if math.isfinite(magnitude):
            queue.append(float(np.float32(magnitude)))
            scale = power_above(max(queue), dtype) if max(queue) else scale
    return scales


def some_magnitudes(number):
    """Magnitudes of tensors with one to seven lines; some are 0, not finite or at the edge."""
    rng = np.random.default_rng(0)
    for _ in range(number):
        found = np.float32(2.0 ** rng.uniform(-30, 30, rng.integers(1, 8)))
        odd = rng.random(len(found)) < 0.3
        found[odd] = rng.choice([0.0, np.nan, 448.0, 464.0, 480.0], odd.sum())
        yield str(rng.choice([*FORMATS])), found.tolist()


@pytest.mark.parametrize("length", [2, pytest.param(1024, marks=pytest.mark.thorough)])
def test_tensors_of_any_length_are_played_as_in_plain_python(length):
    """Together as alone: the delayed scale is that of a queue, the current one that of the step."""
    tensors = [*some_magnitudes(100)]
    record = [tensor(amax, dtype) for dtype, amax in tensors]
    found = compare_float8(record, [f"delayed:history_length={length}", "current"])
    for (dtype, amax), one, outcomes in zip(tensors, record, found, strict=True):
        recorded, delayed, current = outcomes
        assert recorded.scale.tolist() == [1.0] * len(amax)
        assert delayed.scale.tolist() == scales_by_hand(amax, dtype, length)
        usable = [math.isfinite(each) and each > 0 for each in amax]
        assert current.scale.tolist() == [
            power_above(each, dtype) if is_usable else 1.0
            for each, is_usable in zip(amax, usable, strict=True)
        ]
        for outcome in outcomes:
            check_outcome(outcome, one)
        assert not current.saturated.any()


def check_outcome(outcome, one):
    """Asserts what a rule's figures are, in plain Python and with ml_dtypes."""
    ratio = one.amax / outcome.scale
    with np.errstate(over="ignore"):
        plain = ratio.astype(NUMPY[one.dtype]).astype(np.float32)
    finite = np.isfinite(one.amax)
    np.testing.assert_array_equal(outcome.saturated, finite & ~np.isfinite(plain))
    for bits, each, saturates in zip(outcome.unused_bits, ratio, outcome.saturated, strict=True):
        if saturates or not each > 0:
            assert math.isnan(bits)
        else:
            expected = max(math.log2(FORMATS[one.dtype].largest) - math.log2(float(each)), 0.0)
            assert bits == pytest.approx(expected, abs=1e-12)
    assert outcome.moves == sum(
        a != b for a, b in zip(outcome.scale, outcome.scale[1:], strict=False)
    )


@pytest.mark.parametrize(
    "rule",
    [
        preset("keras3"),
        DelayedScaling("float8_e5m2", 1024, margin=1),
        DelayedScaling(history_length=2, algorithm="most_recent", includes_newest=False),
        CurrentScaling(power_of_two=False),
    ],
)
def test_a_rule_moves_as_in_a_loop_of_its_own(rule):
    """With its whole history, although the simulation leaves out what no step can reach."""
    rng = np.random.default_rng(0)
    amax = np.float32(2.0 ** rng.uniform(-20, 20, (12, 2)))
    amax[4, 0], amax[5, 1], amax[7] = np.nan, np.inf, 0.0

    @tf.function
    def loop(steps):
        state, scales = rule.initial_state((2,)), tf.TensorArray(tf.float32, 12)
        for at in tf.range(12):
            scales = scales.write(at, rule.choose_scale(state, steps[at]))
            state = rule.advance(state, steps[at])
        return scales.stack()

    found = simulate_float8_rule(rule, amax, np.ones_like(amax, bool))
    np.testing.assert_array_equal(found, loop(tf.constant(amax)))


def test_a_step_saturates_where_rounding_does_not_help():
    """464 is rounded to 448 and 480 is not; a rounded scale that is an ulp too small saturates
    nothing.
    """
    outcome = outcome_of("a", np.ones(4, np.float32), tensor([448.0, 464.0, 480.0, np.nan]))
    assert outcome.saturated.tolist() == [False, False, True, False]
    np.testing.assert_array_equal(outcome.unused_bits, [0.0, 0.0, np.nan, np.nan])
    constant = tensor(np.full(50, 0.3))
    [[_, keras]] = compare_float8([constant], ["keras3"])
    assert not keras.saturated.any()
    zero = outcome_of("a", np.zeros(2, np.float32), tensor([1.0, 0.0]))
    assert zero.saturated.tolist() == [True, False]


def test_few_places_are_left_empty():
    """Tensors in one group have one format, and at most twice as many lines as another."""
    rng = np.random.default_rng(0)
    dtypes = rng.choice([*FORMATS], 40)
    tensors = [tensor(np.ones(rng.integers(1, 200)), dtype) for dtype in dtypes]
    found = groups(tensors)
    assert sorted(place for group in found for place in group) == list(range(40))
    for group in found:
        lengths = [len(tensors[place].step) for place in group]
        assert max(lengths) < 2 * min(lengths)
        assert len({tensors[place].dtype for place in group}) == 1


def test_no_rule_is_played_if_one_is_wrong():
    """Rules are parsed first."""
    with pytest.raises(ValueError, match="must be some of"):
        compare_float8([tensor([1.0])], ["delayed", "nonsense"])
