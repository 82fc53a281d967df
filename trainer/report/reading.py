"""Reads the `metrics.jsonl` of a run.

Each line is a JSON object whose "split" names the kind of line. A line that cannot be read, such as
the last line of a run that was killed, is ignored and counted. If two lines of the same kind
describe the same step, the later one counts: the run was resumed from an earlier step.

Nothing in the file is trusted. Numbers are checked to be in a range that can be drawn, and texts
are shortened and cleaned here.
"""

import collections
import dataclasses
import inspect
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

import numpy as np

from scaling.float8.cast import FORMATS
from scaling.telemetry.record import LAST_STEP, SPLIT, Record, parse_record, read_lines
from trainer.log.writers import stays

MAX_DEPTH = 20  # of nested objects and lists in a line
MAX_NAME = 200  # characters of a name
MAX_TEXT = 10_000  # characters of any other text
LARGEST = 1e200  # a larger value would overflow on its way through the pictures
LONGEST_RUN = 1e12  # seconds
EVENTS = "run", "recovery", "end", "failure"  # kinds of lines that a rollback does not undo
# Characters that change how the text around them is shown, and halves of characters.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)


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


class Retry(NamedTuple):
    """A step whose batch was attempted more than once."""

    step: int
    retries: int  # number of attempts after the first one


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
    share: dict[str, float]


class Float8Values(NamedTuple):
    """What was recorded of a float8 tensor for the steps up to a log line."""

    format: str  # one of `scaling.float8.cast.FORMATS`
    amax: float  # the largest magnitude
    scale: float  # what the last of the steps divided by
    saturated: float  # share of its numbers that were too large; NaN if it was not counted
    flushed: float  # share of its numbers that became 0; NaN if it was not counted
    saturated_steps: int  # number of steps in which its largest magnitude was too large


