"""Rules that are simulated on recorded gradients, compared with plain Python."""

import generators
import hypothesis.strategies as st
import numpy as np
import oracle
import pytest
from hypothesis import example, given, settings
from recorded import step_reports, write_record

import scaling
from scaling import Cause
from scaling.base.number_formats import HALF_MAX
from scaling.telemetry.simulate_rules import (
    best_fixed_scale,
    compare,
    gather_evidence,
    simulate_rule,
    summarize,
    unexplained,
)

OVERFLOWED = (Cause.BACKWARD, Cause.REDUCTION)


@pytest.fixture
def path(tmp_path):
    """The path of a run's `metrics.jsonl`."""
    return tmp_path / "metrics.jsonl"


def test_evidence_about_other_scales(path):
    """A skipped step has the magnitude of the next applied step, or of the last one. Float16 steps
    fit and overflow at their own scales. In wider formats overflows are incurable.
    """
    steps = [
        (16.0, Cause.BACKWARD, np.inf),
        (8.0, Cause.FORWARD, np.nan),
        (4.0, Cause.NONE, 3.0),
        (4.0, Cause.REDUCTION, np.nan),
    ]
    evidence = gather_evidence(write_record(path, step_reports(steps)))

    assert evidence.magnitude.tolist() == [3.0, 3.0, 3.0, 3.0]
    assert evidence.fits_at.tolist() == [0.0, 0.0, 4.0, 0.0]
    assert evidence.overflows_at.tolist() == [16.0, np.inf, np.inf, 4.0]
    assert evidence.incurable.tolist() == [Cause.NONE, Cause.FORWARD, Cause.NONE, Cause.NONE]
    wide = gather_evidence(write_record(path, step_reports(steps), precision="float32"))
    assert wide.fits_at.tolist() == [0.0] * 4
    assert wide.overflows_at.tolist() == [np.inf] * 4
    assert wide.incurable.tolist() == [Cause.MODEL, Cause.FORWARD, Cause.NONE, Cause.MODEL]
    assert gather_evidence(write_record(path, step_reports(steps[:2]))).magnitude.tolist() == [
        0.0,
        0.0,
    ]


def test_evidence_of_retries_and_of_steps_in_float32(path):
    """A retried step fits at its last scale and overflowed at twice that. A step in float32 says
    nothing about scales.
    """
    steps = [
        (4.0, Cause.NONE, 3.0),
        (4.0, Cause.NONE, 3.0),
        (4.0, Cause.BACKWARD, np.inf),
        (2.0, Cause.NONE, 3.0),
        (2.0, Cause.BACKWARD, np.inf),
    ]
    wide = [False, False, False, True, True]
    reports = step_reports(steps, retries=[2, 0, 3, 0, 0], in_float32=wide)
    record = write_record(path, reports)
    evidence = gather_evidence(record)

    assert record.retries.tolist() == [2, 0, 3, 0, 0]
    assert record.in_float32.tolist() == wide
    assert evidence.fits_at.tolist() == [4.0, 4.0, 0.0, 0.0, 0.0]
    assert evidence.overflows_at.tolist() == [8.0, np.inf, 4.0, np.inf, np.inf]
    assert evidence.incurable.tolist() == [*[Cause.NONE] * 4, Cause.MODEL]
    assert best_fixed_scale(record) == 2.0
    retried = write_record(path, step_reports(steps[:2], retries=[2, 0]))
    assert best_fixed_scale(retried) == 4.0
    assert best_fixed_scale(write_record(path, step_reports(steps[:2]))) == 2.0**14


def test_overflows_that_the_weights_do_not_explain(path):
    """The next step's gradients of weights fit in float16 at twice the scale that overflowed."""
    steps = [
        (2.0**14, Cause.BACKWARD, np.inf),  # 3 * 2^15 is too large for float16
        (2.0**13, Cause.BACKWARD, np.inf),  # 3 * 2^14 is not
        (2.0**12, Cause.NONE, 3.0),
    ]
    assert unexplained(write_record(path, step_reports(steps))) == (2, 1)
    assert unexplained(write_record(path, step_reports(steps), precision="float32")) == (0, 0)
    assert unexplained(write_record(path, step_reports(steps[2:], retries=1))) == (1, 1)


def test_a_run_without_an_applied_step_is_refused(path):
    """No gradient of it is known."""
    record = write_record(path, step_reports([(4.0, Cause.BACKWARD, np.inf)] * 2))
    with pytest.raises(ValueError, match="skipped"):
        compare(record, ["dynamic"])


