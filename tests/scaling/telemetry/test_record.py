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
    """Where a run's metrics would be."""
    return tmp_path / "metrics.jsonl"


THREE = [(8.0, Cause.NONE, 0.1), (8.0, Cause.FORWARD, np.inf), (8.0, Cause.NONE, 3.0)]


def test_a_record_comes_back_as_it_was(path):
    """Every number survives the file to the last bit; what a skipped step measured does not."""
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


def test_a_step_written_twice_counts_as_the_later_line_tells_it(path):
    """A run that was stopped and taken up again has written some steps twice."""
    again = [(2.0, Cause.NONE, 7.0)]
    record = write_record(
        path, step_reports(THREE), step_reports(again * 2, first=2), precision="float32"
    )

    assert record.step.tolist() == [1, 2, 3]
    assert record.loss_scale.tolist() == [8.0, 2.0, 2.0]
    assert record.interval.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"step": 3', "JSONDecodeError"),
        ("3", "TypeError"),
        ('{"step": 3}', "KeyError('split')"),
        ('{"step": 1, "split": "gradients", "loss_scale": [1.0]}', "KeyError('cause')"),
        (
            '{"step": 1, "split": "gradients", "loss_scale": [1.0], "cause": ["bad"]}',
            "KeyError('BAD')",
        ),
        ('{"step": 1, "split": "gradients", "loss_scale": [1.0], "cause": []}', "KeyError"),
        (
            '{"step": 1, "split": "gradients", "loss_scale": [1.0], "cause": ["none"], "max_magnitude": []}',
            "IndexError",
        ),
    ],
)
def test_a_damaged_line_is_refused_by_its_number(path, line, why):
    """The file, the line and what is wrong with it are named."""
    path.write_text('{"step": 1, "split": "train"}\n' + line + "\n")
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        read_record(path)

    assert str(error.value).startswith(f"Line 2 of {path} is damaged ({why}")
    assert str(error.value).endswith(
        f"): {line[:60]!r}. A run that is killed can leave a line unfinished. Delete the line."
    )


def test_a_file_without_gradients_is_refused(path):
    """The error says how to get them."""
    path.write_text('{"step": 1, "split": "train"}\n')
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        read_record(path)

    assert str(error.value) == (
        f"{path} has no recorded gradients. Recording takes another pass over the gradients at every "
        "step, so it is off by default. Train with record_gradients=True, or --record_gradients."
    )
