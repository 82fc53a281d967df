"""`DynamicLossScale` against plain Python, at its bounds, and its errors."""

import generators
import numpy as np
import oracle
import pytest
import tensorflow as tf
from hypothesis import example, given

from scaling import Cause, DynamicLossScale, Verdict
from scaling.base.number_formats import is_power_of_two


# The scale reaches the floor and stays there.
@example(DynamicLossScale(initial_scale=2.0, growth_interval=2, min_scale=1.0), [False] * 10)
# The scale reaches the ceiling and stays there.
@example(DynamicLossScale(initial_scale=8.0, growth_interval=1, max_scale=16.0), [True] * 10)
# An overflow one step before growth restarts the count.
@example(DynamicLossScale(growth_interval=3), [True, True, False, True, True, True])
# Hysteresis is used up once and refilled by growth.
@example(DynamicLossScale(growth_interval=2, hysteresis=2), [False] * 3 + [True] * 2 + [False] * 2)
# If any finite step refills it, only overflows in a row count.
@example(
    DynamicLossScale(hysteresis=2, hysteresis_refill="finite_step"),
    [False, True, False, True, False, False, False],
)
# The first growth comes at the third finite step, the next at the second after it.
@example(DynamicLossScale(growth_interval=2, grace_steps=1), [True] * 7 + [False] + [True] * 4)
# Intervals like those of icefall: short below 2, longer below 8, longest above.
@example(DynamicLossScale(1.0, 6, low_scale_intervals=((2.0, 1), (8.0, 2))), [True] * 15 + [False])
@given(generators.rules(), generators.histories())
def test_advance_agrees_with_the_plain_python_rule(rule, history):
    """L4: for any rule and any history, every state matches the oracle's, and
    L3: every scale is a power of two within the bounds.
    """
    state = rule.initial_state()
    expected = oracle.start(rule)
    for step, finite in enumerate(history):
        state = rule.advance(state, finite)
        expected = oracle.advance(*expected, finite, rule)

        assert expected == oracle.numbers(state), f"diverged at step {step}"
        assert rule.min_scale <= float(state.loss_scale) <= rule.max_scale
        assert is_power_of_two(float(state.loss_scale))


@pytest.mark.parametrize("start", [2.0**-126, 2.0**126])
def test_the_widest_bounds_hold(start):
    """L3: at 2^-126 and at 2^126 the scale stays the same, finite and not 0."""
    rule = DynamicLossScale(start, 1, min_scale=2.0**-126, max_scale=2.0**126)
    state = rule.initial_state()
    for step in range(3):
        state = rule.advance(state, start > 1)

        assert start == float(state.loss_scale), f"at step {step}"


def test_a_shortened_interval_still_grows():
    """L4: if the count already exceeds a new, shorter interval, the next finite step grows."""
    long, short = DynamicLossScale(growth_interval=100), DynamicLossScale(growth_interval=5)
    state = long.initial_state()
    for _ in range(50):
        state = long.advance(state, True)

    assert float(short.advance(state, True).loss_scale) == 2.0**16


@pytest.mark.parametrize("cause", generators.CURABLE)
def test_curable_causes_back_off(cause):
    """L17: backward and reduction have the same effect as a bare False."""
    rule = DynamicLossScale()
    state = rule.initial_state()

    assert oracle.numbers(rule.advance(state, False)) == oracle.numbers(
        rule.advance(state, Verdict(tf.constant(False), int(cause)))
    )


def test_the_cause_of_a_finite_step_is_ignored():
    """L17: a finite step counts as finite, whatever its cause says."""
    rule = DynamicLossScale(growth_interval=1)
    for cause in Cause:
        state = rule.advance(rule.initial_state(), Verdict(tf.constant(True), cause))

        assert float(state.loss_scale) == 2.0**16, cause.name


@pytest.mark.parametrize(
    "arguments",
    [
        {"hysteresis": 0},
        {"hysteresis": 1.5},
        {"hysteresis_refill": "never"},
        {"grace_steps": -1},
        {"low_scale_intervals": ((3.0, 25),)},
        {"low_scale_intervals": ((2.0, 25), (8.0, 0))},
        {"low_scale_intervals": ((2.0, 2**30 + 1),)},
    ],
)
def test_errors(arguments):
    """L3: constants with which the scale could leave its bounds or never move are errors."""
    with pytest.raises(ValueError, match=f"^`{next(iter(arguments))}`"):
        DynamicLossScale(**arguments)


def test_numpy_integers_are_accepted():
    """Counts of any integer type give the same states as Python ints."""
    three = np.int64(3)
    rule = DynamicLossScale(1.0, np.int64(1), hysteresis=three, grace_steps=three)
    same = DynamicLossScale(1.0, 1, hysteresis=3, grace_steps=3)
    state, expected = rule.initial_state(), same.initial_state()
    for finite in [True] * 5 + [False] * 4:
        state, expected = rule.advance(state, finite), same.advance(expected, finite)

        assert oracle.numbers(expected) == oracle.numbers(state)


def test_equal_rules_have_one_text():
    """A checkpoint knows a rule by its text, whatever types its numbers had."""
    rules = [
        DynamicLossScale(low_scale_intervals=pairs)
        for pairs in [((2, 25),), [[2.0, 25]], ((np.float32(2.0), np.int64(25)),)]
    ]
    assert len({repr(rule) for rule in rules}) == len({*rules}) == 1
