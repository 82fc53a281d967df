"""Reading what a run recorded about its float8 tensors, and the errors of damaged lines."""

import json
import math

import numpy as np
import pytest
from recorded import float8_line, write_float8

from scaling.telemetry import float8_record
from scaling.telemetry.float8_record import read_float8_record


@pytest.fixture
def path(tmp_path):
    """The path of a run's `metrics.jsonl`."""
    return tmp_path / "metrics.jsonl"


def test_every_tensor_has_the_lines_that_name_it(path):
    """In the order of the file; magnitudes that were not finite, however they are written, are NaN."""
    found = write_float8(
        path,
        float8_line(10, a=(448.0, 1.0), b=(None, 2.0, "float8_e5m2", 0.25, 0.5)),
        float8_line(20, a=(math.inf, 0.5)),
        float8_line(30, a=(math.nan, 0.5), b=(3, 4, "float8_e5m2", None, None)),
    )
    assert found.left_out == 0
    [a, b] = found.tensors
    assert (a.name, a.dtype, b.name, b.dtype) == ("a", "float8_e4m3fn", "b", "float8_e5m2")
    assert (a.step.tolist(), b.step.tolist()) == ([10, 20, 30], [10, 30])
    np.testing.assert_array_equal(a.amax, [448.0, np.nan, np.nan])
    np.testing.assert_array_equal(b.amax, [np.nan, 3.0])
    assert (a.scale.tolist(), b.scale.tolist()) == ([1.0, 0.5, 0.5], [2.0, 4.0])
    np.testing.assert_array_equal(b.saturated, [0.25, np.nan])
    np.testing.assert_array_equal(b.flushed, [0.5, np.nan])


def test_the_later_line_of_a_step_counts(path):
    """A run that is resumed from step 10 writes step 20 again; another tensor keeps its lines."""
    [a, b] = write_float8(
        path,
        float8_line(10, a=(1.0, 1.0), b=(1.0, 1.0)),
        float8_line(20, a=(2.0, 1.0)),
        float8_line(30, a=(3.0, 1.0)),
        float8_line(20, a=(4.0, 1.0)),
    ).tensors
    assert (a.step.tolist(), a.amax.tolist()) == ([10, 20], [1.0, 4.0])
    assert b.step.tolist() == [10]


def test_tensors_beyond_a_thousand_are_counted(path, monkeypatch):
    """So that a damaged file takes a bounded time."""
    monkeypatch.setattr(float8_record, "MOST_TENSORS", 2)
    found = write_float8(
        path,
        float8_line(1, a=(1.0, 1.0)),
        *(float8_line(step, b=(1.0, 1.0), c=(1.0, 1.0)) for step in (2, 3)),
    )
    assert [tensor.name for tensor in found.tensors] == ["a", "b"]
    assert [len(tensor.step) for tensor in found.tensors] == [1, 2]
    assert found.left_out == 1


def test_a_file_without_float8_is_refused(path):
    """The error says what to do."""
    path.write_text('{"split": "train", "step": 1}\n')
    with pytest.raises(ValueError, match="float8") as error:
        read_float8_record(path)
    assert str(error.value) == (
        f"{path} says nothing about float8 tensors. A run in another precision has none, and one in "
        'float8 writes them if it measures them. Train with precision="mixed_float8", and turn its '
        "telemetry on."
    )


GOOD = {"format": "float8_e4m3fn", "amax": 1.0, "scale": 1.0, "saturated": 0.0, "flushed": 0.0}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"split": "tr', "JSONDecodeError("),
        ("[1]", "AttributeError("),
        ("null", "AttributeError("),
        ({"step": 1, "float8": None}, "AttributeError("),
        ({"step": 1, "float8": {"a": 1}}, "TypeError("),
        ({"step": 1, "float8": {"a": {"format": "float8_e5m2"}}}, "KeyError('amax')"),
        ({"step": "1", "float8": {"a": GOOD}}, "DamagedLineError(\"step is '1'\")"),
        ({"float8": {"a": GOOD}}, "KeyError('step')"),
        *(
            (
                {"step": 1, "float8": {"a": GOOD | {field: value}}},
                f"DamagedLineError({f'{field} is {value!r:.50}'!r})",
            )
            for field, value in {
                "format": "float8_e4m3",
                "amax": -1.0,
                "scale": None,
                "saturated": 1.5,
                "flushed": -0.1,
            }.items()
        ),
        ({"step": 1, "float8": {"a": GOOD | {"amax": 1e39}}}, "DamagedLineError('amax is 1e+39')"),
        (
            {"step": 1, "float8": {"a": GOOD | {"amax": -math.inf}}},
            "DamagedLineError('amax is -inf')",
        ),
        ({"step": 1, "float8": {"a": GOOD | {"amax": True}}}, "DamagedLineError('amax is True')"),
        (
            {"step": 1, "float8": {"a": GOOD | {"scale": math.nan}}},
            "DamagedLineError('scale is nan')",
        ),
        ({"step": 1, "float8": {"a": GOOD | {"format": []}}}, "DamagedLineError('format is []')"),
    ],
)
def test_a_damaged_line_is_named(path, line, reason):
    """Its number, what is wrong with it, and what to do."""
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text(f"{json.dumps(float8_line(1, a=(1.0, 1.0)))}\n{text}\n")
    with pytest.raises(ValueError, match="damaged") as error:
        read_float8_record(path)
    message = str(error.value)
    assert message.startswith(f"Line 2 of {path} is damaged ({reason}"), message
    assert message.endswith(
        f"): {text[:60]!r}. A run that is killed can leave a line unfinished. Delete the line."
    )
