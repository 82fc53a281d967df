"""The numbers of an interval of steps, of a call of `train` and of a whole run, and their texts."""

import dataclasses
import functools
import math
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

import scaling
from trainer.step.report import StepReport
from trainer.step.state import TrainState

ENDLESS = sys.maxsize  # the target of a run whose length nobody knows
PREFIXES = {"train": "", "validation": "val_"}  # of the names in a history, as in Keras

Rows: TypeAlias = dict[int, Mapping[str, float]]  # numbers of log lines or evaluations, by step


@dataclasses.dataclass(frozen=True)
class Totals:
    """Step counts of a run by outcome: attempted = applied + skipped."""

    applied: int
    # Number of skipped steps by cause, such as {"backward": 8}; causes without skips are absent.
    skipped_by_cause: dict[str, int]
    retries: int = 0  # number of repeated attempts with the same batch, not counted as steps
    float32_steps: int = 0  # number of steps computed in float32 after consecutive skips

    @classmethod
    def from_state(cls, state: TrainState) -> "Totals":
        """Reads the counts of a run. Waits for the device."""
        outcomes = state.outcomes.numpy()
        skipped = {
            cause.name.lower(): int(outcomes[cause])
            for cause in scaling.Cause
            if cause is not scaling.Cause.NONE and outcomes[cause]
        }
        return cls(
            applied=int(outcomes[scaling.Cause.NONE]),
            skipped_by_cause=skipped,
            retries=int(state.retries.numpy()),
            float32_steps=int(state.float32_steps.numpy()),
        )

    @property
    def skipped(self) -> int:
        """Number of steps whose update was not applied."""
        return sum(self.skipped_by_cause.values())

    @property
    def attempted(self) -> int:
        """Number of all steps, applied or skipped."""
        return self.applied + self.skipped

    def __str__(self) -> str:
        """Returns, for instance, "8 skipped (8 backward), 2 retries"."""
        causes = ", ".join(f"{count} {name}" for name, count in self.skipped_by_cause.items())
        parts = [f"{self.skipped} skipped" + (f" ({causes})" if causes else "")]
        parts += [f"{self.retries} retries"] if self.retries else []
        parts += [f"{self.float32_steps} in float32"] if self.float32_steps else []
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Interval:
    """Statistics of the steps between two log lines, as Python numbers."""

    step: int  # the last step of the interval
    loss: float  # mean over the examples of the applied steps, with their weights; NaN if no step
    # was applied, 0 if all weights were 0
    regularization_loss: float  # mean over the examples of the applied steps; NaN as for `loss`
    gradient_norm: float  # mean over the applied steps; NaN as for `loss`
    loss_scale: float  # loss scale of the last step
    applied: int  # updates since the run began
    skipped: int  # skipped steps since the run began
    examples_per_second: float  # NaN if no step could be timed without tracing and compiling
    steps_per_second: float  # NaN as for `examples_per_second`
    data_wait: float  # fraction of the time spent waiting for data; NaN as for `steps_per_second`
    metrics: dict[str, float]  # training metrics over the applied steps; NaN if none was applied
    # The learning rate of the last update, keyed by the name under which it is logged.
    learning_rates: dict[str, float] = dataclasses.field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """Returns all numbers except the step, keyed by name."""
        fields = dataclasses.asdict(self)
        del fields["step"], fields["metrics"], fields["learning_rates"]
        return {**fields, **self.learning_rates, **self.metrics}


# The names of the numbers in every log line.
INTERVAL_NUMBERS = tuple(
    field.name
    for field in dataclasses.fields(Interval)
    if field.name not in {"step", "metrics", "learning_rates"}
)


def summarize(
    steps: StepReport,
    totals: Totals,
    metrics: Mapping[str, float],
    timed: StepReport | None,
    seconds: float,
    learning_rates: Mapping[str, float] = types.MappingProxyType({}),
) -> Interval:
    """Summarizes the reports of several steps.

    Args:
        steps: the reports; each field is a NumPy array of shape (steps,).
        totals: the totals of the whole run, up to the last of these steps.
        metrics: the values of the training metrics over these steps.
        timed: the reports of the timed steps, which exclude loops that also traced and compiled;
            None if no step was timed.
        seconds: total duration of the timed steps.
        learning_rates: the learning rates of the last update, keyed by name.
    """
    applied = np.asarray(steps.grads_finite)

    def mean(values: np.ndarray, weights: np.ndarray | None = None) -> float:
        if not applied.any():
            return math.nan
        own = None if weights is None else weights[applied].astype(np.float64)
        if own is not None and not own.any():  # without weight, the loss that was applied is 0
            own = None
        return float(np.average(values[applied], weights=own))

    def per_second(amount: float) -> float:
        return float(amount) / seconds

    return Interval(
        step=int(steps.step[-1]),
        loss=mean(steps.loss, steps.weight),
        regularization_loss=mean(steps.regularization_loss, steps.examples),
        gradient_norm=mean(steps.gradient_norm),
        loss_scale=float(steps.loss_scale[-1]),
        applied=totals.applied,
        skipped=totals.skipped,
        examples_per_second=per_second(timed.examples.sum()) if timed else math.nan,
        steps_per_second=per_second(timed.step.size) if timed else math.nan,
        data_wait=per_second(timed.data_wait_secs.sum()) if timed else math.nan,
        metrics={name: value if applied.any() else math.nan for name, value in metrics.items()},
        learning_rates=dict(learning_rates),
    )


