"""Reads the `metrics.jsonl` of a run.

Each line is a JSON object whose "split" names the kind of line. A line that cannot be read, such as
the last line of a run that was killed, is ignored and counted. If two lines of the same kind
describe the same step, the later one counts: the run was resumed from an earlier step.
"""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from scaling.telemetry.record import SPLIT, Record, parse_record
from trainer.log.writers import stays

EVENTS = "run", "recovery", "end", "failure"  # kinds of lines that a rollback does not undo


T = TypeVar("T")


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


class Retry(NamedTuple):
    """A step whose batch was attempted more than once."""

    step: int
    retries: int  # number of attempts after the first one


class Start(NamedTuple):
    """One start of a run's process. A resumed run has several."""

    step: int
    time: str  # ISO 8601
    settings: dict[str, object]
    model: list[dict[str, Any]]  # the fields of `trainer.log.model_table.VariableRow`


class End(NamedTuple):
    """How the last call to `train` ended."""

    step: int
    seconds: float
    stopped: bool


class Failure(NamedTuple):
    """The error with which the last call to `train` ended."""

    step: int  # how far the run had come
    error: str  # such as "DataError: ..."


class Recovery(NamedTuple):
    """A rollback after the run had diverged."""

    step: int  # where the divergence was found
    what: str  # what diverged, such as "a loss of 1e+04, above 100"
    restored: int  # step of the checkpoint that was restored
    batches_left_out: int


class Underflow(NamedTuple):
    """The share of each variable's gradient that underflowed in float16."""

    step: int  # the last of the steps over which the shares were averaged
    share: dict[str, float | None]  # None if it was not measured


class Float8Values(NamedTuple):
    """What was recorded of a float8 tensor for the steps up to a log line."""

    format: str  # one of `scaling.float8.cast.FORMATS`
    amax: float | None  # the largest magnitude; None if it was inf
    scale: float  # what the last of the steps divided by
    saturated: float | None  # share of its numbers that were too large; None if not counted
    flushed: float | None  # share of its numbers that became 0; None if not counted
    saturated_steps: int  # number of steps in which its largest magnitude was too large


class Float8Tensors(NamedTuple):
    """The float8 tensors of a model at a log line."""

    step: int
    values: dict[str, Float8Values]


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that a run has recorded. Fields that were not recorded are empty or None."""

    name: str
    last_step: int
    train: dict[str, Curve]
    validation: dict[str, Curve]
    scale: Curve  # changes of the loss scale: each value holds until the next step in the curve
    skips: list[Skip]
    retries: list[Retry]
    underflow: list[Underflow]
    float8: list[Float8Tensors]
    record: Record | None  # magnitudes of the gradients
    starts: list[Start]
    end: End | None  # None if the run is still running, failed, or was killed
    failure: Failure | None
    recoveries: list[Recovery]
    unreadable: int  # number of lines that could not be read


def read_run(run_dir: str | pathlib.Path) -> Run:
    """Reads the `metrics.jsonl` of a run.

    Args:
        run_dir: the run's `model_dir`.

    Raises:
        OSError: if the file may not be read.
        ValueError: if the file does not exist or has no readable line.
    """
    path = pathlib.Path(run_dir) / "metrics.jsonl"
    lines = Lines(path) if path.is_file() else None
    if not lines or not any(lines.by_split.values()):
        raise ValueError(f"`run_dir` must hold a metrics.jsonl with lines; got {str(run_dir)!r}")
    scales = {line["step"]: line["loss_scale"] for line in lines.by_split["scale"]}
    return Run(
        name=pathlib.Path(run_dir).resolve().name,
        last_step=lines.last_step,
        train=to_curves(lines.by_split["train"]),
        validation=to_curves(lines.by_split["validation"]) | read_followed(path.parent),
        scale=to_curve(scales),
        skips=by_step(lines.read("skip", Skip)),
        retries=by_step(lines.read("retry", Retry)),
        underflow=by_step(lines.read("underflow", Underflow)),
        float8=by_step(lines.read("float8", float8_tensors, ("step", "float8"))),
        record=parse_record(lines.by_split[SPLIT]),
        starts=lines.read("run", Start),
        end=next(reversed(lines.read("end", End)), None),
        failure=next(reversed(lines.read("failure", Failure)), None),
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
        self.last_step = 0
        self.unreadable = 0  # number of lines that could not be read
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                self._add(text)

    def _add(self, text: str) -> None:
        """Parses one line."""
        try:
            line = json.loads(text)
            split, step = line.pop("split"), line["step"]
        except (ValueError, KeyError, TypeError, AttributeError):
            self.unreadable += 1
            return
        self.by_split[split].append(line)
        if split in {"run", "end", "failure"}:  # a call to `train` that came after an earlier end
            for earlier in {"end", "failure"} - {split}:
                self.by_split[earlier].clear()
        if split == "recovery":
            self._go_back(line["restored"], line.get("interval_begun", line["restored"] + 1))
        else:
            self.last_step = max(self.last_step, step)

    def _go_back(self, restored: int, begun: int) -> None:
        """Forgets the lines about steps that a rollback has undone; see `History.read`."""
        for split, lines in self.by_split.items():
            if split not in EVENTS:
                lines[:] = [
                    each for each in lines if stays({**each, "split": split}, restored, begun)
                ]
        self.last_step = restored

    def read(self, split: str, make: Callable[..., T], names: Sequence[str] = ()) -> list[T]:
        """Returns what `make` makes of each line of a split; a line without its fields is counted.

        Args:
            split: the kind of line.
            make: called with fields of the line as arguments.
            names: the fields; by default, those of a NamedTuple. A line may have others.
        """
        fields = names or make._fields  # type: ignore[attr-defined]
        found = []
        for line in self.by_split[split]:
            if line.keys() >= set(fields):
                found.append(make(**{name: line[name] for name in fields}))
            else:
                self.unreadable += 1
        return found


def float8_tensors(step: int, float8: Mapping[str, Mapping[str, Any]]) -> Float8Tensors:
    """Makes a `Float8Tensors` from the fields of a line."""
    fields = Float8Values._fields
    return Float8Tensors(
        step, {name: Float8Values(*(its[key] for key in fields)) for name, its in float8.items()}
    )


def by_step(events: Iterable[T]) -> list[T]:
    """Returns events sorted by step, keeping only the last one of each step."""
    last = {event.step: event for event in events}  # type: ignore[attr-defined]
    return [last[step] for step in sorted(last)]


def to_curve(values: Mapping[int, float | None]) -> Curve:
    """Returns a curve from values keyed by step, in which None is NaN."""
    steps = sorted(values)
    return Curve(np.array(steps, np.int64), np.array([values[step] for step in steps], np.float64))


def to_curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Returns a curve for each field, in the order in which the fields first appear."""
    values: dict[str, dict[int, float | None]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step":
                values.setdefault(name, {})[line["step"]] = value
    return {name: to_curve(points) for name, points in values.items()}
