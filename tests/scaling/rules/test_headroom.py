"""`HeadroomLossScale` against plain Python, its search, and its refusals."""

import generators
import oracle
import pytest
from hypothesis import example, given

from scaling import Cause, HeadroomLossScale, Verdict
from scaling.base.number_formats import is_power_of_two


def fits(magnitude):
    """The verdict on a finite step."""
    return Verdict(True, Cause.NONE, magnitude)


OVERFLOW = Verdict(False, Cause.BACKWARD, float("inf"))
# The largest magnitude that leaves 4 bits at a scale of 1, and its neighbours.
EDGE, ABOVE, BELOW = (generators.nudged(4094.0, towards) for towards in (0.0, 1e9, -1e9))


# The first measurement, to the last bit.
@example(HeadroomLossScale(), [fits(EDGE)])
@example(HeadroomLossScale(), [fits(ABOVE)])
@example(HeadroomLossScale(), [fits(BELOW)])
# Growth, to the last bit: from 2^-3, at which 2^14 is found, an edge of 2^15 would be too much.
@example(HeadroomLossScale(growth_interval=1), [fits(2.0 * EDGE), OVERFLOW, fits(2.0 * EDGE)])
@example(HeadroomLossScale(growth_interval=1), [fits(2.0 * EDGE), OVERFLOW, fits(2.0 * ABOVE)])
# The largest of the interval counts, wherever it comes.
@example(HeadroomLossScale(growth_interval=3), [fits(1.0)] + [fits(2.0**-9)] * 3 + [fits(1.0)] * 3)
@example(
    HeadroomLossScale(growth_interval=3), [fits(1.0), OVERFLOW, fits(1.0), fits(0.0), fits(0.0)]
)
# An overflow makes it forget the largest, and start the count again.
@example(
    HeadroomLossScale(growth_interval=2),
    [fits(1.0), fits(9.0), OVERFLOW, fits(0.125), fits(0.125), fits(0.125)],
)
# The search: down, down, up, measured.
@example(HeadroomLossScale(), [OVERFLOW, OVERFLOW, fits(0.0), fits(1.0)])
@given(generators.headroom_rules(), generators.verdict_histories())
def test_advance_agrees_with_the_plain_python_rule(rule, history):
    """L4: for any rule and any history, every state matches the oracle's, and
    L3: every scale is a power of two within the bounds.
    """
    state = rule.initial_state()
    expected = oracle.start_headroom(rule)
    for step, verdict in enumerate(history):
        state = rule.advance(state, verdict)
        finite, cause, magnitude = verdict
        if finite or cause in generators.CURABLE:
            expected = oracle.advance_headroom(*expected, finite, magnitude, rule)

        assert expected == oracle.numbers(state), f"diverged at step {step}"
        assert rule.min_scale <= float(state.loss_scale) <= rule.max_scale
        assert is_power_of_two(float(state.loss_scale))


@pytest.mark.parametrize("start", [-14, 0, 15, 24])
def test_three_steps_find_the_scale(start):
    """L11: from wherever it starts, three steps find the scale of every gradient that has one."""
    rule = HeadroomLossScale(2.0**start)
    # At 2^11 the headroom ends: these are the magnitudes whose scale lies within the bounds.
    for exponent in range(11 - 24, 11 + 14 + 1):
        state = rule.initial_state()
        for _ in range(3):
            scaled = 2.0**exponent * float(state.loss_scale)
            seen = 2.0**exponent if scaled > 2.0**-25 else 0.0
            state = rule.advance(state, OVERFLOW if scaled > 65504 else fits(seen))

        assert bool(state.found), f"a gradient of 2^{exponent}"
        assert float(state.loss_scale) == 2.0 ** (11 - exponent), f"a gradient of 2^{exponent}"


def test_a_search_takes_steps_that_a_halving_would_take_twenty_of():
    """L11: from 2^40, gradients of 1 are found in three steps: 2^40, 2^20 and 1 are tried."""
    rule = HeadroomLossScale(2.0**40, max_scale=2.0**40)
    state = rule.initial_state()
    tried = [float(state.loss_scale)]
    while not bool(state.found) and len(tried) < 9:
        overflows = tried[-1] > 65504  # of a gradient of 1
        state = rule.advance(state, OVERFLOW if overflows else fits(1.0))
        tried.append(float(state.loss_scale))

    assert tried == [2.0**40, 2.0**20, 1.0, 2.0**11]


INTERVAL = "`growth_interval` must be an int of at least 1; got {}. It counts finite steps. Use 100, the default."
BITS = (
    "`headroom_bits` must be an int of at least 0; got {}. It counts factors of two. Use 4, the "
    "default."
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"headroom_bits": -1}, BITS.format(-1)),
        ({"headroom_bits": 1.5}, BITS.format(1.5)),
        ({"headroom_bits": True}, BITS.format(True)),
        ({"growth_interval": 0}, INTERVAL.format(0)),
        ({"growth_interval": 2.0}, INTERVAL.format(2.0)),
    ],
)
def test_refusals(arguments, message):
    """L3: constants that are no counts are refused when given."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        HeadroomLossScale(**arguments)

    assert message == str(error.value)


def test_no_more_headroom_than_float16_has():
    """L3: 40 bits leave nothing and end at the floor; more are refused."""
    rule = HeadroomLossScale(headroom_bits=40)

    assert float(rule.advance(rule.initial_state(), fits(1.0)).loss_scale) == rule.min_scale
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        HeadroomLossScale(headroom_bits=41)
    assert str(error.value) == (
        "`headroom_bits` must be at most 40; got 41. Float16 has only that many factors of two between "
        "its smallest and its largest number. Use 4, the default."
    )
