"""A run that diverges: noticed in its losses, and taken back to where all was well."""

import dataclasses
import math
from typing import Any

import numpy as np

from scaling.base.argument_checks import is_number
from trainer.base.argument_checks import check_count
from trainer.step.report import StepReport


class DivergedError(RuntimeError):
    """The run has diverged more often than it may be taken back, or to nowhere."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """When a run counts as diverged, and what is then done.

    The last good checkpoint is restored: the newest from before the offence. From there the run
    draws other random numbers, and `Task.on_recovery` may lower a learning rate.

    Args:
        loss_above: a loss above this is an offence; None has no bound.
        rise: so is a mean loss over the last `window` applied steps of more than this times the
            lowest such mean before; above 1. It is meant for losses that are positive. None lets
            losses rise.
        window: steps.
        max_recoveries: how often a run may be taken back; once more ends it.
        skip_data: whether the batches from the checkpoint to the offence are left out.

    Raises:
        ValueError: unless at least one of the first two is given, and all make sense.

    Example:
        >>> watch = Divergence(loss_above=100.0, rise=2.0, window=50)
        >>> watch.max_recoveries
        3
    """

    loss_above: float | None = None
    rise: float | None = None
    window: int = 100
    max_recoveries: int = 3
    skip_data: bool = False

    def __post_init__(self) -> None:
        """Checks every field."""
        if self.loss_above is None and self.rise is None:
            raise ValueError(
                "`loss_above` must be given if `rise` is not; got None for both. Nothing would "
                "count as divergence. Pass loss_above=, rise=, or both."
            )
        bound, rise = self.loss_above, self.rise
        if bound is not None and not (is_number(bound) and math.isfinite(bound)):
            raise ValueError(
                f"`loss_above` must be a finite number or None; got {bound!r}. A loss that is inf "
                "or NaN is never applied anyway. Use a loss that no good step has."
            )
        if rise is not None and not (is_number(rise) and 1.0 < rise < math.inf):
            raise ValueError(
                f"`rise` must be a finite number above 1, or None; got {rise!r}. It is how many "
                "times the lowest mean loss is too much. Use for instance 2.0."
            )
        check_count("window", self.window)
        check_count("max_recoveries", self.max_recoveries)
        if not isinstance(self.skip_data, bool):
            raise TypeError(
                f"`skip_data` must be True or False; got {self.skip_data!r}. It says whether the "
                "batches on the way to the offence are left out. Use one of the two."
            )


@dataclasses.dataclass(frozen=True)
class Offence:
    """What counted as divergence."""

    first: int  # the step it began with: checkpoints of earlier steps are good
    last: int  # the step it was seen at
    what: str  # for a person


class LossWatch:
    """Remembers as much of a run's losses as it takes to judge the next ones.

    Args:
        divergence: when they are bad.
    """

    def __init__(self, divergence: Divergence) -> None:
        """Knows no loss yet."""
        self._divergence = divergence
        self._recent: list[tuple[int, float]] = []  # the last `window` applied steps
        self._lowest: float | None = None  # of the means over such windows
        self.recoveries = 0  # how often the run was taken back

    def look(self, steps: StepReport) -> Offence | None:
        """Takes the latest reports; returns the first offence in them, or None.

        Args:
            steps: each field a NumPy array of shape (steps,).
        """
        for place in np.flatnonzero(steps.grads_finite):
            offence = self._look_at(int(steps.step[place]), float(steps.loss[place]))
            if offence:
                return offence
        return None

    def _look_at(self, step: int, loss: float) -> Offence | None:
        bound, rise = self._divergence.loss_above, self._divergence.rise
        if bound is not None and loss > bound:
            return Offence(step, step, f"loss {loss:g} above {bound:g} at step {step}")
        if rise is None:
            return None
        self._recent = [*self._recent, (step, loss)][-self._divergence.window :]
        if len(self._recent) < self._divergence.window:
            return None
        mean = math.fsum(loss for _, loss in self._recent) / len(self._recent)
        if self._lowest is not None and mean > rise * self._lowest:
            first = self._recent[0][0]
            return Offence(
                first,
                step,
                f"mean loss {mean:g} of steps {first} to {step} above {rise:g} x {self._lowest:g}",
            )
        self._lowest = mean if self._lowest is None else min(self._lowest, mean)
        return None

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it: what JSON can hold."""
        return {"recent": self._recent, "lowest": self._lowest, "recoveries": self.recoveries}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes up what `state` returned."""
        self._recent = [(int(step), float(loss)) for step, loss in state["recent"]]
        self._lowest, self.recoveries = state["lowest"], state["recoveries"]


def check_divergence(divergence: Any, model_dir: Any) -> None:
    """Raises TypeError or ValueError unless a run can be watched, and taken back."""
    if divergence is not None and not isinstance(divergence, Divergence):
        raise TypeError(
            f"`divergence` must be a trainer.Divergence, or None; got {divergence!r}. It says when "
            "a run counts as diverged. Use for instance Divergence(loss_above=100.0)."
        )
    if divergence is not None and model_dir is None:
        raise ValueError(
            "`divergence` must be None without `model_dir`; got one. A run is taken back to a "
            "checkpoint. Pass model_dir=."
        )
