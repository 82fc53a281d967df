"""Reads the `metrics.jsonl` of a run.

Each line is a JSON object whose "split" names the kind of line. A line that cannot be read, such as
the last line of a run that was killed, is ignored and counted. If two lines of the same kind
describe the same step, the later one counts: the run was resumed from an earlier step.
"""

import collections
import dataclasses
import inspect
import json
import math
import operator
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

import numpy as np

from scaling.telemetry.record import SPLIT, Record, parse_record


class HasStep(Protocol):
    """Anything that belongs to one step."""

    @property
    def step(self) -> int:
        """The number of the step."""


T = TypeVar("T")
Event = TypeVar("Event", bound=HasStep)


class Curve(NamedTuple):
    """A quantity over the steps at which it was logged."""

    step: np.ndarray  # shape=(points,), int64: increasing
    value: np.ndarray  # shape=(points,), float64: NaN where null was logged


class Skip(NamedTuple):
    """A skipped step, and where the first non-finite value was found."""

    step: int
    loss_scale: float
    cause: str
    variable: str | None
    replica: int | None
    inf_count: int
    nan_count: int


class VariableFields(TypedDict):
    """The fields of one variable of the model that the report uses."""

    name: str
    shape: list[int]
    dtype: str
    compute_dtype: str
    parameters: int
    bytes: int


class Start(NamedTuple):
    """One start of a run's process. A resumed run has several."""

    step: int
    time: str  # ISO 8601
    settings: dict[str, object]
    model: list[VariableFields]


class End(NamedTuple):
    """How the last call to `train` ended."""

    step: int
    seconds: float
    stopped: bool


class Recovery(NamedTuple):
    """A rollback after the run had diverged."""

    step: int  # where the divergence was found
    what: str  # what diverged, such as "a loss of 1e+04, above 100"
    restored: int  # step of the checkpoint that was restored
    batches_left_out: int


class Underflow(NamedTuple):
    """The share of each variable's gradient that underflowed in float16."""

    step: int  # the last of the steps over which the shares were averaged
    share: dict[str, float]


