"""Summaries of an interval of steps, and of a whole run, as numbers and as text."""

import dataclasses
import functools
import math
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import scaling
from trainer.log.history import BestResult, History, Snapshot
from trainer.step.report import StepReport
from trainer.step.state import TrainState

ENDLESS = sys.maxsize  # the target of a run whose length nobody knows


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


def power_of_two(scale: float) -> str:
    """Returns a loss scale as text; exactly, also if a rule of the user's own leaves the powers.

    Example:
        >>> power_of_two(1024.0), power_of_two(265.42)
        ('2^10', '265.42')
    """
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 else repr(float(scale))


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
    schedule_lag: int = 0  # number of updates by which a learning-rate schedule lags behind steps
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
        lag = f"{self.schedule_lag} update{'s' if self.schedule_lag > 1 else ''}"
        schedule = f"; the schedule is {lag} behind the steps" if self.schedule_lag else ""
        return (
            f"at step {self.step} after {self.steps_run} steps in {self.seconds:.1f} s: "
            f"{self.totals.applied} applied, {self.totals}, "
            f"loss_scale {power_of_two(self.loss_scale)}{schedule}{best}{where}"
        )


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
