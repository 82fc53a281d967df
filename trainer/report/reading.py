"""What a run has left in its `metrics.jsonl`, as values.

Each line is a JSON object whose "split" says what it is about. A line that cannot be read, as the
last one of a killed run may be, is left out and counted. Of two lines about one step the later
counts: the run was taken up again from before it.
"""

import collections
import dataclasses
import inspect
import json
import math
import operator
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from scaling.telemetry.record import SPLIT, Record, parse_record

T = TypeVar("T")


class Curve(NamedTuple):
    """A number over the steps at which it was written."""

    step: np.ndarray  # shape=(points,), int64: rising
    value: np.ndarray  # shape=(points,), float64: NaN where it was null


class Skip(NamedTuple):
    """A skipped step, and what was found where it first went wrong."""

    step: int
    loss_scale: float
    cause: str
    variable: str | None
    replica: int | None
    inf_count: int
    nan_count: int


class Start(NamedTuple):
    """One start of the job; a run that was taken up again has several."""

    step: int
    time: str  # ISO 8601
    settings: dict[str, Any]
    model: list[dict[str, Any]]  # a row for each variable


class End(NamedTuple):
    """How the last call of `train` ended."""

    step: int
    seconds: float
    stopped: bool


class Recovery(NamedTuple):
    """The run had diverged, and was taken back."""

    step: int
    what: str
    restored: int
    batches_left_out: int


class Underflow(NamedTuple):
    """Which share of each variable's gradient underflowed in float16, up to a step."""

    step: int
    share: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, as far as it has told of itself. What it has not told is empty, or None."""

    name: str
    last_step: int
    train: dict[str, Curve]
    validation: dict[str, Curve]
    scale: Curve  # the scale from each of these steps on
    skips: list[Skip]
    underflow: list[Underflow]
    record: Record | None  # of the gradients' magnitudes
    starts: list[Start]
    end: End | None  # None if it runs on, or was killed
    recoveries: list[Recovery]
    unread: int  # lines that could not be read


def read_run(run_dir: str | pathlib.Path) -> Run:
    """Reads a run's `metrics.jsonl`.

    Args:
        run_dir: the run's `model_dir`.

    Raises:
        ValueError: if there is no such file, or no line in it that can be read.
    """
    path = pathlib.Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(
            f"`run_dir` must be a folder with a run's metrics.jsonl; got {str(run_dir)!r}. A run "
            "writes that file at its first log line. Give the run's --model_dir."
        )
    lines = Lines(path)
    if not any(lines.by_split.values()):
        raise ValueError(
            f"`run_dir` must hold the numbers of a run; got a metrics.jsonl in {str(run_dir)!r} "
            f"with no line that can be read, of {lines.unread}. A run that was killed, or that is "
            "young, has none yet. Wait for its first log line, or start it again."
        )
    skips = by_step(lines.read("skip", skip_of))
    scales = by_step(lines.read("scale", lambda step, loss_scale: (step, positive(loss_scale))))
    train, validation = curves(lines.by_split["train"]), curves(lines.by_split["validation"])
    gradients = lines.by_split[SPLIT]
    return Run(
        name=path.resolve().parent.name,
        last_step=lines.last_step,
        train=train,
        validation=validation,
        scale=curve_of(dict(scales)),
        skips=skips,
        underflow=by_step(lines.read("underflow", underflow_of)),
        record=parse_record(lines.gradients, path) if gradients else None,
        starts=lines.read("run", Start),
        end=next(reversed(lines.read("end", End)), None),
        recoveries=lines.read("recovery", Recovery),
        unread=lines.unread,
    )


class Lines:
    """The lines of a file, in order, by their "split"; and how many could not be read."""

    def __init__(self, path: pathlib.Path) -> None:
        """Reads the file."""
        self.by_split: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        self.gradients: list[tuple[int, str]] = []  # as `parse_record` takes them
        self.last_step = 0
        self.unread = 0
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, text in enumerate(lines, start=1):
                self._take(number, text)

    def _take(self, number: int, text: str) -> None:
        try:
            line = json.loads(text)
            split, step = str(line.pop("split")), operator.index(line["step"])
        except (ValueError, KeyError, TypeError, AttributeError):
            self.unread += 1
            return
        self.by_split[split].append(line)
        if split == SPLIT:
            self.gradients.append((number, text))
        if split == "run":  # an end before it was not the last
            self.by_split["end"].clear()
        if split != "recovery":  # which tells of steps that were taken back
            self.last_step = max(self.last_step, step)

    def read(self, split: str, make: Callable[..., T]) -> list[T]:
        """Returns what `make` makes of the facts of each line of a split.

        `make` takes them by name. What a later version may have added to a line is left out.
        """
        wanted = inspect.signature(make).parameters
        made = []
        for line in self.by_split[split]:
            try:
                made.append(make(**{name: line[name] for name in wanted}))
            except (KeyError, TypeError, ValueError, AttributeError):
                self.unread += 1
        return made


def number(value: Any) -> float:
    """Returns a finite number of JSON as it is, and NaN for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else math.nan


def positive(value: Any) -> float:
    """Returns a number that is positive and finite, or raises ValueError."""
    if not number(value) > 0:  # nor is NaN
        raise ValueError
    return float(value)


def skip_of(
    step: int,
    loss_scale: Any,
    cause: str,
    variable: Any,
    replica: Any,
    inf_count: int,
    nan_count: int,
) -> Skip:
    """Returns the skip of a line."""
    return Skip(step, positive(loss_scale), str(cause), variable, replica, inf_count, nan_count)


def underflow_of(step: int, share: dict[str, Any]) -> Underflow:
    """Returns the shares of a line."""
    return Underflow(step, {name: number(each) for name, each in share.items()})


def by_step(facts: Iterable[Any]) -> list[Any]:
    """Returns facts in the order of their steps, which come first; of each step the last."""
    return [fact for _, fact in sorted({fact[0]: fact for fact in facts}.items())]


def curve_of(values: dict[int, float]) -> Curve:
    """Returns values by step as a curve."""
    steps = sorted(values)
    return Curve(np.array(steps, np.int64), np.array([values[step] for step in steps], np.float64))


def curves(lines: list[dict[str, Any]]) -> dict[str, Curve]:
    """Returns a curve for every number that stands in some lines, in the order of their coming."""
    values: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and (value is None or not math.isnan(number(value))):
                values.setdefault(name, {})[line["step"]] = number(value)
    return {name: curve_of(points) for name, points in values.items()}
