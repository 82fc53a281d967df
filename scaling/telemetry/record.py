"""Writes the lines that record a run's gradients, and reads them back.

Each line of `metrics.jsonl` with `"split": "gradients"` covers the steps up to `"step"`. For each
step it has the loss scale, the cause, and the largest unscaled gradient magnitude. The line also
has one histogram over all of its steps: the number of elements of the applied gradients
with each binary exponent.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from scaling.base.verdict import Cause
from scaling.telemetry.stats import COUNTS, EXPONENTS, LOWEST_EXPONENT, ZERO

SPLIT = "gradients"


@dataclasses.dataclass(frozen=True)
class Record:
    """A run's gradients, step by step: NumPy arrays of shape (steps,), unless noted otherwise."""

    precision: str  # the run's precision; only "mixed_float16" was limited to float16's range
    shares: int  # number of separate backward passes per batch: replicas times microbatches
    step: np.ndarray  # int64
    loss_scale: np.ndarray  # float32: the scale that the step used
    cause: np.ndarray  # int32: a `Cause`
    max_magnitude: np.ndarray  # float32: largest unscaled magnitude; NaN in skipped steps
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
    }


def read_record(path: str | pathlib.Path) -> Record:
    """Reads a run's recorded gradients from its `metrics.jsonl`.

    A run that was stopped and resumed may have written a step twice; the later line counts.

    Raises:
        ValueError: if the file has no recorded gradients, or a line is damaged.
    """
    return parse_record(enumerate(pathlib.Path(path).read_text().splitlines(), start=1), path)


class _Row(NamedTuple):
    """One recorded step."""

    step: int
    loss_scale: float
    cause: Cause
    max_magnitude: float
    interval: int


def parse_record(lines: Iterable[tuple[int, str]], path: str | pathlib.Path) -> Record:
    """Parses the record from the lines of a `metrics.jsonl`; see `read_record`.

    Args:
        lines: pairs of a line's number and its text.
        path: the file that the lines come from, for errors.
    """
    rows: list[_Row] = []
    counts: list[np.ndarray] = []
    precision, shares = "", 1
    for number, text in lines:
        try:
            line = json.loads(text)
            if line["split"] != SPLIT:
                continue
            _append_rows(rows, line, interval=len(counts))
            counts.append(_parse_counts(line))
            precision, shares = line["precision"], line["shares"]
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"Line {number} of {path} is damaged ({error!r}): {text[:60]!r}. A run that is "
                "killed can leave a line unfinished. Delete the line."
            ) from error
    if not rows:
        raise ValueError(
            f"{path} has no recorded gradients. Recording takes another pass over the gradients "
            "at every step, so it is off by default. Train with record_gradients=True, or "
            "--record_gradients."
        )
    step, loss_scale, cause, magnitude, interval = zip(*rows, strict=True)
    return Record(
        precision=precision,
        shares=shares,
        step=np.array(step),
        loss_scale=np.array(loss_scale, np.float32),
        cause=np.array(cause, np.int32),
        max_magnitude=np.array(magnitude, np.float32),
        interval=np.array(interval),
        counts=np.stack(counts),
    )


def _append_rows(rows: list[_Row], line: dict[str, Any], interval: int) -> None:
    """Appends the steps of a line; they replace earlier rows of the same steps."""
    steps = len(line["loss_scale"])
    first = line["step"] - steps + 1
    while rows and rows[-1].step >= first:
        rows.pop()
    causes = [Cause[name.upper()] for name in line["cause"]]
    for offset in range(steps):
        magnitude = line["max_magnitude"][offset]
        rows.append(
            _Row(
                first + offset,
                line["loss_scale"][offset],
                causes[offset],
                np.nan if magnitude is None else magnitude,
                interval,
            )
        )


def _parse_counts(line: dict[str, Any]) -> np.ndarray:
    """Returns the counts of a line: shape (COUNTS,), float32."""
    counts = np.zeros(COUNTS, np.float32)
    counts[ZERO] = line["zeros"]
    for exponent, count in line["exponents"].items():
        counts[int(exponent) - LOWEST_EXPONENT] = count
    return counts
