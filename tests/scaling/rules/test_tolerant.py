"""`TolerantLossScale` against plain Python, and its errors."""

import generators
import oracle
import pytest
from hypothesis import example, given

from scaling import TolerantLossScale
from scaling.base.number_formats import is_power_of_two


# The fraction of overflows reaches the tolerance exactly: 1/20 >= 0.05.
@example(TolerantLossScale(growth_interval=100, tolerance=0.05), [True] * 19 + [False])
# With one more finite step it stays below the tolerance.
@example(TolerantLossScale(growth_interval=100, tolerance=0.05), [True] * 20 + [False])
# Without tolerance every overflow backs off, down to the floor.
@example(TolerantLossScale(2.0, min_scale=1.0, tolerance=0), [False] * 4)
# A backoff resets the count of overflows, growth does not.
@example(
    TolerantLossScale(growth_interval=3, tolerance=0.6),
    [True, False, True, True, True, True, False, True, False],
)
# The interval shrinks to 1 and grows to 2^30 with the scale, and stays there.
@example(TolerantLossScale(growth_interval=3, scale_interval=True), [False] * 3 + [True] * 40)
@example(TolerantLossScale(growth_interval=1, growth_factor=2.0**16, scale_interval=True), [True])
@given(generators.tolerant_rules(), generators.histories())
def test_advance_agrees_with_the_plain_python_rule(rule, history):
    """L4: for any rule and any history, every state matches the oracle's, and
    L3: every scale is a power of two within the bounds.
    """
    state = rule.initial_state()
    expected = oracle.start_tolerant(rule)
    for step, finite in enumerate(history):
        state = rule.advance(state, finite)
        expected = oracle.advance_tolerant(*expected, finite, rule)

        assert expected == oracle.numbers(state), f"diverged at step {step}"
        assert rule.min_scale <= float(state.loss_scale) <= rule.max_scale
        assert is_power_of_two(float(state.loss_scale))


def test_the_growth_interval_never_leaves_int32():
    """L11: an interval that has reached 2^30 stays there, and can shrink again."""
    rule = TolerantLossScale(growth_interval=2**28 * 3, tolerance=0, scale_interval=True)
    almost = rule.initial_state()._replace(finite_steps=2**28 * 3 - 1)
    longest = rule.advance(almost, True)
    still = rule.advance(longest._replace(finite_steps=2**30 - 1), True)

    assert int(longest.growth_interval) == 2**30
    assert int(still.growth_interval) == 2**30
    assert float(still.loss_scale) == 2.0**17
    assert int(rule.advance(still, False).growth_interval) == 2**29


@pytest.mark.parametrize("factor", [2.0**31, 2.0**126])
def test_the_largest_factors_lengthen_the_interval_too(factor):
    """L11: a large growth factor makes the growth interval neither 0 nor negative."""
    rule = TolerantLossScale(
        1.0, 1, growth_factor=factor, min_scale=2.0**-126, max_scale=2.0**126, scale_interval=True
    )
    state = rule.advance(rule.initial_state(), True)

    assert (factor, 2**30) == (float(state.loss_scale), int(state.growth_interval))
    assert float(rule.advance(state, True).loss_scale) == factor


@pytest.mark.parametrize("factor", [2.0**-31, 2.0**-126])
def test_the_smallest_factors_shorten_the_interval_to_one_step(factor):
    """L11: a small backoff factor does not make the growth interval 0."""
    rule = TolerantLossScale(1.0, 2000, 2.0, factor, min_scale=2.0**-126, scale_interval=True)
    state = rule.advance(rule.initial_state(), False)

    assert (factor, 1) == (float(state.loss_scale), int(state.growth_interval))


def test_a_run_that_resumes_with_a_shorter_interval_grows():
    """L4: the interval of the rule applies, not the saved one, unless `scale_interval` is set."""
    state = TolerantLossScale(growth_interval=100).initial_state()
    rule = TolerantLossScale(growth_interval=2)
    for _ in range(2):
        state = rule.advance(state, True)

    assert float(state.loss_scale) == 2.0**16


def test_more_than_2_31_steps_count_right():
    """L11: where int32 would wrap, growth stays at its place in the interval, and overflows count."""
    rule = TolerantLossScale(growth_interval=3, tolerance=0.05)
    longest = rule.initial_state()._replace(finite_steps=2**30 - 1, steps=2**30)  # 2^30 = 3n + 1
    grown, state = [], longest
    for _ in range(4):
        before, state = state, rule.advance(state, True)
        grown.append(float(state.loss_scale) > float(before.loss_scale))

    assert grown == [False, False, True, False]
    assert int(state.finite_steps) == 4
    overflowed = rule.advance(longest._replace(overflows=2**30 // 20), False)
    assert float(overflowed.loss_scale) == 2.0**14
    still = rule.advance(longest._replace(overflows=1000), False)
    assert oracle.numbers(still)[:4] == (2.0**15, 0, 2**30, 1001)


@pytest.mark.parametrize("tolerance", [-0.1, 1, 1.0, float("nan"), float("inf"), "0.05", None])
def test_a_tolerance_is_a_fraction_below_1(tolerance):
    """L11: with a tolerance of 1 the scale would never back off."""
    assert TolerantLossScale(tolerance=0).tolerance == 0.0
    with pytest.raises(ValueError, match=r"^`tolerance`"):
        TolerantLossScale(tolerance=tolerance)


def test_a_text_is_no_switch():
    """As on a command line, "no" would count as True."""
    with pytest.raises(TypeError, match=r"^`scale_interval`"):
        TolerantLossScale(scale_interval="no")
