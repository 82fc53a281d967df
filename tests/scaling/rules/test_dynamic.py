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


POWER = (
    "`{}` must be a power of two between 2^-126 and 2^126; got {}. Only powers of two scale and "
    "unscale gradients without changing their bits. Use {}."
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial_scale": 1000.0}, POWER.format("initial_scale", 1000.0, 1024.0)),
        ({"initial_scale": -8.0}, POWER.format("initial_scale", -8.0, 32768.0)),
        ({"initial_scale": float("nan")}, POWER.format("initial_scale", "nan", 32768.0)),
        ({"initial_scale": True}, POWER.format("initial_scale", True, 32768.0)),
        ({"max_scale": 2.0**127}, POWER.format("max_scale", 2.0**127, "2.0**126")),
        ({"growth_factor": 3.0}, POWER.format("growth_factor", 3.0, 2.0)),
        ({"backoff_factor": 0.8}, POWER.format("backoff_factor", 0.8, 0.5)),
        (
            {"growth_factor": 1.0},
            "`growth_factor` must be greater than 1; got 1.0. A factor of 1 or less would never raise "
            "the scale. Use 2.0, which doubles it.",
        ),
        (
            {"backoff_factor": 1.0},
            "`backoff_factor` must be less than 1; got 1.0. A factor of 1 or more would never "
            "lower the scale after an overflow. Use 0.5, which halves it.",
        ),
        (
            {"min_scale": 4.0, "max_scale": 2.0, "initial_scale": 2.0},
            "`min_scale` must be at most `max_scale`; got 4.0 and 2.0. No scale could satisfy both bounds. Lower `min_scale` or raise `max_scale`.",
        ),
        (
            {"initial_scale": 2.0**25},
            "`initial_scale` must lie between `min_scale` (2.0**-14) and `max_scale` (2.0**24); got "
            "33554432.0. The scale never leaves these bounds. Set `initial_scale` to 2.0**24, or "
            "`max_scale` to 2.0**25.",
        ),
        (
            {"initial_scale": 2.0, "min_scale": 4.0},
            "`initial_scale` must lie between `min_scale` (4.0) and `max_scale` (2.0**24); got 2.0. "
            "The scale never leaves these bounds. Set `initial_scale` to 4.0, or `min_scale` to 2.0.",
        ),
        (
            {"growth_interval": 0},
            "`growth_interval` must be an int of at least 1; got 0. This argument counts finite steps. Use "
            "2000, the default.",
        ),
        (
            {"growth_interval": 2**30 + 1},
            "`growth_interval` must be at most 2^30; got 1073741825. This argument counts finite steps. Counters "
            "are int32. Use 2000, the default.",
        ),
        (
            {"growth_interval": True},
            "`growth_interval` must be an int of at least 1; got True. This argument counts finite steps. "
            "Use 2000, the default.",
        ),
        (
            {"hysteresis": 1.5},
            "`hysteresis` must be an int of at least 1; got 1.5. This argument counts overflows. Use 1 to "
            "back off at every overflow.",
        ),
        (
            {"hysteresis_refill": "never"},
            '`hysteresis_refill` must be "growth" or "finite_step"; got \'never\'. This argument says what resets the count of overflows. Use "growth", the default of Megatron-LM and DeepSpeed.',
        ),
        (
            {"grace_steps": -1},
            "`grace_steps` must be an int of at least 0; got -1. This argument counts finite steps. Use 0 to "
            "count every finite step.",
        ),
        (
            {"low_scale_intervals": ((3.0, 25),)},
            "`low_scale_intervals` must have powers of two between 2^-126 and 2^126 as scales; got 3.0. "
            "The loss scale is always a power of two. Use (4.0, 25) for this pair.",
        ),
        (
            {"low_scale_intervals": ((2.0, 25), (8.0, 0))},
            "`low_scale_intervals` must have ints from 1 to 2^30 as intervals; got 0. An interval counts "
            "finite steps. Use (8.0, 25) for this pair.",
        ),
        (
            {"low_scale_intervals": (2.0, 25)},
            "`low_scale_intervals` must be pairs (scale, interval); got (2.0, 25). Each interval applies while the loss scale is below its scale. Use for instance ((2.0, 25), (8.0, 100)).",
        ),
    ],
)
def test_errors(arguments, message):
    """L3: constants with which the scale could leave its bounds or never move are errors."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        DynamicLossScale(**arguments)

    assert message == str(error.value)


def test_numpy_integers_are_accepted():
    """Counts of any integer type give the same states as Python ints."""
    three = np.int64(3)
    rule = DynamicLossScale(1.0, np.int64(1), hysteresis=three, grace_steps=three)
    same = DynamicLossScale(1.0, 1, hysteresis=3, grace_steps=3)
    state, expected = rule.initial_state(), same.initial_state()
    for finite in [True] * 5 + [False] * 4:
        state, expected = rule.advance(state, finite), same.advance(expected, finite)

        assert oracle.numbers(expected) == oracle.numbers(state)


def test_the_longest_interval_is_accepted():
    """L4: an interval of 2^30 steps, which in practice means never, is accepted."""
    assert DynamicLossScale(growth_interval=2**30).growth_interval == 2**30


def test_equal_rules_have_one_text():
    """A checkpoint knows a rule by its text, whatever types its numbers had."""
    rules = [
        DynamicLossScale(low_scale_intervals=pairs)
        for pairs in [((2, 25),), [[2.0, 25]], ((np.float32(2.0), np.int64(25)),)]
    ]
    assert len({repr(rule) for rule in rules}) == len({*rules}) == 1
