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
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

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

    Raises:
        OSError: if the file does not exist or cannot be read.
        ValueError: if a line is cut off, or the file has no recorded gradients.
    """
    lines = []
    for number, text in enumerate(pathlib.Path(path).read_text("utf-8").splitlines(), 1):
        try:
            lines.append(json.loads(text))
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is damaged: {error}") from error
    record = parse_record(line for line in lines if line["split"] == SPLIT)
    if record is None:
        raise ValueError(f"{path} has no recorded gradients: train with record_gradients=True")
    return record


def parse_record(lines: Iterable[Mapping[str, Any]]) -> Record | None:
    """Returns the record that lines hold, as `record_line` returns them; None without any.

    A run that was stopped and resumed may have written a step twice; the later line counts.
    """
    rows: list[tuple[Any, ...]] = []
    counts: list[np.ndarray] = []
    last: Mapping[str, Any] = {}
    for last in lines:
        absent = [0] * len(last["loss_scale"])
        first = last["step"] - len(absent) + 1
        while rows and rows[-1][0] >= first:
            rows.pop()
        rows += zip(
            range(first, last["step"] + 1),
            last["loss_scale"],
            [Cause[name.upper()] for name in last["cause"]],
            [np.nan if each is None else each for each in last["max_magnitude"]],
            last.get("retries", absent),
            last.get("in_float32", absent),
            [len(counts)] * len(absent),
            strict=True,
        )
        counts.append(np.zeros(COUNTS, np.float32))
        counts[-1][ZERO] = last["zeros"]
        for exponent, count in last["exponents"].items():
            counts[-1][int(exponent) - LOWEST_EXPONENT] = count
    if not rows:
        return None
    step, loss_scale, cause, magnitude, retries, in_float32, interval = zip(*rows, strict=True)
    return Record(
        precision=last["precision"],
        shares=last["shares"],
        step=np.array(step),
        loss_scale=np.array(loss_scale, np.float32),
        cause=np.array(cause, np.int32),
        max_magnitude=np.array(magnitude, np.float32),
        retries=np.array(retries, np.int32),
        in_float32=np.array(in_float32, bool),
        interval=np.array(interval),
        counts=np.stack(counts),
    )
