"""Callbacks that follow one number of the log, and the check that the run has this number."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from scaling.base.argument_checks import shown
from trainer.base.argument_checks import check_choice
from trainer.callbacks.callback import Callback

VALIDATION = "val_"  # before the names of evaluation results, as in Keras and in `history`
# The ends of the names whose best value is known.
LOWEST_IS_BEST = ("loss", "error")
HIGHEST_IS_BEST = ("accuracy", "acc", "auc", "precision", "recall", "f1_score", "iou")


class Monitored(Callback):
    """A callback that follows one number, and knows the best value that it has had.

    Args:
        monitor: the number's name: that of an evaluation result after "val_", such as "val_loss",
            or that of a number in log lines, such as "loss".
        mode: "min" or "max": whether the lowest or the highest value is best. "auto" takes the
            lowest of a name that ends in "loss" or "error", and the highest of one that ends in
            "accuracy", "acc", "auc", "precision", "recall", "f1_score" or "iou".
        min_delta: by how much a value must be better than the best one to count as better.

    Raises:
        ValueError: for an argument that is not allowed; if `mode` is "auto" and the name says
            nothing.
    """

    def __init__(self, monitor: str = "val_loss", mode: str = "auto", min_delta: float = 0) -> None:
        """Checks and stores the arguments; there is no best value yet."""
        check_choice("mode", mode, ("auto", "min", "max"))
        self.monitor = monitor
        self.mode = resolve_mode(monitor, mode)
        self.min_delta = min_delta
        self.best: float | None = None
        self.best_step: int | None = None

    def monitored(self) -> Sequence[str]:
        """Returns the name of the number."""
        return [self.monitor]

    def on_log(self, step: int, values: dict[str, float]) -> None:
        """Takes the number from a log line, if it is one of those."""
        if self.monitor in values:
            self.take_value(step, values[self.monitor])

    def on_evaluate_end(self, step: int, results: dict[str, float]) -> None:
        """Takes the number from an evaluation, if it is one of those."""
        name = self.monitor.removeprefix(VALIDATION)
        if name != self.monitor and name in results:
            self.take_value(step, results[name])

    def take_value(self, step: int, value: float) -> None:
        """Called with each value of the number."""
        self.took_best(step, value)

    def took_best(self, step: int, value: float) -> bool:
        """Returns whether a value is the best one so far, and if so remembers it. NaN never is."""
        sign = 1 if self.mode == "min" else -1
        best = math.inf if self.best is None else sign * self.best - self.min_delta
        better = not math.isnan(value) and (self.best is None or sign * value < best)
        if better:
            self.best, self.best_step = value, step
        return better

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and its step, and of what number it is the best."""
        number = {"monitor": self.monitor, "mode": self.mode}
        return number | {"best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, unless it is about another number."""
        number = state.get("monitor", self.monitor), state.get("mode", self.mode)
        if number == (self.monitor, self.mode):
            self.continue_from(state)

    def continue_from(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned for the same number."""
        self.best, self.best_step = state["best"], state["best_step"]


def resolve_mode(monitor: str, mode: str) -> str:
    """Returns "min" or "max"; raises ValueError if neither the mode nor the name says which.

    Example:
        >>> resolve_mode("val_loss", "auto"), resolve_mode("val_top_5_accuracy", "auto")
        ('min', 'max')
    """
    if mode != "auto":
        return mode
    for ends, found in ((LOWEST_IS_BEST, "min"), (HIGHEST_IS_BEST, "max")):
        if monitor.lower().endswith(ends):
            return found
    raise ValueError(f'`mode` must be "min" or "max" for {monitor!r}')


def check_monitored(
    callbacks: Iterable[Callback], logged: Sequence[str], results: Sequence[str] | None
) -> None:
    """Raises ValueError if a callback waits for a number that the run does not have.

    Args:
        callbacks: the run's callbacks.
        logged: the names of the numbers in its log lines.
        results: the names of its evaluation results; None if it does not evaluate.
    """
    names = [*logged, *(VALIDATION + name for name in results or ())]
    for callback in callbacks:
        for name in callback.monitored():
            if name not in names:
                raise ValueError(
                    f"`monitor` must be one of {', '.join(names)}; got {shown(name)} in "
                    f"{type(callback).__name__}"
                )
