"""`LogMaxLossScale` against plain Python, and its errors."""

import generators
import numpy as np
import oracle
import pytest
import tensorflow as tf
from hypothesis import example, given

from scaling import Cause, LogMaxLossScale, LogMaxLossScaleState, Verdict
from scaling.base.number_formats import is_power_of_two

# If the oracle's exponent is this close to an integer, float32 may round to either side.
UNDECIDED = 1e-3


def fits(magnitude):
    """The verdict on a finite step with this magnitude."""
    return Verdict(True, Cause.NONE, float(np.float32(magnitude)))


OVERFLOW = Verdict(False, Cause.BACKWARD, float("inf"))


def follow(rule, history):
    """Yields (step, verdict, the x of the steps that counted so far, state before, state after)."""
    xs, state = [], rule.initial_state()
    for step, verdict in enumerate(history):
        before, state = state, rule.advance(state, verdict)
        if counts(verdict):
            finite, _, magnitude = verdict
            xs.append(oracle.log_max_x(float(before.loss_scale), finite, magnitude))
        yield step, verdict, xs, before, state


def counts(verdict):
    """Whether a step enters the statistics."""
    finite, cause, magnitude = verdict
    return magnitude > 0 if finite else cause in generators.CURABLE


# Powers of two without a deviation.
@example(LogMaxLossScale(deviations=0), [fits(0.3 * 2.0**-exponent) for exponent in range(20)])
# A constant magnitude has no deviation, whatever the decay.
@example(LogMaxLossScale(deviation_decay=0.9999), [fits(0.7 * 2.0**-7)] * 12)
@example(LogMaxLossScale(max_scale=2.0**126), [fits(0.7 * 2.0**-100)] * 12)
# One overflow among constant magnitudes, and the recovery.
@example(LogMaxLossScale(), [fits(0.3)] * 10 + [OVERFLOW] + [fits(0.3)] * 10)
# An overflow at the first step counts as one bit more than fits.
@example(LogMaxLossScale(), [OVERFLOW] * 3 + [fits(0.3)] * 3)
@given(generators.log_max_rules(), generators.verdict_histories() | generators.calm_histories())
def test_advance_agrees_with_the_plain_python_rule(rule, history):
    """L4: for any rule and any history, the scale is the oracle's, and
    L3: every scale is a power of two within the bounds.
    """
    for step, verdict, xs, before, state in follow(rule, history):
        if counts(verdict):
            exponent = oracle.log_max_exponent(xs, rule)
            expected = {
                oracle.advance_log_max(
                    float(before.loss_scale), exponent + nudge, verdict.grads_finite, rule
                )
                for nudge in (-UNDECIDED, UNDECIDED)
            }
            assert float(state.loss_scale) in expected, f"diverged at step {step}"
        else:
            expected = before
            if verdict.grads_finite:  # all zero: the scale doubles, the statistics stay
                doubled = oracle.clip(2 * float(before.loss_scale), rule)
                expected = before._replace(loss_scale=tf.constant(doubled))
            assert oracle.numbers(expected) == oracle.numbers(state), f"diverged at step {step}"

        assert rule.min_scale <= float(state.loss_scale) <= rule.max_scale
        assert is_power_of_two(float(state.loss_scale))


@given(generators.log_max_rules(), generators.verdict_histories(max_size=12))
def test_the_running_statistics_agree_with_plain_python(rule, history):
    """L4: `mean`, `slow_mean` and `variance` are the decaying means of x and of its squared
    deviation. In them, the weight of each value is `decay` times the weight of the next one.
    """
    for step, _, xs, _, state in follow(rule, history):
        if not xs:
            continue
        about = oracle.weighted_mean(xs, rule.deviation_decay)
        squares = [(x - about) ** 2 for x in xs]

        for actual, decay, values in (
            (state.mean, rule.mean_decay, xs),
            (state.slow_mean, rule.deviation_decay, xs),
            (state.variance, rule.deviation_decay, squares),
        ):
            expected = oracle.weighted_mean(values, decay)
            # Each step rounds about ten times, each time by at most 2^-24 of the largest value so
            # far: the largest x, or the largest square of a difference of two of them.
            largest = (
                np.ptp(xs) * np.max(np.abs(xs)) if actual is state.variance else np.max(np.abs(xs))
            )
            tolerance = 16 * len(xs) * 2.0**-24 * largest + 1e-20
            assert abs(expected - float(actual)) <= tolerance, f"at step {step}"


