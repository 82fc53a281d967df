"""Records of gradients: what is written is read back, and damaged files are errors."""

import json

import numpy as np
import pytest
from recorded import step_reports, write_record

from scaling import Cause
from scaling.telemetry import record
from scaling.telemetry.record import parse_record, read_lines, read_record
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
        ('{"step": 1, "split": "gradients", "loss_scale": [1.0], "cause": []}', "IndexError"),
        (
            '{"step": 1, "split": "gradients", "loss_scale": [1.0], "cause": ["none"], "max_magnitude": []}',
            "IndexError",
        ),
    ],
)
def test_a_damaged_line_is_an_error_with_its_number(path, line, why):
    """The error names the file, the line and the fault."""
    path.write_text('{"step": 1, "split": "train"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"^line 2 of .* is damaged") as error:
        read_record(path)

    assert why in str(error.value)


def test_a_file_without_recorded_gradients_is_an_error(path):
    """It says how to record gradients."""
    path.write_text('{"step": 1, "split": "train"}\n')
    with pytest.raises(ValueError, match="record_gradients"):
        read_record(path)


GOOD = {"step": 3, "split": "gradients", "precision": "mixed_float16", "shares": 1}
GOOD |= {"loss_scale": [8.0], "cause": ["none"], "max_magnitude": [1.0], "zeros": 0}
GOOD |= {"exponents": {"-1": 3}}


@pytest.mark.parametrize(
    "change",
    [
        *({"step": value} for value in (-1, 0.5, True, 2**53 + 1, 10**400, "3")),
        *({"loss_scale": [value]} for value in (0.0, -1.0, 1e-45, 1e39, np.nan, "8", True, None)),
        {"loss_scale": []},
        {"loss_scale": [8.0] * 9},
        {"cause": [3]},
        {"cause": ["none", "none"], "loss_scale": [8.0] * 2},
        *({"max_magnitude": [value]} for value in (None, -1.0, np.inf, 1e39, 10**400)),
        {"cause": ["forward"], "max_magnitude": []},
        *({"zeros": value} for value in (-1, None, 10**400)),
        *({"exponents": value} for value in ([], {"x": 1}, {"9999": 1}, {"-9999": 1}, {"1": -1})),
        *({"precision": value} for value in ("\x1b[2J", "float8", None, ["float32"])),
        *({"shares": value} for value in (-1, "1", 10**400)),
    ],
)
def test_values_that_no_run_writes_are_damage(path, change):
    """Each is an error that names the line, or is left out if a function takes the errors."""
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD | {'step': 9} | change)}\n")
    with pytest.raises(ValueError, match=r"^line 2 of .* is damaged"):
        read_record(path)
    errors = []
    found = parse_record(read_lines(path), path, on_damage=errors.append)

    assert (found.step.tolist(), len(errors)) == ([3], 1)
    assert len(str(errors[0])) < 400 + len(str(path))


def test_lines_of_any_file_can_be_read(path, monkeypatch):
    """A byte-order mark is no text, and neither are bytes that are no UTF-8. Of a line that is too
    long only the beginning is kept. What is no file is refused.
    """
    path.write_bytes(b"\xef\xbb\xbfa\r\n\xff\n\n" + b"b" * 9 + b"\xe2\x80\xa8c")
    assert list(read_lines(path)) == [(1, "a"), (2, "\ufffd"), (3, ""), (4, "b" * 9 + "\u2028c")]
    monkeypatch.setattr(record, "LONGEST_LINE", 4)
    path.write_text("abc\nabcdefghi\nabcd\ne")
    assert list(read_lines(path)) == [(1, "abc"), (2, "abcd"), (3, "abcd"), (4, "e")]
    with pytest.raises(ValueError, match="must be a file"):
        list(read_lines(path.parent))
    with pytest.raises(FileNotFoundError):
        list(read_lines(path.parent / "missing"))
