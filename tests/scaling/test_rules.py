"""The rules, against plain Python, at their bounds, and their refusals."""

import generators
import numpy as np
import oracle
import pytest
import tensorflow as tf
from hypothesis import example, given

import scaling
from scaling import Cause, DynamicLossScale, FixedLossScale, NoLossScale, Verdict


def numbers(state):
    """A state as plain numbers."""
    return tuple(field.numpy().item() for field in state)


# Reaches the floor and stays there.
@example(DynamicLossScale(initial_scale=2.0, growth_interval=2, min_scale=1.0), [False] * 10)
# Reaches the ceiling and stays there.
@example(DynamicLossScale(initial_scale=8.0, growth_interval=1, max_scale=16.0), [True] * 10)
# An overflow one step short of growth starts the count again.
@example(DynamicLossScale(growth_interval=3), [True, True, False, True, True, True])
# Hysteresis is spent once and refilled by growth.
@example(DynamicLossScale(growth_interval=2, hysteresis=2), [False] * 3 + [True] * 2 + [False] * 2)
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

        assert expected == numbers(state), f"diverged at step {step}"
        assert rule.min_scale <= float(state.loss_scale) <= rule.max_scale
        scaling.half.check_power_of_two("loss_scale", float(state.loss_scale))


@pytest.mark.parametrize("start", [2.0**-126, 2.0**126])
def test_the_widest_bounds_hold(start):
    """L3: at 2^-126 and at 2^126 the scale stays where it is, finite and not 0."""
    rule = DynamicLossScale(start, 1, min_scale=2.0**-126, max_scale=2.0**126)
    state = rule.initial_state()
    for _ in range(3):
        state = rule.advance(state, start > 1)

        assert start == float(state.loss_scale)


def test_a_shortened_interval_still_grows():
    """L4: with `>=`, a count that is past a new, shorter interval grows at the next finite step."""
    long, short = DynamicLossScale(growth_interval=100), DynamicLossScale(growth_interval=5)
    state = long.initial_state()
    for _ in range(50):
        state = long.advance(state, True)

    assert float(short.advance(state, True).loss_scale) == 2.0**16


@pytest.mark.parametrize("cause", [Cause.FORWARD, Cause.UNSCALING])
def test_causes_that_no_scale_cures_change_nothing(cause):
    """L17: forward and unscaling leave the whole state untouched, counters included."""
    rule = DynamicLossScale(growth_interval=10, hysteresis=2)
    before = rule.advance(rule.advance(rule.initial_state(), False), True)
    after = rule.advance(before, Verdict(tf.constant(False), int(cause)))

    assert numbers(before) == numbers(after)


@pytest.mark.parametrize("cause", [Cause.BACKWARD, Cause.REDUCTION])
def test_causes_that_a_smaller_scale_may_cure_back_off(cause):
    """L17: backward and reduction back off like a bare False."""
    rule = DynamicLossScale()
    state = rule.initial_state()

    assert numbers(rule.advance(state, False)) == numbers(
        rule.advance(state, Verdict(tf.constant(False), int(cause)))
    )


@pytest.mark.parametrize("jit_compile", [False, True])
def test_eager_graph_and_xla_agree(jit_compile):
    """L15: a mixed history gives the same states eagerly, in a graph and under XLA."""
    rule = DynamicLossScale(growth_interval=2, hysteresis=2, max_scale=2.0**17)
    traced = tf.function(rule.advance, jit_compile=jit_compile)
    eager = state = rule.initial_state()
    for finite in [True, True, False, False, True, True, True, True, True, True, False]:
        eager = rule.advance(eager, tf.constant(finite))
        state = traced(state, tf.constant(finite))

        assert numbers(eager) == numbers(state)
    assert traced.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("rule", [FixedLossScale(8.0), NoLossScale()])
def test_constant_rules_stay(rule):
    """A fixed scale and none at all never move, whatever the verdict."""
    state = rule.initial_state()

    assert rule.advance(rule.advance(state, False), True) is state


