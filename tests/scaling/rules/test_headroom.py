"""`HeadroomLossScale` against plain Python, its search, and its errors."""

import generators
import oracle
import pytest
from hypothesis import example, given

from scaling import Cause, HeadroomLossScale, Verdict
from scaling.base.number_formats import is_power_of_two


def fits(magnitude):
    """The verdict on a finite step with this magnitude."""
    return Verdict(True, Cause.NONE, magnitude)


OVERFLOW = Verdict(False, Cause.BACKWARD, float("inf"))
# The largest magnitude that leaves 4 bits at a scale of 1, and its neighbours.
EDGE, ABOVE, BELOW = (generators.nudged(4094.0, towards) for towards in (0.0, 1e9, -1e9))


# The first measurement, one bit below and above the limit.
@example(HeadroomLossScale(), [fits(EDGE)])
@example(HeadroomLossScale(), [fits(ABOVE)])
@example(HeadroomLossScale(), [fits(BELOW)])
# Growth, one bit below and above the limit.
@example(HeadroomLossScale(growth_interval=1), [fits(2.0 * EDGE), OVERFLOW, fits(2.0 * EDGE)])
@example(HeadroomLossScale(growth_interval=1), [fits(2.0 * EDGE), OVERFLOW, fits(2.0 * ABOVE)])
# The largest magnitude of the interval counts, at any position.
@example(HeadroomLossScale(growth_interval=3), [fits(1.0)] + [fits(2.0**-9)] * 3 + [fits(1.0)] * 3)
@example(
    HeadroomLossScale(growth_interval=3), [fits(1.0), OVERFLOW, fits(1.0), fits(0.0), fits(0.0)]
)
# An overflow resets the largest magnitude and the count.
@example(
    HeadroomLossScale(growth_interval=2),
    [fits(1.0), fits(9.0), OVERFLOW, fits(0.125), fits(0.125), fits(0.125)],
)
# The search goes down twice and up once, and then measures.
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
    """L11: from any initial scale, three steps find the scale of every gradient."""
    rule = HeadroomLossScale(2.0**start)
    # 2^11 is the largest scaled power of two that leaves the headroom. For these magnitudes
    # the scale lies within the bounds.
    for exponent in range(11 - 24, 11 + 14 + 1):
        state = rule.initial_state()
        for _ in range(3):
            scaled = 2.0**exponent * float(state.loss_scale)
            seen = 2.0**exponent if scaled > 2.0**-25 else 0.0
            state = rule.advance(state, OVERFLOW if scaled > 65504 else fits(seen))

        assert bool(state.found), f"a gradient of 2^{exponent}"
        assert float(state.loss_scale) == 2.0 ** (11 - exponent), f"a gradient of 2^{exponent}"


@pytest.mark.parametrize("magnitude", [float("inf"), float("nan")])
def test_a_finite_step_with_an_infinite_magnitude_moves_nothing(magnitude):
    """L3: a verdict that contradicts itself does not end the search, at the largest scale or any."""
    state = HeadroomLossScale().initial_state()
    after = HeadroomLossScale().advance(state, Verdict(True, Cause.NONE, magnitude))

    assert oracle.numbers(after) == oracle.numbers(state)


def test_the_search_from_a_high_scale_is_short():
    """L11: from 2^40, the scale for gradients of 1 is found after trying 2^40, 2^20 and 1."""
    rule = HeadroomLossScale(2.0**40, max_scale=2.0**40)
    state = rule.initial_state()
    tried = [float(state.loss_scale)]
    while not bool(state.found) and len(tried) < 9:
        overflows = tried[-1] > 65504  # of a gradient of 1
        state = rule.advance(state, OVERFLOW if overflows else fits(1.0))
        tried.append(float(state.loss_scale))

    assert tried == [2.0**40, 2.0**20, 1.0, 2.0**11]


@pytest.mark.parametrize("bits", [-1, 1.5, True, 41])
def test_headroom_is_limited_by_the_range_of_float16(bits):
    """L3: a headroom of 40 bits lowers the scale to the floor; a larger one is an error."""
    rule = HeadroomLossScale(headroom_bits=40)

    assert float(rule.advance(rule.initial_state(), fits(1.0)).loss_scale) == rule.min_scale
    with pytest.raises(ValueError, match=r"^`headroom_bits`"):
        HeadroomLossScale(headroom_bits=bits)
