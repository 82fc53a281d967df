"""What an interval and a run tell of themselves, as numbers and in words."""

import dataclasses
import math

import numpy as np

import scaling
from trainer.step.report import StepReport
from trainer.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Totals:
    """How a run's steps ended: attempted = applied + skipped, always."""

    applied: int
    skipped_by_cause: dict[str, int]  # "backward": 8; causes that never came up are left out
    retries: int = 0  # further attempts with the same batch, within these steps
    float32_steps: int = 0  # steps that were computed in float32 as a way out

    @classmethod
    def from_state(cls, state: TrainState) -> "Totals":
        """Reads a run's counts. Waits for the device."""
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
        """Steps whose update was not applied."""
        return sum(self.skipped_by_cause.values())

    @property
    def attempted(self) -> int:
        """All steps."""
        return self.applied + self.skipped

    def __str__(self) -> str:
        """For instance "8 skipped (8 backward), 2 retries"."""
        causes = ", ".join(f"{count} {name}" for name, count in self.skipped_by_cause.items())
        parts = [f"{self.skipped} skipped" + (f" ({causes})" if causes else "")]
        parts += [f"{self.retries} retries"] if self.retries else []
        parts += [f"{self.float32_steps} in float32"] if self.float32_steps else []
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Interval:
    """The steps between two log lines, as numbers a file can hold."""

    step: int
    loss: float  # the mean over the applied steps; NaN if there were none
    regularization_loss: float
    gradient_norm: float
    loss_scale: float  # of the last step
    applied: int  # updates since the run began
    skipped: int  # skipped steps since the run began
    examples_per_second: float  # NaN if only steps that also compiled came in between
    steps_per_second: float  # the same
    data_wait: float  # the share of that time in which the loop waited for data; or NaN
    metrics: dict[str, float]  # over the applied steps; NaN if there were none

    def scalars(self) -> dict[str, float]:
        """Returns every number but the step, by name."""
        fields = dataclasses.asdict(self)
        metrics = fields.pop("metrics")
        del fields["step"]
        return fields | metrics


def summarize(
    steps: StepReport,
    totals: Totals,
    metrics: dict[str, float],
    timed: StepReport | None,
    seconds: float,
) -> Interval:
    """Condenses the reports of some steps.

    Args:
        steps: each field a NumPy array of shape (steps,).
        totals: of the whole run, up to the last of these steps.
        metrics: the values of the training metrics over these steps.
        timed: those of the steps whose time says something; None if there are none.
        seconds: that they took together.
    """
    applied = np.asarray(steps.grads_finite)

    def mean(values: np.ndarray) -> float:
        return float(np.mean(values[applied])) if applied.any() else math.nan

    def per_second(amount: float) -> float:
        return float(amount) / seconds

    return Interval(
        step=int(steps.step[-1]),
        loss=mean(steps.loss),
        regularization_loss=mean(steps.regularization_loss),
        gradient_norm=mean(steps.gradient_norm),
        loss_scale=float(steps.loss_scale[-1]),
        applied=totals.applied,
        skipped=totals.skipped,
        examples_per_second=per_second(timed.examples.sum()) if timed else math.nan,
        steps_per_second=per_second(timed.step.size) if timed else math.nan,
        data_wait=per_second(timed.data_wait_secs.sum()) if timed else math.nan,
        metrics={name: value if applied.any() else math.nan for name, value in metrics.items()},
    )


def power_of_two(scale: float) -> str:
    """Returns a loss scale the way people say it.

    Example:
        >>> power_of_two(1024.0)
        '2^10'
    """
    return f"2^{round(math.log2(scale))}"


@dataclasses.dataclass(frozen=True)
class TrainSummary:
    """How a call of `Trainer.train` ended."""

    step: int  # the step the run has reached, over all calls
    steps_run: int  # the steps of this call
    totals: Totals  # over all calls
    loss_scale: float
    seconds: float  # of this call, tracing and compiling included
    checkpoint: str | None  # where the run can be taken up again
    checkpoint_bytes: int = 0  # how large that is; 0 if this call saved nothing
    position_bytes: int = 0  # how much of it is the position in the data
    best: str | None = None  # the best result of this call's evaluations, and its step
    schedule_lag: int = 0  # updates by which a learning-rate schedule is behind the steps

    def __str__(self) -> str:
        """The last line a person reads."""
        where = f"; checkpoint {self.checkpoint}" if self.checkpoint else ""
        if self.checkpoint_bytes:
            where += f" ({size(self.checkpoint_bytes)}, {size(self.position_bytes)} for the data)"
        best = f"; best {self.best}" if self.best else ""
        lag = f"{self.schedule_lag} update{'s' if self.schedule_lag > 1 else ''}"
        schedule = f"; the schedule is {lag} behind the steps" if self.schedule_lag else ""
        return (
            f"at step {self.step} after {self.steps_run} steps in {self.seconds:.1f} s: "
            f"{self.totals.applied} applied, {self.totals}, "
            f"loss_scale {power_of_two(self.loss_scale)}{schedule}{best}{where}"
        )


def size(number: int) -> str:
    """Returns a number of bytes the way people say it.

    Example:
        >>> size(70), size(13_648), size(152_000_000)
        ('70 B', '13.6 kB', '152.0 MB')
    """
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if number >= 10**power:
            return f"{number / 10**power:.1f} {unit}"
    return f"{number} B"