class ScaleChange(NamedTuple):
    """A step whose loss scale differs from the previous step's."""

    step: int
    loss_scale: float


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that a run has recorded. Fields that were not recorded are empty or None."""

    name: str
    last_step: int
    train: dict[str, Curve]
    validation: dict[str, Curve]
    scale: Curve  # changes of the loss scale: each value holds until the next step in the curve
    skips: list[Skip]
    underflow: list[Underflow]
    record: Record | None  # magnitudes of the gradients
    starts: list[Start]
    end: End | None  # None if the run is still running or was killed
    recoveries: list[Recovery]
    unreadable: int  # number of lines that could not be read


def read_run(run_dir: str | pathlib.Path) -> Run:
    """Reads the `metrics.jsonl` of a run.

    Args:
        run_dir: the run's `model_dir`.

    Raises:
        ValueError: if the file does not exist or has no readable line.
    """
    path = pathlib.Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(
            f"`run_dir` must be a folder with a run's metrics.jsonl; got {str(run_dir)!r}. A run "
            "writes that file to its --model_dir when it starts. Pass that folder."
        )
    lines = Lines(path)
    if not any(lines.by_split.values()):
        raise ValueError(
            f"`run_dir` must be a folder whose metrics.jsonl has readable lines; got "
            f"{str(run_dir)!r}, where 0 of {lines.unreadable} lines are readable. A run that has "
            "just started, or was killed early, has not recorded anything yet. Wait for its first "
            "log line, or start the run again."
        )
    scales = by_step(lines.read("scale", parse_scale_change))
    gradients = lines.by_split[SPLIT]
    return Run(
        name=path.resolve().parent.name,
        last_step=lines.last_step,
        train=to_curves(lines.by_split["train"]),
        validation=to_curves(lines.by_split["validation"]) | read_followed(path.parent),
        scale=to_curve({change.step: change.loss_scale for change in scales}),
        skips=by_step(lines.read("skip", parse_skip)),
        underflow=by_step(lines.read("underflow", parse_underflow)),
        record=parse_record(lines.gradients, path) if gradients else None,
        starts=lines.read("run", Start),
        end=next(reversed(lines.read("end", End)), None),
        recoveries=lines.read("recovery", Recovery),
        unreadable=lines.unreadable,
    )


def read_followed(run_dir: pathlib.Path) -> dict[str, Curve]:
    """Returns the results of an evaluator process, with "eval/" before their names; {} without."""
    path = run_dir / "eval" / "metrics.jsonl"
    curves = to_curves(Lines(path).by_split["validation"]) if path.is_file() else {}
    return {f"eval/{name}": curve for name, curve in curves.items()}


class Lines:
    """The lines of a `metrics.jsonl`, in order, grouped by their "split"."""

    def __init__(self, path: pathlib.Path) -> None:
        """Reads the file."""
        self.by_split: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        self.gradients: list[tuple[int, str]] = []  # line numbers and texts, for `parse_record`
        self.last_step = 0
        self.unreadable = 0  # number of lines that could not be read
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, text in enumerate(lines, start=1):
                self._add(number, text)

    def _add(self, number: int, text: str) -> None:
        """Parses one line."""
        try:
            line = json.loads(text)
            split, step = str(line.pop("split")), operator.index(line["step"])
        except (ValueError, KeyError, TypeError, AttributeError):
            self.unreadable += 1
            return
        self.by_split[split].append(line)
        if split == SPLIT:
            self.gradients.append((number, text))
        if split == "run":  # the run was resumed, so it did not end at an earlier line
            self.by_split["end"].clear()
        if split != "recovery":  # the run rolled back from that step
            self.last_step = max(self.last_step, step)

    def read(self, split: str, parse: Callable[..., T]) -> list[T]:
        """Returns the result of `parse` for each line of a split.

        `parse` receives the fields of a line as keyword arguments. Fields that are not among its
        parameters are ignored, because a later version may have added them. A line on which
        `parse` fails is counted as unreadable.
        """
        parameters = inspect.signature(parse).parameters
        parsed = []
        for line in self.by_split[split]:
            try:
                parsed.append(parse(**{name: line[name] for name in parameters}))
            except (KeyError, TypeError, ValueError, AttributeError):
                self.unreadable += 1
        return parsed


def finite_or_nan(value: object) -> float:
    """Returns a finite JSON number as a float, and NaN for any other value.

    Example:
        >>> finite_or_nan(3), finite_or_nan(None), finite_or_nan("3")
        (3.0, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def positive_or_error(value: object) -> float:
    """Returns a positive finite JSON number as a float, or raises ValueError."""
    number = finite_or_nan(value)
    if not number > 0:  # true for NaN, too
        raise ValueError
    return number


def parse_scale_change(step: int, loss_scale: object) -> ScaleChange:
    """Makes a `ScaleChange` from the fields of a line."""
    return ScaleChange(step, positive_or_error(loss_scale))


def parse_skip(
    step: int,
    loss_scale: object,
    cause: str,
    variable: str | None,
    replica: int | None,
    inf_count: int,
    nan_count: int,
) -> Skip:
    """Makes a `Skip` from the fields of a line."""
    scale = positive_or_error(loss_scale)
    return Skip(step, scale, str(cause), variable, replica, inf_count, nan_count)


def parse_underflow(step: int, share: Mapping[str, object]) -> Underflow:
    """Makes an `Underflow` from the fields of a line."""
    return Underflow(step, {name: finite_or_nan(value) for name, value in share.items()})


def by_step(events: Iterable[Event]) -> list[Event]:
    """Returns events sorted by step, keeping only the last one of each step."""
    last = {event.step: event for event in events}
    return [last[step] for step in sorted(last)]


def to_curve(values: Mapping[int, float]) -> Curve:
    """Returns a curve from values keyed by step."""
    steps = sorted(values)
    return Curve(np.array(steps, np.int64), np.array([values[step] for step in steps], np.float64))


def to_curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Returns a curve for each numeric field, in the order in which the fields first appear."""
    values: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            number = finite_or_nan(value)
            if name != "step" and (value is None or not math.isnan(number)):
                values.setdefault(name, {})[line["step"]] = number
    return {name: to_curve(points) for name, points in values.items()}
