"""Writes the lines that record a run's gradients, and reads them back.

Each line of `metrics.jsonl` with `"split": "gradients"` covers the steps up to `"step"`. For each
step it has the loss scale, the cause, and the largest unscaled gradient magnitude. If a step was
retried or computed in float32, it also says of each step how often and whether. The line has one
histogram over all of its steps: the number of elements of the applied gradients with each binary
exponent.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from scaling.base.argument_checks import is_number
from scaling.base.number_formats import LARGEST_SCALE, SMALLEST_SCALE
from scaling.base.verdict import Cause
from scaling.ops.precision import COMPUTE_DTYPES
from scaling.telemetry.stats import COUNTS, EXPONENTS, LOWEST_EXPONENT, ZERO

SPLIT = "gradients"
LAST_STEP = 2**53  # larger integers are not exact as floats
LONGEST_LINE = 2**26  # characters; a line of a hundred thousand steps has five million
LARGEST_MAGNITUDE = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Record:
    """A run's gradients, step by step: NumPy arrays of shape (steps,), unless noted otherwise."""

    precision: str  # the run's precision; only "mixed_float16" was limited to float16's range
    shares: int  # number of separate backward passes per batch: replicas times microbatches
    step: np.ndarray  # int64
    loss_scale: np.ndarray  # float32: the scale that the step used
    cause: np.ndarray  # int32: a `Cause`
    max_magnitude: np.ndarray  # float32: largest unscaled magnitude; NaN in skipped steps
    # int32: number of attempts at larger scales that overflowed before the one at `loss_scale`
    retries: np.ndarray
    in_float32: np.ndarray  # bool: whether the step was computed in float32, whatever `precision`
    interval: np.ndarray  # int64: the row of `counts` to which the step belongs
    # shape=(intervals, COUNTS), float32: a histogram per line, as in `GradientStats.counts`
    counts: np.ndarray

    @property
    def skipped(self) -> np.ndarray:
        """Whether the step was skipped: shape (steps,), bool."""
        return np.asarray(self.cause != Cause.NONE)


class StepReports(Protocol):
    """Reports of successive steps, as NumPy arrays; see `trainer.StepReport`."""

    @property
    def step(self) -> np.ndarray:
        """The steps' numbers: shape (steps,), int64."""

    @property
    def loss_scale(self) -> np.ndarray:
        """The scales that the steps used: shape (steps,), float32."""

    @property
    def cause(self) -> np.ndarray:
        """Why each step was skipped (a `Cause`; NONE if applied): shape (steps,), int32."""

    @property
    def max_magnitude(self) -> np.ndarray:
        """The largest unscaled gradient magnitudes: shape (steps,), float32."""

    @property
    def retries(self) -> np.ndarray:
        """Numbers of attempts before the last one: shape (steps,), int32."""

    @property
    def in_float32(self) -> np.ndarray:
        """Whether each step was computed in float32: shape (steps,), bool."""

    @property
    def magnitude_counts(self) -> np.ndarray:
        """Histograms as in `GradientStats.counts`: shape (steps, COUNTS), float32."""


def record_line(steps: StepReports, precision: str, shares: int) -> dict[str, Any]:
    """Returns the content of one line, ready for `json.dumps`.

    Args:
        steps: the reports of the steps since the last line. The magnitudes of skipped steps are
            left out.
        precision: the precision of the run.
        shares: number of separate backward passes per batch: replicas times microbatches.
    """
    applied = steps.cause == Cause.NONE
    total = steps.magnitude_counts[applied].sum(axis=0)
    exponents = {
        str(index + LOWEST_EXPONENT): int(total[index])
        for index in np.flatnonzero(total[:EXPONENTS])
    }
    rare = {"retries": steps.retries, "in_float32": steps.in_float32}
    return {
        "step": int(steps.step[-1]),
        "split": SPLIT,
        "precision": precision,
        "shares": shares,
        "loss_scale": [float(scale) for scale in steps.loss_scale],
        "cause": [Cause(int(value)).name.lower() for value in steps.cause],
        "max_magnitude": [
            float(value) if known else None
            for value, known in zip(steps.max_magnitude, applied, strict=True)
        ],
        "zeros": int(total[ZERO]),
        "exponents": exponents,
        **{name: values.tolist() for name, values in rare.items() if values.any()},
    }


def read_record(path: str | pathlib.Path) -> Record:
    """Reads a run's recorded gradients from its `metrics.jsonl`.

    A run that was stopped and resumed may have written a step twice; the later line counts.

    Raises:
        OSError: if the file does not exist or cannot be read.
        ValueError: if `path` is no file, or the file has no recorded gradients, or a line is
            damaged.
    """
    return parse_record(read_lines(path), path)


def read_lines(path: str | pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields the number and the text of each line, without its end.

    Bytes that are no UTF-8 are replaced. Of a line that is longer than `LONGEST_LINE`, which no run
    writes, only the beginning is kept, so that memory is bounded.

    Raises:
        OSError: if the file does not exist or cannot be read.
        ValueError: if `path` is a folder, a pipe or a device, whose end might never come.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} must be a file, such as the metrics.jsonl of a run")
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        number, is_start = 0, True
        while text := file.readline(LONGEST_LINE):
            if is_start:
                number += 1
                yield number, text.removesuffix("\n")
            is_start = text.endswith("\n")


