"""Detects divergence by watching the loss; a diverged run goes back to a good checkpoint."""

import dataclasses
import math
from typing import Any

import numpy as np

from scaling.base.argument_checks import check_integer
from trainer.step.report import StepReport


class DivergedError(RuntimeError):
    """Raised when a run diverged too often, or before its first checkpoint."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The criteria for divergence, and how a diverged run recovers.

    The run goes back to the newest checkpoint from before the divergence. From there, it draws new
    random numbers, and `Task.on_recovery` can change settings, for example lower a learning rate.
    It never goes back to other data than those of the present call of `train`, whose losses are
    compared with each other only.

    Args:
        loss_above: a loss above this bound counts as a divergence; None sets no bound.
        rise: the run has diverged if the mean loss over the last `window` applied steps exceeds
            `rise` times the lowest such mean so far. A rise from a negative mean is measured in
            multiples of its size: with 3.0, the bound is 3 if the lowest mean is 1, and 1 if it is
            -1. It must be greater than 1. Nothing is compared while the lowest mean is 0; use
            `loss_above` for losses that come near 0. None disables this criterion.
        window: the number of applied steps that each mean covers.
        max_recoveries: the maximum number of rollbacks; the next divergence ends the run.
        skip_data: whether to skip the batches between the checkpoint and the divergence.

    Raises:
        ValueError: if neither `loss_above` nor `rise` is given, or a number is out of range.

    Example:
        >>> divergence = Divergence(loss_above=100.0, rise=2.0, window=50)
        >>> divergence.max_recoveries
        3
    """

    loss_above: float | None = None
    rise: float | None = None
    window: int = 100
    max_recoveries: int = 3
    skip_data: bool = False

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if self.loss_above is None and self.rise is None:
            raise ValueError("`loss_above` or `rise` must be given; got None for both")
        if self.rise is not None and not self.rise > 1.0:
            raise ValueError(f"`rise` must be above 1; got {self.rise}")
        check_integer("window", self.window, 1)
        check_integer("max_recoveries", self.max_recoveries, 1)


@dataclasses.dataclass(frozen=True)
class Detection:
    """A divergence that was found in the losses."""

    first: int  # step at which it began: checkpoints of earlier steps are good
    last: int  # step at which it was detected
    what: str  # description for the log and for errors


class LossWatch:
    """Detects divergence in a run's losses. Keeps the latest window and the lowest mean.

    Args:
        divergence: the criteria for divergence.
    """

    def __init__(self, divergence: Divergence) -> None:
        """Stores the criteria, and starts with an empty window."""
        self.divergence = divergence
        self._recent: list[
            tuple[int, float]
        ] = []  # (step, loss) of the last `window` applied steps
        self._lowest: float | None = None  # lowest mean loss of any window so far
        self.recoveries = 0  # number of rollbacks so far

    def detect(self, steps: StepReport) -> Detection | None:
        """Returns the first divergence in the latest reports, or None.

        Args:
            steps: reports whose fields are NumPy arrays of shape (steps,).
        """
        for place in np.flatnonzero(steps.grads_finite & (steps.weight != 0)):  # 0: no mean loss
            found = self._detect_at(int(steps.step[place]), float(steps.loss[place]))
            if found:
                return found
        return None

    def _detect_at(self, step: int, loss: float) -> Detection | None:
        bound, rise = self.divergence.loss_above, self.divergence.rise
        if bound is not None and loss > bound:
            return Detection(step, step, f"loss {loss:g} above {bound:g} at step {step}")
        if rise is None:
            return None
        self._recent = [*self._recent, (step, loss)][-self.divergence.window :]
        if len(self._recent) < self.divergence.window:
            return None
        mean = math.fsum(loss for _, loss in self._recent) / len(self._recent)
        if self._lowest and mean > (limit := self._lowest + (rise - 1) * abs(self._lowest)):
            first = self._recent[0][0]
            what = (
                f"mean loss {mean:g} over steps {first} to {step}, above {limit:g}: the lowest "
                f"mean so far is {self._lowest:g}, with rise={rise:g}"
            )
            return Detection(first, step, what)
        self._lowest = mean if self._lowest is None else min(self._lowest, mean)
        return None

    def forget_losses(self) -> None:
        """Begins with an empty window again: losses of other data are not comparable."""
        self._recent, self._lowest = [], None

    def state(self) -> dict[str, Any]:
        """Returns the state of the watch as JSON types, for checkpoints."""
        return {"recent": self._recent, "lowest": self._lowest, "recoveries": self.recoveries}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state that `state` returned."""
        self._recent = [(int(step), float(loss)) for step, loss in state["recent"]]
        self._lowest, self.recoveries = state["lowest"], state["recoveries"]