@pytest.mark.parametrize("exponent", [-16, -100])
@pytest.mark.parametrize("decay", [0.9, 0.998, 0.9995, 0.9999])
def test_a_constant_magnitude_has_no_deviation(decay, exponent):
    """L4: a constant magnitude gets the largest scale at which it fits, as if `deviations` were 0."""
    rule = LogMaxLossScale(deviation_decay=decay, max_scale=2.0**126)
    state = rule.initial_state()
    for step in range(20):
        # 0.7 keeps the exponent half a power of two away from the next one.
        state = rule.advance(state, fits(0.7 * 2.0**exponent))

        assert float(state.loss_scale) == 2.0 ** (16 - exponent), f"at step {step}"


def test_small_deviations_are_not_lost_in_float32():
    """L4: the scale equals the oracle's for the same history of small deviations at 64 levels,
    which shows that the error of the exponent is below 1/64, not just below 1.
    """
    rule = LogMaxLossScale(max_scale=2.0**40)
    waves = np.random.default_rng(0).uniform(-0.25, 0.25, 20)
    levels = np.exp2(-24 - np.arange(64) / 64)
    history = np.float32(np.exp2(waves)[:, np.newaxis] * levels)
    # All levels at once: a rule's arithmetic works on vectors as well.
    state = LogMaxLossScaleState(*(tf.fill([64], field) for field in rule.initial_state()))
    for step, magnitudes in enumerate(history):
        state = rule.advance(state, Verdict(True, Cause.NONE, tf.constant(magnitudes)))
        for level, scale in enumerate(state.loss_scale.numpy()):
            xs = np.log2(history[: step + 1, level].astype(np.float64)).tolist()
            exponent = oracle.log_max_exponent(xs, rule)
            expected = {
                oracle.advance_log_max(1.0, exponent + nudge, True, rule)
                for nudge in (-UNDECIDED, UNDECIDED)
            }

            assert float(scale) in expected, f"at step {step}, level {level}"


@pytest.mark.parametrize(("at", "bits"), [(0, 8), (20, 1), (5000, 1)])
def test_the_scale_recovers_after_one_overflow(at, bits):
    """L11: one overflow at least halves the scale. Ten steps later the scale is within one bit of
    the scale without the overflow, or within eight bits if the overflow was the first step. With
    the rule as OpenSeq2Seq published it, the scale stayed at its minimum for 11,177 steps.
    """
    rule = LogMaxLossScale()
    logs = np.random.default_rng(0).normal(-8.0, 0.5, at + 50)
    magnitudes = tf.constant(2.0**logs, tf.float32)

    @tf.function
    def scales(finite):
        def advance(state, step):
            return rule.advance(state, Verdict(step[0], Cause.BACKWARD, step[1]))

        return tf.scan(advance, (finite, magnitudes), rule.initial_state()).loss_scale

    undisturbed = scales(tf.fill([at + 50], True)).numpy()
    disturbed = scales(tf.range(at + 50) != at).numpy()
    before = disturbed[at - 1] if at else rule.initial_scale

    assert disturbed[at] <= before / 2
    assert (np.abs(np.log2(undisturbed[at + 10 :] / disturbed[at + 10 :])) <= bits).all()


@pytest.mark.parametrize("magnitude", [float("inf"), float("nan")])
def test_a_finite_step_with_an_infinite_magnitude_moves_nothing(magnitude):
    """L3: a verdict that contradicts itself does not make the statistics NaN for ever."""
    state = LogMaxLossScale().advance(LogMaxLossScale().initial_state(), fits(0.3))
    after = LogMaxLossScale().advance(state, Verdict(True, Cause.NONE, magnitude))

    assert oracle.numbers(after) == oracle.numbers(state)