def recorded_steps():
    """Generates steps of all kinds; some of them overflow."""
    finite = st.tuples(
        generators.powers_of_two(-4, 20),
        st.just(Cause.NONE),
        st.floats(2.0**-20, 2.0**20, width=32),
    )
    skipped = st.tuples(
        generators.powers_of_two(-4, 20),
        st.sampled_from([Cause.BACKWARD, Cause.REDUCTION, Cause.FORWARD]),
        st.just(np.inf),
    )
    return st.lists(st.one_of(finite, finite, skipped), min_size=1, max_size=25)


def would_overflow(steps, index, scale, precision):
    """Whether a step would have overflowed at another scale, in plain Python."""
    own, cause, magnitude = steps[index]
    if cause in OVERFLOWED and scale >= own:
        return True
    if cause == Cause.NONE and precision == "mixed_float16" and scale <= own:
        return False
    if cause != Cause.NONE:
        later = [each[2] for each in steps[index:] if each[1] == Cause.NONE]
        earlier = [each[2] for each in steps[:index] if each[1] == Cause.NONE]
        magnitude = (later[:1] or earlier[-1:] or [0.0])[0]
    return magnitude * scale > HALF_MAX


def curable(cause, precision):
    """Whether another scale might have changed a step."""
    return cause == Cause.NONE or (cause in OVERFLOWED and precision == "mixed_float16")


EIGHT = scaling.DynamicLossScale(8.0)


@pytest.mark.slow
# At its own scale a step has the recorded result, whatever its magnitude.
@example(EIGHT, [(8.0, Cause.BACKWARD, np.inf), (8.0, Cause.NONE, 1.0)], "mixed_float16")
@example(EIGHT, [(8.0, Cause.NONE, HALF_MAX)], "mixed_float16")
# The largest float16 number fits.
@example(EIGHT, [(4.0, Cause.NONE, HALF_MAX / 8)], "mixed_float16")
@settings(max_examples=30)  # each compiles a loop
@given(generators.rules(), recorded_steps(), st.sampled_from(["mixed_float16", "float32"]))
def test_a_simulated_rule_agrees_with_plain_python(tmp_path_factory, rule, steps, precision):
    """L4: every scale and every skip of a simulated rule equals that of its oracle."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    scales, skipped = simulate_rule(
        rule, write_record(path, step_reports(steps), precision=precision)
    )
    state = oracle.start(rule)
    for index, (_, cause, _) in enumerate(steps):
        incurable = not curable(cause, precision)
        overflow = not incurable and would_overflow(steps, index, state[0], precision)

        assert state[0] == scales[index], index
        assert skipped[index] == (overflow or incurable), index
        if not incurable:
            state = oracle.advance(*state, not overflow, rule)


def test_the_rule_receives_the_recorded_magnitudes(path):
    """A rule that needs magnitudes receives those of the record."""
    steps = [(2.0**10, Cause.NONE, 1.0), (2.0**10, Cause.NONE, 1.0)]
    scales, _ = simulate_rule(
        scaling.HeadroomLossScale(headroom_bits=3), write_record(path, step_reports(steps))
    )

    assert scales.tolist() == [2.0**15, 2.0**12]


@given(recorded_steps(), st.sampled_from(["mixed_float16", "float32"]))
def test_the_best_fixed_scale_is_the_largest_that_never_overflows(
    tmp_path_factory, steps, precision
):
    """The best fixed scale is found by trying all powers of two."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    record = write_record(path, step_reports(steps), precision=precision)
    curable_steps = [index for index, step in enumerate(steps) if curable(step[1], precision)]

    def never_overflows(scale):
        return not any(would_overflow(steps, index, scale, precision) for index in curable_steps)

    best = max(filter(never_overflows, 2.0 ** np.arange(-126, 127)), default=2.0**-126)

    assert best == best_fixed_scale(record)


def test_the_figures_of_an_outcome(path):
    """An outcome counts the steps below the best scale, and averages over the applied steps what
    float16 flushes.
    """
    first = [[1.0, 2.0**-30, 0.0, 2.0**-20]] * 2
    second = [[0.5, 2.0**-28]]
    record = write_record(
        path,
        step_reports([(2.0**4, Cause.NONE, 1.0)] * 2, first),
        step_reports([(2.0**4, Cause.NONE, 0.5)], second, first=3),
        precision="float32",
    )
    scales = np.float32([2.0**16, 2.0**2, 2.0**4])
    outcome = summarize("mine", scales, np.array([True, False, False]), record)

    assert (outcome.name, outcome.below_best) == ("mine", 2)
    assert outcome.lost == pytest.approx(
        (1 / 4 + 0) / 2 if 2.0**-28 * 16 > 2.0**-25 else (1 / 4 + 1 / 2) / 2
    )
    assert np.isnan(summarize("none", scales, np.array([True] * 3), record).lost)
