"""Records of gradients: what is written is read back, and damaged files are errors."""

import json

import numpy as np
import pytest
from recorded import step_reports, write_record

from scaling import Cause
from scaling.telemetry.record import read_record
from scaling.telemetry.stats import COUNTS


@pytest.fixture
def path(tmp_path):
    """The path of a run's `metrics.jsonl`."""
    return tmp_path / "metrics.jsonl"


THREE = [(8.0, Cause.NONE, 0.1), (8.0, Cause.FORWARD, np.inf), (8.0, Cause.NONE, 3.0)]


def test_a_record_is_read_as_it_was_written(path):
    """Every number is restored exactly; magnitudes of skipped steps are left out."""
    record = write_record(
        path, step_reports(THREE), step_reports(THREE[:1], [[0.0, 2.0**-9, 3 * 2.0**-11]], first=4)
    )

    assert json.loads(path.read_text().splitlines()[1])["cause"] == ["none", "forward", "none"]
    assert record.step.tolist() == [1, 2, 3, 4]
    assert record.loss_scale.tolist() == [8.0] * 4
    assert record.cause.tolist() == [Cause.NONE, Cause.FORWARD, Cause.NONE, Cause.NONE]
    assert record.skipped.tolist() == [False, True, False, False]
    np.testing.assert_array_equal(record.max_magnitude, np.float32([0.1, np.nan, 3.0, 0.1]))
    assert record.interval.tolist() == [0, 0, 0, 1]
    assert record.counts.shape == (2, COUNTS)
    assert record.counts.sum(axis=1).tolist() == [2.0, 3.0]
    assert (
        record.counts[1].tolist()
        == step_reports(THREE[:1], [[0.0, 2.0**-9, 2.0**-9]]).magnitude_counts[0].tolist()
    )
    assert {
        array.dtype.name for array in (record.loss_scale, record.max_magnitude, record.counts)
    } == {"float32"}
    assert (record.step.dtype, record.cause.dtype) == (np.int64, np.int32)
    assert (record.precision, record.shares) == ("mixed_float16", 1)


def test_the_later_line_counts_for_a_step_that_was_written_twice(path):
    """A run that was stopped and resumed may have written some steps twice."""
    rewritten = [(2.0, Cause.NONE, 7.0)]
    record = write_record(
        path, step_reports(THREE), step_reports(rewritten * 2, first=2), precision="float32"
    )

    assert record.step.tolist() == [1, 2, 3]
    assert record.loss_scale.tolist() == [8.0, 2.0, 2.0]
    assert record.interval.tolist() == [0, 1, 1]


@pytest.mark.parametrize(("line", "why"), [('{"step": 3', "^line 2 "), ("", "record_gradients")])
def test_a_record_that_cannot_be_read(path, line, why):
    """A line that is cut off is an error with its number; without gradients, it says how to get them."""
    path.write_text('{"step": 1, "split": "train"}\n' + line)
    with pytest.raises(ValueError, match=why):
        read_record(path)