def test_the_count_of_steps_stops_before_it_wraps():
    """L3: after 2^31 steps the newest value still has a weight between 0 and 1."""
    rule = LogMaxLossScale()
    state = rule.advance(rule.initial_state(), fits(0.3))._replace(steps=2**30)
    after = rule.advance(state, fits(0.3 * 2.0**-10))

    assert int(after.steps) == 2**30
    assert float(state.mean) - 0.2 < float(after.mean) < float(state.mean)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_subnormal_magnitude_counts_as_zero(compiled):
    """Its logarithm is -inf in kernels that take it for 0, and would stay in the statistics."""
    rule = LogMaxLossScale(initial_scale=8.0)

    @tf.function(jit_compile=compiled)
    def advance(magnitude):
        verdict = Verdict(tf.constant(True), max_magnitude=magnitude)
        return rule.advance(rule.initial_state(), verdict)

    assert [float(each) for each in advance(tf.constant(1e-40))] == [16.0, 0.0, 0.0, 0.0, 0.0]


def test_all_zero_gradients_double_the_scale_and_leave_the_statistics():
    """L11: all-zero gradients never make the scale NaN, and doubling finds flushed gradients."""
    rule = LogMaxLossScale(initial_scale=2.0**-14)
    state = rule.initial_state()
    for step in range(1, 20):
        state = rule.advance(state, fits(0.0))

        assert oracle.numbers(state) == (2.0 ** (step - 14), 0, 0.0, 0.0, 0.0)
    learned = rule.advance(state, fits(2.0**-10))
    after = rule.advance(learned, fits(0.0))

    assert float(learned.loss_scale) == 2.0**24
    assert oracle.numbers(after)[1:] == oracle.numbers(learned)[1:]


@pytest.mark.parametrize("deviations", [0, 100])
def test_the_smallest_and_largest_deviations_are_accepted(deviations):
    """0 and 100 standard deviations are the limits."""
    assert LogMaxLossScale(deviations=deviations).deviations == deviations


@pytest.mark.parametrize(
    "arguments",
    [
        {"mean_decay": 1 - 2.0**-26},  # rounds to 1 in float32
        {"deviation_decay": 1 - 2.0**-26},
        {"deviations": 1e39},  # rounds to inf
        {"deviations": 1e300},
        {"deviations": 100},
    ],
)
def test_constants_that_round_in_float32_keep_the_bounds(arguments):
    """L3: such a constant is either an error, or keeps the scale within its bounds."""
    bounds = {"initial_scale": 8.0, "min_scale": 4.0, "max_scale": 16.0}
    try:
        rule = LogMaxLossScale(**bounds, **arguments)
    except ValueError as refusal:
        assert f"`{next(iter(arguments))}` must be" in str(refusal)  # noqa: PT017 - either will do
        return
    state = rule.initial_state()
    for _ in range(3):
        state = rule.advance(state, fits(1.0))

        assert float(state.loss_scale) in {4.0, 8.0, 16.0}


@pytest.mark.parametrize(
    "arguments",
    [
        {"mean_decay": 1},
        {"mean_decay": -0.5},
        {"mean_decay": float("nan")},
        {"deviation_decay": 1.0},
        {"deviation_decay": "0.9"},
        {"deviations": -1.0},
        {"deviations": 101},
        {"deviations": float("nan")},
    ],
)
def test_errors(arguments):
    """L3: decays outside [0, 1) and deviations outside [0, 100] are errors."""
    with pytest.raises(ValueError, match=f"^`{next(iter(arguments))}`"):
        LogMaxLossScale(**arguments)


@pytest.mark.parametrize("how", ["eager", "graph", pytest.param("xla", marks=pytest.mark.thorough)])
def test_rounded_logarithms_decide_alike(how):
    """L15: at any scale a first overflow halves it, and 65504 still fits, in eager mode and in graphs."""
    rule = LogMaxLossScale(min_scale=2.0**-126, max_scale=2.0**126)
    run = rule.advance
    if how != "eager":
        run = tf.function(run, jit_compile=how == "xla")
    start = rule.initial_state()
    for exponent in range(-60, 61, 3):
        scale = 2.0**exponent
        after = run(start._replace(loss_scale=tf.constant(scale)), as_tensors(OVERFLOW))
        assert float(after.loss_scale) == scale / 2
        after = run(start, as_tensors(fits(65504 / scale)))
        assert float(after.loss_scale) == scale


def as_tensors(verdict):
    """The same verdict as tensors, with which a function is traced once."""
    return Verdict(*(tf.constant(field) for field in (verdict[0], int(verdict[1]), verdict[2])))