class Float8Tensors(NamedTuple):
    """The float8 tensors of a model at a log line."""

    step: int
    values: dict[str, Float8Values]


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
    return Run(
        name=clean(pathlib.Path(run_dir).resolve().name),
        last_step=lines.last_step,
        train=to_curves(lines.by_split["train"]),
        validation=to_curves(lines.by_split["validation"]) | read_followed(path.parent),
        scale=to_curve({change.step: change.loss_scale for change in scales}),
        skips=by_step(lines.read("skip", parse_skip)),
        retries=by_step(lines.read("retry", parse_retry)),
        underflow=by_step(lines.read("underflow", parse_underflow)),
        float8=by_step(lines.read("float8", parse_float8)),
        record=lines.read_record(path),
        starts=lines.read("run", parse_start),
        end=next(reversed(lines.read("end", parse_end)), None),
        failure=next(reversed(lines.read("failure", parse_failure)), None),
        recoveries=lines.read("recovery", parse_recovery),
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
        # Steps, line numbers and texts, for `parse_record`.
        self.gradients: list[tuple[int, int, str]] = []
        self.last_step = 0
        self.unreadable = 0  # number of lines that could not be read
        for number, text in read_lines(path):
            self._add(number, text)

    def _add(self, number: int, text: str) -> None:
        """Parses one line."""
        try:
            line = cleaned(json.loads(text))
            split, step = str(line.pop("split")), check_count(line["step"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.unreadable += 1
            return
        self.by_split[split].append(line)
        if split == SPLIT:
            self.gradients.append((step, number, text))
        if split in {"run", "end", "failure"}:  # a call to `train` that came after an earlier end
            for earlier in {"end", "failure"} - {split}:
                self.by_split[earlier].clear()
        if split == "recovery":
            self._go_back(line)
        else:
            self.last_step = max(self.last_step, step)

    def _go_back(self, line: dict[str, Any]) -> None:
        """Forgets the lines about steps that a rollback has undone; see `History.read`."""
        try:
            restored = check_count(line["restored"])
            begun = check_count(line.get("interval_begun", restored + 1))
        except (ValueError, KeyError, TypeError):
            return  # `read` counts the line
        for split, lines in self.by_split.items():
            if split not in EVENTS:
                lines[:] = [
                    each for each in lines if stays({**each, "split": split}, restored, begun)
                ]
        self.gradients = [
            each for each in self.gradients if each[0] <= restored and each[0] < begun
        ]
        self.last_step = restored

    def read_record(self, path: pathlib.Path) -> Record | None:
        """Returns the recorded gradients, without damaged lines; None if there are none."""
        damaged: list[ValueError] = []
        try:
            lines = [(number, text) for _, number, text in self.gradients]
            return parse_record(lines, path, on_damage=damaged.append)
        except ValueError:  # no line is left
            return None
        finally:
            self.unreadable += len(damaged)

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
    """Returns a JSON number of at most `LARGEST` as a float, and NaN for any other value.

    Example:
        >>> finite_or_nan(3), finite_or_nan(None), finite_or_nan("3")
        (3.0, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if -LARGEST <= value <= LARGEST else math.nan  # false for NaN, too


def positive_or_error(value: object) -> float:
    """Returns a positive finite JSON number as a float, or raises ValueError."""
    number = finite_or_nan(value)
    if not number > 0:  # true for NaN, too
        raise ValueError
    return number


def clean(text: str, longest: int = MAX_TEXT) -> str:
    r"""Returns a text that can be shown anywhere: unprintable characters become escapes.

    A text that is too long loses its middle.

    Example:
        >>> clean("a\x1b[2J"), clean("abcdefgh", 5)
        ('a\\x1b[2J', 'ab…gh')
    """
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]}…{text[-half:]}"
    return UNPRINTABLE.sub(lambda found: repr(found.group())[1:-1], text)


def cleaned(value: Any, depth: int = 0) -> Any:
    """Returns a JSON value with all of its texts and names cleaned.

    Raises:
        ValueError: if it is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise ValueError
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [cleaned(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {clean(name, MAX_NAME): cleaned(item, depth + 1) for name, item in value.items()}
    return value


def check_count(value: object) -> int:
    """Returns a step, or another whole number that is not negative, or raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LAST_STEP:
        raise ValueError
    return value


def check_text(value: object) -> str:
    """Returns a text, or raises ValueError."""
    if not isinstance(value, str):
        raise ValueError
    return value


def parse_scale_change(step: int, loss_scale: object) -> ScaleChange:
    """Makes a `ScaleChange` from the fields of a line."""
    return ScaleChange(step, positive_or_error(loss_scale))


def parse_start(step: int, time: object, settings: object, model: object) -> Start:
    """Makes a `Start` from the fields of a line."""
    if not isinstance(settings, dict) or not isinstance(model, list):
        raise ValueError
    return Start(step, str(time), settings, [parse_variable(**row) for row in model])


def parse_variable(
    name: object,
    shape: Iterable[object],
    dtype: object,
    compute_dtype: object,
    parameters: object,
    bytes: object,  # noqa: A002 - the field's name
    **_later: object,
) -> VariableFields:
    """Makes the fields of a variable from those of a line."""
    return {
        "name": check_text(name),
        "shape": [check_count(length) for length in shape],
        "dtype": check_text(dtype),
        "compute_dtype": check_text(compute_dtype),
        "parameters": check_count(parameters),
        "bytes": check_count(bytes),
    }


def parse_end(step: int, seconds: object, stopped: object) -> End:
    """Makes an `End` from the fields of a line."""
    duration = finite_or_nan(seconds)
    if not 0 <= duration <= LONGEST_RUN or not isinstance(stopped, bool):
        raise ValueError
    return End(step, duration, stopped)


def parse_failure(step: int, error: object) -> Failure:
    """Makes a `Failure` from the fields of a line."""
    return Failure(step, check_text(error))


def parse_recovery(step: int, what: object, restored: object, batches_left_out: object) -> Recovery:
    """Makes a `Recovery` from the fields of a line."""
    return Recovery(step, check_text(what), check_count(restored), check_count(batches_left_out))


def parse_skip(
    step: int,
    loss_scale: object,
    cause: object,
    variable: object,
    replica: object,
    inf_count: object,
    nan_count: object,
) -> Skip:
    """Makes a `Skip` from the fields of a line."""
    return Skip(
        step,
        positive_or_error(loss_scale),
        check_text(cause),
        None if variable is None else check_text(variable),
        None if replica is None else check_count(replica),
        check_count(inf_count),
        check_count(nan_count),
    )


def parse_retry(step: int, retries: object) -> Retry:
    """Makes a `Retry` from the fields of a line."""
    return Retry(step, check_count(retries))


def parse_underflow(step: int, share: Mapping[str, object]) -> Underflow:
    """Makes an `Underflow` from the fields of a line."""
    return Underflow(step, {name: share_or_nan(value) for name, value in share.items()})


def parse_float8(step: int, float8: Mapping[str, Mapping[str, object]]) -> Float8Tensors:
    """Makes a `Float8Tensors` from the fields of a line."""
    return Float8Tensors(step, {name: parse_tensor(**fields) for name, fields in float8.items()})


def parse_tensor(
    format: object,  # noqa: A002 - the field's name
    amax: object,
    scale: object,
    saturated: object,
    flushed: object,
    saturated_steps: object,
    **_later: object,
) -> Float8Values:
    """Makes a `Float8Values` from the fields of a tensor."""
    if format not in FORMATS:
        raise ValueError
    return Float8Values(
        check_text(format),
        finite_or_nan(amax),
        positive_or_error(scale),
        share_or_nan(saturated),
        share_or_nan(flushed),
        check_count(saturated_steps),
    )


def share_or_nan(value: object) -> float:
    """Returns a number from 0 to 1 as a float, and NaN for any other value."""
    number = finite_or_nan(value)
    return number if 0 <= number <= 1 else math.nan


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