@pytest.mark.parametrize("rule", [DynamicLossScale(), FixedLossScale(8.0), NoLossScale()])
def test_every_rule_keeps_the_contract(rule):
    """A rule is frozen; its state's first field is `loss_scale`, shape (), float32."""
    state = rule.initial_state()

    assert state._fields[0] == "loss_scale"
    assert (state.loss_scale.shape, state.loss_scale.dtype) == ((), tf.float32)
    assert rule.needs_magnitude is False
    with pytest.raises(AttributeError):
        rule.loss_scale = 3.0


POWER = (
    "`{}` must be a power of two between 2^-126 and 2^126; got {}. Only multiplying by a power of "
    "two, and dividing again, returns the same bits. Use {}."
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial_scale": 1000.0}, POWER.format("initial_scale", 1000.0, 1024.0)),
        ({"initial_scale": -8.0}, POWER.format("initial_scale", -8.0, 32768.0)),
        ({"initial_scale": float("nan")}, POWER.format("initial_scale", "nan", 32768.0)),
        ({"max_scale": 2.0**127}, POWER.format("max_scale", 2.0**127, 2.0**126)),
        ({"growth_factor": 3.0}, POWER.format("growth_factor", 3.0, 2.0)),
        (
            {"growth_factor": 1.0},
            "`growth_factor` must be greater than 1; got 1.0. A factor of 1 or less never raises "
            "the scale again after a backoff. Use 2.0 for the usual doubling.",
        ),
        (
            {"backoff_factor": 1.0},
            "`backoff_factor` must be less than 1; got 1.0. A factor of 1 or more never gets out "
            "of an overflow. Use 0.5 for the usual halving.",
        ),
        (
            {"min_scale": 4.0, "max_scale": 2.0, "initial_scale": 2.0},
            "`min_scale` must be at most `max_scale`; got 4.0 and 2.0. No scale lies between them. "
            "Lower `min_scale` or raise `max_scale`.",
        ),
        (
            {"initial_scale": 2.0**25},
            "`initial_scale` must lie in [min_scale, max_scale] = [6.103515625e-05, 16777216.0]; "
            "got 33554432.0. The scale never leaves its bounds, so it cannot start outside. Move "
            "`initial_scale` or widen the bounds.",
        ),
        (
            {"growth_interval": 0},
            "`growth_interval` must be an int of at least 1; got 0. It counts finite steps. 2000 "
            "is usual.",
        ),
        (
            {"hysteresis": 1.5},
            "`hysteresis` must be an int of at least 1; got 1.5. It counts overflows. 1 backs off "
            "at once.",
        ),
    ],
)
def test_refusals(arguments, message):
    """L3: constants under which the scale could leave its bounds are refused when given."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        DynamicLossScale(**arguments)

    assert message == str(error.value)


def test_a_fixed_scale_must_be_a_power_of_two():
    """L3: also of a fixed scale."""
    with pytest.raises(ValueError, match=r"`loss_scale` must be a power of two.*got 1000"):
        FixedLossScale(1000.0)


def test_numpy_numbers_are_numbers():
    """A power of two is one, whatever type it comes in."""
    rule = DynamicLossScale(np.float32(8.0), growth_interval=np.int64(3))

    assert float(rule.initial_state().loss_scale) == 8.0
    assert float(FixedLossScale(np.float16(4.0)).initial_state().loss_scale) == 4.0


def test_a_verdict_must_be_one_bool():
    """`advance` says what it was given instead of a bool."""
    state = DynamicLossScale().initial_state()
    with pytest.raises(TypeError, match="`grads_finite` must be a bool; got float32"):
        DynamicLossScale().advance(state, tf.constant(1.0))
    with pytest.raises(ValueError, match=r"`grads_finite` must be a scalar; got shape \(2,\)"):
        DynamicLossScale().advance(state, tf.constant([True, False]))
