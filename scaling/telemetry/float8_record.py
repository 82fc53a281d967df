"""Reads what a run recorded about its float8 tensors.

Lines of `metrics.jsonl` may have a "float8" field. By tensor name, it holds the format, the largest
magnitude of that step before the cast (`amax`; null if it was not finite), the scale of that step,
and which share of the numbers saturated and which became 0.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from scaling.base.argument_checks import is_name_in
from scaling.float8.formats import FORMATS
from scaling.telemetry.record import (
    LARGEST_MAGNITUDE,
    DamagedLineError,
    between,
    damaged_line,
    read_lines,
    whole,
)

FIELD = "float8"
MOST_TENSORS = 1000  # others are left out, so that a damaged file takes a bounded time


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """One float8 tensor of a run: NumPy arrays of shape (lines,), in the order of the steps."""

    name: str
    dtype: str  # the float8 format
    step: np.ndarray  # int64: a run may record only some of its steps
    amax: np.ndarray  # float32: the largest magnitude before the cast; NaN if it was not finite
    scale: np.ndarray  # float32: what the step divided by
    saturated: np.ndarray  # float64: share of the numbers that saturated; NaN if unknown
    flushed: np.ndarray  # float64: share of the numbers that became 0; NaN if unknown


class Float8Record(NamedTuple):
    """What a run recorded about its float8 tensors."""

    tensors: list[TensorRecord]  # in the order in which they appear
    left_out: int  # number of tensors beyond the first `MOST_TENSORS`


class _Row(NamedTuple):
    """One tensor in one step."""

    step: int
    amax: float
    scale: float
    saturated: float
    flushed: float


def read_float8_record(path: str | pathlib.Path) -> Float8Record:
    """Reads the float8 tensors of a run from its `metrics.jsonl`.

    A run that was stopped and resumed may have written a step twice; the later line counts.

    Raises:
        OSError: if the file does not exist or cannot be read.
        ValueError: if `path` is no file, or the file says nothing about float8 tensors, or a line
            is damaged.
    """
    return parse_float8_record(read_lines(path), path)


def parse_float8_record(lines: Iterable[tuple[int, str]], path: str | pathlib.Path) -> Float8Record:
    """Parses the record from the lines of a `metrics.jsonl`; see `read_float8_record`.

    Args:
        lines: pairs of a line's number and its text.
        path: the file that the lines come from, for errors.
    """
    rows: dict[tuple[str, str], list[_Row]] = {}
    left_out: set[str] = set()
    for number, text in lines:
        try:
            found = _parse_line(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise damaged_line(number, path, text, error) from error
        for tensor, row in found.items():
            if tensor not in rows and len(rows) == MOST_TENSORS:
                left_out.add(tensor[0])
                continue
            earlier = rows.setdefault(tensor, [])
            while earlier and earlier[-1].step >= row.step:
                earlier.pop()
            earlier.append(row)
    if not rows:
        raise ValueError(
            f"{path} says nothing about float8 tensors. A run in another precision has none, and "
            'one in float8 writes them if it measures them. Train with precision="mixed_float8", '
            "and turn its telemetry on."
        )
    return Float8Record([_tensor(*key, of) for key, of in rows.items()], len(left_out))


def _tensor(name: str, dtype: str, rows: list[_Row]) -> TensorRecord:
    """Returns the rows of a tensor as arrays."""
    step, amax, scale, saturated, flushed = zip(*rows, strict=True)
    return TensorRecord(
        name=name,
        dtype=dtype,
        step=np.array(step),
        amax=np.array(amax, np.float32),
        scale=np.array(scale, np.float32),
        saturated=np.array(saturated, np.float64),
        flushed=np.array(flushed, np.float64),
    )


def _parse_line(line: Any) -> dict[tuple[str, str], _Row]:
    """Returns the tensors of a line, by name and format; none if the line is about other things.

    Raises:
        DamagedLineError: if a value is none that a run writes.
    """
    if FIELD not in line.keys():  # noqa: SIM118  # a list or a number has no keys
        return {}
    step = whole("step", line["step"])
    found = {}
    for name, tensor in line[FIELD].items():
        if not is_name_in(tensor["format"], FORMATS):
            raise DamagedLineError(f"format is {tensor['format']!r:.50}")
        found[name, tensor["format"]] = _Row(
            step,
            _magnitude(tensor["amax"]),
            between("scale", tensor["scale"], 0.0, LARGEST_MAGNITUDE),
            _share("saturated", tensor.get("saturated")),
            _share("flushed", tensor.get("flushed")),
        )
    return found


def _magnitude(value: Any) -> float:
    """Returns a largest magnitude; NaN if it was not finite, which JSON writes in several ways."""
    if value is None or (
        isinstance(value, float) and not math.isfinite(value) and value != -math.inf
    ):
        return math.nan
    return between("amax", value, 0.0, LARGEST_MAGNITUDE)


def _share(name: str, value: Any) -> float:
    """Returns a share, NaN if it is unknown."""
    return math.nan if value is None else between(name, value, 0.0, 1.0)
