"""Reading a run's `metrics.jsonl`."""

import math

import numpy as np
import pytest
import written_run
from written_run import GRADIENTS, SKIP, TRAIN, write_lines

from trainer.report import reading
from trainer.report.reading import read_run


def test_everything_that_is_recorded_is_read(tmp_path):
    """Every kind of line is read, null as NaN. A line that was cut off is counted."""
    run = read_run(written_run.write(tmp_path / "rich"))
    lines = list(written_run.lines())
    skips = [line for line in lines if line["split"] == "skip"]

    assert (run.name, run.last_step, run.unreadable) == ("rich", 600, 1)
    assert list(run.train["loss"].step) == list(range(20, 601, 20))
    assert math.isnan(run.train["data_wait"].value[0])
    assert set(run.train["data_wait"].value[1:]) == {0.03}
    assert list(run.validation) == ["loss", "accuracy", written_run.METRIC]
    assert [skip._asdict() | {"split": "skip"} for skip in run.skips] == skips
    assert list(run.scale.value) == [x["loss_scale"] for x in lines if x["split"] == "scale"]
    assert len(run.underflow) == 30
    assert [start.step for start in run.starts] == [0, 300]
    assert run.end == (600, 754.2, False)
    assert run.recoveries == [(307, "a loss of 1e+04, above 100", 300, 3)]
    assert run.record.step.size == 600


def test_unreadable_lines_are_ignored_and_counted(tmp_path):
    """A line is unreadable if it is cut off, not an object, or lacks its step or a field."""
    bad = ['{"split": "tr', "3", "", '{"split": "train"}', {"split": "skip", "step": 1}]
    bad += [{"split": "end", "step": 1}]
    run = read_run(write_lines(tmp_path, *bad[:4], TRAIN, *bad[4:]))

    assert run.unreadable == len(bad)
    assert (run.last_step, run.skips, run.end) == (10, [], None)
    assert list(run.train["loss"].value) == [0.5]


def test_the_later_of_two_lines_about_a_step_counts(tmp_path):
    """A resumed run writes some steps again, and its earlier end is not its last. The step of a
    rollback does not count as reached.
    """
    later = TRAIN | {"loss": 0.25}
    end = {"split": "end", "step": 10, "seconds": 1.0, "stopped": True}
    start = {"split": "run", "step": 0, "time": "2026", "settings": {}, "model": []}
    recovery = {"split": "recovery", "step": 99, "what": "x", "restored": 10, "batches_left_out": 0}
    lines = [TRAIN, SKIP, end, SKIP | {"cause": "forward"}, later, recovery]

    run = read_run(write_lines(tmp_path, *lines))
    assert list(run.train["loss"].value) == [0.25]
    assert [skip.cause for skip in run.skips] == ["forward"]
    assert run.end.stopped
    assert run.last_step == 10
    assert read_run(write_lines(tmp_path, *lines, start)).end is None


def test_a_rollback_takes_lines_back(tmp_path):
    """What is written about steps behind the checkpoint does not count, also if the run never comes
    there again. Sums over an interval with such a step do not count either.
    """
    scales = [{"split": "scale", "step": step, "loss_scale": 2.0**step} for step in (1, 5, 8)]
    validations = [{"split": "validation", "step": step, "loss": 1.0} for step in (4, 8)]
    trained = [TRAIN | {"step": step} for step in (3, 6, 9)]
    gradients = [GRADIENTS | {"step": step} for step in (3, 6, 9)]
    skips = [SKIP | {"step": step} for step in (5, 7)]
    back = {"split": "recovery", "step": 9, "what": "x", "restored": 6, "batches_left_out": 0}
    lines = [*scales, *validations, *trained, *gradients, *skips]
    run = read_run(write_lines(tmp_path, *lines, back))

    assert run.last_step == 6
    assert list(run.scale.step) == [1, 5]
    assert list(run.validation["loss"].step) == [4]
    assert list(run.train["loss"].step) == [3, 6]
    assert run.record.step[-1] == 6
    assert [skip.step for skip in run.skips] == [5]
    assert [each.restored for each in run.recoveries] == [6]
    within = back | {"restored": 5, "interval_begun": 4}
    assert list(read_run(write_lines(tmp_path, *lines, within)).train["loss"].step) == [3]


def test_an_error_is_an_end_until_a_later_start_or_end(tmp_path):
    """What a run's last call to `train` came to is known from the last of its lines."""
    end = {"split": "end", "step": 10, "seconds": 1.0, "stopped": False}
    failure = {"split": "failure", "step": 12, "error": "DataError: bad"}
    start = {"split": "run", "step": 10, "time": "2026", "settings": {}, "model": []}

    for lines, known in (
        ([end, failure], (None, (12, "DataError: bad"))),
        ([failure, end], ((10, 1.0, False), None)),
        ([failure, start], (None, None)),
    ):
        run = read_run(write_lines(tmp_path, TRAIN, *lines))
        assert (run.end, run.failure) == known


@pytest.mark.parametrize("text", [None, "", '{"split"'])
def test_a_folder_without_a_run_is_refused(tmp_path, text):
    """There is no metrics.jsonl, or none of its lines is readable."""
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match="`run_dir`"):
        read_run(tmp_path)


def test_fields_of_later_versions_are_ignored(tmp_path):
    """A line may have more fields than this version knows."""
    run = read_run(write_lines(tmp_path, SKIP | {"color": "red"}))

    assert run.unreadable == 0
    assert run.skips == [(1, 2.0**16, "backward", "a/kernel", 0, 3, 0)]


def test_curves_are_sorted_by_step():
    """A curve has increasing steps, and NaN where null was logged."""
    curves = reading.to_curves([{"step": 2, "loss": 1}, {"step": 1, "loss": None, "accuracy": 0.5}])

    assert list(curves) == ["loss", "accuracy"]
    assert list(curves["loss"].step) == [1, 2]
    assert np.array_equal(curves["loss"].value, [math.nan, 1.0], equal_nan=True)