def check_metric_names(names: Iterable[str]) -> None:
    """Raises ValueError if a metric is named like another number of the log or the history."""
    names = list(names)
    own = {field.name for field in dataclasses.fields(Interval)} | {"split", "learning_rate"}
    taken = own | {f"val_{name}" for name in (*names, "step", "loss")}
    for name in names:
        if name in taken or name.startswith("learning_rate/"):
            raise ValueError(
                f"`metrics` must not be named as another number of the log; got {name!r}"
            )


@dataclasses.dataclass(frozen=True)
class BestResult:
    """The best evaluation of a run, by `best_metric`."""

    metric: str  # the name of the result that was compared
    value: float
    step: int  # the step that was evaluated; the first one of several with this value
    results: Mapping[str, float]  # all results of this evaluation, keyed by name

    def __str__(self) -> str:
        """Returns, for instance, "loss 0.5000 at step 4"."""
        return f"{self.metric} {format_number(self.value)} at step {self.step}"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A history as it was at some time."""

    rows: Mapping[str, Rows]  # by split
    other_data_until: int = -1  # the last step that was evaluated on other data than now

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns an array for each name, and the steps that they belong to.

        Returns:
            "step", shape (log lines,), int64, and arrays of the same shape, float64, by the names
            in the log. Then "val_step", shape (evaluations,), int64, and the evaluations' results,
            with "val_" before their names. A number that is missing in a line is NaN. Without log
            lines or evaluations, their names are absent.

        Example:
            >>> history = History()
            >>> history.add("train", 10, {"loss": 0.5})
            >>> history.add("validation", 10, {"loss": 0.75})
            >>> history.snapshot().arrays()
            {'step': array([10]), 'loss': array([0.5]), 'val_step': ..., 'val_loss': array([0.75])}
        """
        arrays = {}
        for split, prefix in PREFIXES.items():
            rows = self.rows[split]
            if rows:
                arrays[f"{prefix}step"] = np.array(list(rows), np.int64)
            for name in dict.fromkeys(name for values in rows.values() for name in values):
                column = [values.get(name, math.nan) for values in rows.values()]
                arrays[prefix + name] = np.array(column, np.float64)
        return arrays

    def best(self, metric: str, sign: float) -> BestResult | None:
        """Returns the best evaluation, or None if there is none with a result that is not NaN.

        Evaluations on other data, in earlier calls of `train`, do not count.

        Args:
            metric: the name of the result to compare.
            sign: 1 if the lowest is best, and -1 if the highest is.
        """
        rows = self.rows["validation"]
        steps = [step for step in rows if step > self.other_data_until]
        ranked = [(sign * rows[step].get(metric, math.nan), step) for step in steps]
        known = [(rank, step) for rank, step in ranked if not math.isnan(rank)]
        if not known:
            return None
        rank, step = min(known)
        return BestResult(metric, sign * rank, step, dict(rows[step]))

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame` with a row for each step that has numbers; see `arrays`."""
        import pandas as pd  # of the extra `pandas`

        frames = []
        for split, prefix in PREFIXES.items():
            rows = self.rows[split]
            frame = pd.DataFrame(list(rows.values()), index=list(rows), dtype="float64")
            frames.append(frame.add_prefix(prefix))
        return pd.concat(frames, axis="columns").sort_index().rename_axis("step")


class History:
    """Collects the logged and evaluated numbers of a run, in memory.

    It covers the whole run, so it is the same whether the run was interrupted or not: a process
    that resumes a run reads the numbers of the steps before from `metrics.jsonl`, and a run that is
    rolled back forgets the numbers of the steps that it takes again.
    """

    def __init__(self) -> None:
        """Begins with no numbers."""
        self._rows: dict[str, Rows] = {split: {} for split in PREFIXES}
        self._evaluated: tuple[str, int] | None = None  # the data, and until which step
        self._other_data_until = -1

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Adds a log line ("train") or an evaluation ("validation"), as plain numbers.

        A step that was repeated counts once. inf is NaN, as in `metrics.jsonl`, from which a
        resumed run reads its history.
        """
        finite = {
            name: value if math.isfinite(value) else math.nan for name, value in values.items()
        }
        self._rows[split][step] = finite

    def evaluate_on(self, data: str, step: int, target: int) -> None:
        """Notes on what data `train` evaluates from a step on.

        Args:
            data: what tells it from other data.
            step: the step that the run has reached. A program that is started again may have taken
                some of the steps on this data before.
            target: the step that this call of `train` is to reach.
        """
        if self._evaluated and self._evaluated[0] != data:
            self._other_data_until = min(self._evaluated[1], step)
        self._evaluated = data, target

    def rewind(self, step: int, begun: int | None = None) -> None:
        """Forgets the numbers of later steps. Snapshots keep them.

        Args:
            step: the last step whose numbers stay.
            begun: the first step of the interval in which `step` is, if the run goes on with that
                interval. A line about a part of it is forgotten, too.
        """
        ends = {"train": step if begun is None else begun - 1, "validation": step}
        self._rows = {
            split: {at: values for at, values in rows.items() if at <= ends[split]}
            for split, rows in self._rows.items()
        }

    def read(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replaces the history by that of the lines of a `metrics.jsonl`, in which null is NaN."""
        self._rows = {split: {} for split in PREFIXES}
        for line in lines:
            if line["split"] == "recovery":
                self.rewind(line["restored"], line.get("interval_begun"))
            elif line["split"] in PREFIXES:
                values = {
                    name: math.nan if value is None else value
                    for name, value in line.items()
                    if name not in {"step", "split"}
                }
                self.add(line["split"], line["step"], values)

    def snapshot(self) -> Snapshot:
        """Returns the history as it is now."""
        rows = {split: dict(rows) for split, rows in self._rows.items()}
        return Snapshot(rows, self._other_data_until)


@dataclasses.dataclass(frozen=True)
class TrainSummary:
    """The result of a call to `Trainer.train`."""

    step: int  # the step that the run has reached, over all calls
    steps_run: int  # number of steps in this call
    totals: Totals  # totals over all calls
    loss_scale: float
    seconds: float  # duration of this call, including tracing and compiling
    checkpoint: str | None  # the checkpoint from which the run can be resumed
    checkpoint_bytes: int = 0  # size of that checkpoint; 0 if this call saved none
    position_bytes: int = 0  # bytes of that checkpoint that store the position in the data
    # The run's best evaluation on the data that it evaluates on now; None if it evaluated nothing.
    best: BestResult | None = None
    schedule_lag: int = 0  # number of steps by which a learning-rate schedule lags
    snapshot: Snapshot | None = dataclasses.field(default=None, repr=False, compare=False)

    @functools.cached_property
    def history(self) -> dict[str, np.ndarray]:
        """The logged and evaluated numbers of the whole run, as arrays by name.

        "step" holds the steps of the log lines, and each other name of a log line an array of the
        same length, float64. "val_step" and "val_..." hold the same for evaluations, which have
        other steps. A number that a line does not have is NaN. The history of a resumed run begins
        at the run's first step if it has a `model_dir`, and is that of a run without interruption;
        see `docs/watching.md`.
        """
        return self.snapshot.arrays() if self.snapshot else {}

    def to_pandas(self) -> Any:
        """Returns `history` as a `pandas.DataFrame`, with the steps as its index.

        Raises:
            ModuleNotFoundError: if pandas, in the extra `pandas`, is not installed.
        """
        return (self.snapshot or History().snapshot()).to_pandas()

    def __str__(self) -> str:
        """Returns the last line that a run prints."""
        where = f"; checkpoint {self.checkpoint}" if self.checkpoint else ""
        if self.checkpoint_bytes:
            size, position = format_bytes(self.checkpoint_bytes), format_bytes(self.position_bytes)
            where += f" ({size}, including {position} for the data position)"
        best = f"; best {self.best}" if self.best else ""
        schedule = ""
        if self.schedule_lag:
            behind = f"{self.schedule_lag} step{'s' if self.schedule_lag > 1 else ''} behind"
            schedule = f"; learning-rate schedule {behind}: skipped steps do not advance it"
        return (
            f"at step {self.step} after {self.steps_run} steps in {self.seconds:.1f} s: "
            f"{self.totals.applied} applied, {self.totals}, "
            f"loss_scale {power_of_two(self.loss_scale)}{schedule}{best}{where}"
        )


def format_number(value: float) -> str:
    """Returns a loss or a metric with the digits that it needs.

    Example:
        >>> [format_number(value) for value in (0.25, 0.0, 0.00123456, -8.3e-05, 123456.789, 1e30)]
        ['0.2500', '0.0000', '0.00123', '-8.3e-05', '123457', '1e+30']
    """
    if value == 0 or 0.01 <= abs(value) < 100:
        return f"{value:.4f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.6g}"


def power_of_two(scale: float) -> str:
    """Returns a loss scale as text; exactly, also if a rule of the user's own leaves the powers.

    Example:
        >>> power_of_two(1024.0), power_of_two(265.42)
        ('2^10', '265.42')
    """
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 else repr(float(scale))


def format_bytes(number: int) -> str:
    """Returns a number of bytes as text, in decimal units.

    Example:
        >>> format_bytes(70), format_bytes(13_648), format_bytes(152_000_000)
        ('70 B', '13.6 kB', '152.0 MB')
    """
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if number >= 10**power:
            return f"{number / 10**power:.1f} {unit}"
    return f"{number} B"
