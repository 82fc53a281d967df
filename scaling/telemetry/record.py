"""What a run leaves behind of its gradients, so that other rules can be played over it.

A line of `metrics.jsonl` with `"split": "gradients"` holds the steps up to `"step"`: for each
the loss scale it used, its cause and its largest gradient magnitude, unscaled; and for all of
them together, how many elements of the applied gradients stood under which binary exponent.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from scaling.base.verdict import Cause
from scaling.telemetry.stats import COUNTS, EXPONENTS, LOWEST_EXPONENT, ZERO

SPLIT = "gradients"


@dataclasses.dataclass(frozen=True)
class Record:
    """A run's gradients, step by step: NumPy arrays of shape (steps,)."""

    precision: str  # of the run: "mixed_float16" was bound to float16's range, others were not
    shares: int  # of a batch, each with a backward pass of its own: replicas times microbatches
    step: np.ndarray  # int64
    loss_scale: np.ndarray  # float32: what the step used
    cause: np.ndarray  # int32: a `Cause`
    max_magnitude: np.ndarray  # float32: unscaled; NaN where the step was skipped
    interval: np.ndarray  # int64: which row of `counts` the step belongs to
    counts: np.ndarray  # shape=(intervals, COUNTS), float32: as in `GradientStats`

    @property
    def skipped(self) -> np.ndarray:
        """Whether the step was skipped: shape (steps,), bool."""
        return self.cause != Cause.NONE


def record_line(steps: Any, precision: str, shares: int) -> dict[str, Any]:
    """Returns what stands in one line, ready for `json.dumps`.

    Args:
        steps: successive reports of a training step (`trainer.StepReport`): NumPy arrays
            `step`, `loss_scale`, `cause` and `max_magnitude` of shape (steps,), and
            `magnitude_counts` of shape (steps, COUNTS). What stands there for a skipped
            step is not kept.
        precision: the run's.
        shares: into how many a batch was cut: replicas times microbatches.
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
    """Reads a run's gradients from its `metrics.jsonl`.

    A run that was stopped and taken up again may have written a step twice: the later line
    counts.

    Raises:
        ValueError: if the file holds no recorded gradients, or a line is damaged.
    """
    return record_of(enumerate(pathlib.Path(path).read_text().splitlines(), start=1), path)


def record_of(lines: Iterable[tuple[int, str]], path: str | pathlib.Path) -> Record:
    """Returns what some lines of a `metrics.jsonl` hold; see `read_record`.

    Args:
        lines: each with its number.
        path: the file they stand in, for errors.
    """
    rows: list[tuple] = []
    counts: list[np.ndarray] = []
    precision, shares = "", 1
    for number, text in lines:
        try:
            line = json.loads(text)
            if line["split"] != SPLIT:
                continue
            steps = len(line["loss_scale"])
            first = line["step"] - steps + 1
            while rows and rows[-1][0] >= first:
                rows.pop()
            causes = [Cause[name.upper()] for name in line["cause"]]
            for offset in range(steps):
                magnitude = line["max_magnitude"][offset]
                rows.append(
                    (
                        first + offset,
                        line["loss_scale"][offset],
                        causes[offset],
                        np.nan if magnitude is None else magnitude,
                        len(counts),
                    )
                )
            counts.append(counts_of(line))
            precision, shares = line["precision"], line["shares"]
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"`path` must hold one JSON object a line; got {text[:60]!r} in line {number} of "
                f"{path}. The line is damaged ({error!r}). Remove it."
            ) from error
    if not rows:
        raise ValueError(
            f"`path` must hold recorded gradients; got none in {path}. They cost a pass over the "
            "gradients at each step, so a run keeps them only if it is told to. Train with "
            "record_gradients=True, or --record_gradients."
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


def counts_of(line: dict[str, Any]) -> np.ndarray:
    """Returns a line's counts: shape (COUNTS,), float32."""
    counts = np.zeros(COUNTS, np.float32)
    counts[ZERO] = line["zeros"]
    for exponent, count in line["exponents"].items():
        counts[int(exponent) - LOWEST_EXPONENT] = count
    return counts