class _Row(NamedTuple):
    """One recorded step."""

    step: int
    loss_scale: float
    cause: Cause
    max_magnitude: float
    retries: int
    in_float32: bool
    interval: int


class DamagedLineError(ValueError):
    """A line of recorded gradients has a value that no run writes."""


def parse_record(
    lines: Iterable[tuple[int, str]],
    path: str | pathlib.Path,
    on_damage: Callable[[ValueError], None] | None = None,
) -> Record:
    """Parses the record from the lines of a `metrics.jsonl`; see `read_record`.

    Args:
        lines: pairs of a line's number and its text.
        path: the file that the lines come from, for errors.
        on_damage: called with the error of each damaged line, which is then left out. None raises
            the error.
    """
    rows: list[_Row] = []
    counts: list[np.ndarray] = []
    precision, shares = "", 1
    for number, text in lines:
        try:
            line = json.loads(text)
            if line["split"] != SPLIT:
                continue
            new, new_counts = _parse_rows(line, interval=len(counts)), _parse_counts(line)
            precision, shares = _parse_setting(line)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            damage = damaged_line(number, path, error)
            if on_damage is None:
                raise damage from error
            on_damage(damage)
            continue
        while rows and rows[-1].step >= new[0].step:
            rows.pop()
        rows += new
        counts.append(new_counts)
    if not rows:
        raise ValueError(f"{path} has no recorded gradients: train with record_gradients=True")
    step, loss_scale, cause, magnitude, retries, in_float32, interval = zip(*rows, strict=True)
    return Record(
        precision=precision,
        shares=shares,
        step=np.array(step),
        loss_scale=np.array(loss_scale, np.float32),
        cause=np.array(cause, np.int32),
        max_magnitude=np.array(magnitude, np.float32),
        retries=np.array(retries, np.int32),
        in_float32=np.array(in_float32),
        interval=np.array(interval),
        counts=np.stack(counts),
    )


def damaged_line(number: int, path: str | pathlib.Path, error: Exception) -> ValueError:
    """Returns the error about a line, with at most about a hundred characters of the reason."""
    return ValueError(f"line {number} of {path} is damaged: {error!r:.100}")


def _parse_rows(line: dict[str, Any], interval: int) -> list[_Row]:
    """Returns the steps of a line.

    Raises:
        DamagedLineError: if a value is none that a run writes.
    """
    steps = len(line["loss_scale"])
    first = whole("step", line["step"]) - steps + 1
    if not steps or first < 0:
        raise DamagedLineError(f"{steps} steps up to step {line['step']}")
    retries, in_float32 = (line.get(name, [0] * steps) for name in ("retries", "in_float32"))
    rows = []
    for offset in range(steps):
        cause = Cause[line["cause"][offset].upper()]
        magnitude = np.nan
        if cause == Cause.NONE:
            found = line["max_magnitude"][offset]
            magnitude = between("max_magnitude", found, 0.0, LARGEST_MAGNITUDE)
        elif offset >= len(line["max_magnitude"]):
            raise DamagedLineError("max_magnitude is too short")
        scale = line["loss_scale"][offset]
        scale = between("loss_scale", scale, SMALLEST_SCALE, LARGEST_SCALE)
        repeated, wide = whole("retries", retries[offset]), bool(in_float32[offset])
        rows.append(_Row(first + offset, scale, cause, magnitude, repeated, wide, interval))
    return rows


def _parse_counts(line: dict[str, Any]) -> np.ndarray:
    """Returns the counts of a line: shape (COUNTS,), float32.

    Raises:
        DamagedLineError: if a value is none that a run writes.
    """
    counts = np.zeros(COUNTS, np.float32)
    counts[ZERO] = between("zeros", line["zeros"], 0, LARGEST_MAGNITUDE)
    for exponent, count in line["exponents"].items():
        place = int(between("exponents", int(exponent) - LOWEST_EXPONENT, 0, EXPONENTS - 1))
        counts[place] = between("exponents", count, 0, LARGEST_MAGNITUDE)
    return counts


def _parse_setting(line: dict[str, Any]) -> tuple[str, int]:
    """Returns the precision and the number of shares of a line.

    Raises:
        DamagedLineError: if a value is none that a run writes.
    """
    precision = line["precision"]
    if not isinstance(precision, str) or precision not in COMPUTE_DTYPES:
        raise DamagedLineError(f"precision is {precision!r:.50}")
    return precision, max(whole("shares", line["shares"]), 1)


def between(name: str, value: Any, low: float, high: float) -> float:
    """Returns a number of a line as a float, or raises DamagedLineError if it is out of bounds."""
    if not is_number(value) or not low <= value <= high:  # also for NaN
        raise DamagedLineError(f"{name} is {value!r:.50}")
    return float(value)


def whole(name: str, value: Any) -> int:
    """Returns a count or a step of a line, or raises DamagedLineError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LAST_STEP:
        raise DamagedLineError(f"{name} is {value!r:.50}")
    return value
