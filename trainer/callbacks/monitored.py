"""Callbacks that follow one number of the log: they keep the best weights, or act on the run."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from absl import logging

from scaling.base.argument_checks import shown
from trainer.base.argument_checks import check_choice
from trainer.callbacks.callback import Callback
from trainer.checkpoint.warm_start import weights_of
from trainer.step.averages import averages_of
from trainer.step.objective import single_optimizers
from trainer.step.types import Variable

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


class BestWeights(Monitored):
    """Keeps the weights that had the best value of a number, in memory.

    After `train`, `restore()` puts them into the model. To keep models in files, use the trainer's
    `keep_best` and `best_metric`.

    Args:
        monitor: as for `EarlyStopping`.
        mode: as for `EarlyStopping`.

    Example:
        >>> import keras, numpy as np
        >>> from trainer import Trainer
        >>> best = BestWeights("val_loss")
        >>> x = np.ones([8, 1], np.float32)
        >>> line = Trainer(
        ...     model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        ...     optimizer="sgd", loss_fn="mse", verbose=False, callbacks=[best])
        >>> summary = line.train((x, x), 4, global_batch=8, eval_data=(x, x), eval_interval=2)
        >>> best.best_step, best.best == summary.best.value
        (4, True)
        >>> best.restore()
    """

    def __init__(self, monitor: str = "val_loss", *, mode: str = "auto") -> None:
        """Checks and stores the arguments; there are no weights yet."""
        super().__init__(monitor, mode)
        self.weights: list[np.ndarray] | None = None

    def take_value(self, step: int, value: float) -> None:
        """Keeps the weights if the value is the best one so far."""
        if self.took_best(step, value):
            self.weights = read_weights(self.trainer)

    def restore(self) -> None:
        """Puts the best weights into the model.

        Raises:
            RuntimeError: if there are none yet.
        """
        if self.weights is None:
            raise RuntimeError(f"BestWeights has no weights yet: {self.monitor!r} had no value")
        write_weights(self.trainer, self.weights)

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value, its step and the weights."""
        return super().state_dict() | {"weights": self.weights}

    def continue_from(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned for the same number."""
        super().continue_from(state)
        self.weights = state["weights"]


class EarlyStopping(Monitored):
    """Ends a run when a number has not improved for a while.

    It uses the values of the run's own evaluations (`eval_data` and `eval_interval` of `train`) or
    log lines, so nothing is evaluated twice. A run that is resumed after it was stopped stops
    again at once, unless `patience` is larger now.

    Args:
        monitor: the name of an evaluation result after "val_", such as "val_loss", or of a number
            in log lines, such as "loss".
        min_delta: by how much a value must be better than the best one to count as better.
        patience: after how many values in a row without improvement the run ends: evaluations, or
            log lines. NaN is no improvement. 0 is like 1, as in Keras.
        mode: "min" or "max": whether the lowest or the highest value is best; "auto" decides by
            the name, and is refused if the name does not say.
        restore_best_weights: whether the model has the weights of the best value when `train`
            returns, whatever ended it. They are kept in memory and in checkpoints. The last
            weights are kept as well: checkpoints hold them, and a later call of `train` goes on
            from them, unless the weights were changed in between.

    Attributes:
        best: the best value; None before the first.
        best_step: the step of the best value.
        wait: how many values there have been since the best one.
        stopped_step: the step at which it ended the run; None if it did not.

    Example:
        >>> import keras, numpy as np
        >>> from trainer import Trainer
        >>> stopping = EarlyStopping(patience=2, min_delta=0.001)
        >>> x = np.ones([8, 1], np.float32)
        >>> line = Trainer(
        ...     model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        ...     optimizer=lambda: keras.optimizers.SGD(0.1), loss_fn="mse", verbose=False,
        ...     callbacks=[stopping])
        >>> summary = line.train((x, x), 100, global_batch=8, eval_data=(x, x), eval_interval=1)
        >>> summary.step == stopping.stopped_step < 100
        True
    """

    needs_training = True

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        min_delta: float = 0,
        patience: int = 0,
        mode: str = "auto",
        restore_best_weights: bool = False,
    ) -> None:
        """Checks and stores the arguments."""
        super().__init__(monitor, mode, min_delta)
        self.patience = patience
        self.restore_best_weights = restore_best_weights
        self.wait = 0
        self.stopped_step: int | None = None
        self.best_weights: list[np.ndarray] | None = None
        self._last_weights: list[np.ndarray] | None = None  # those that were replaced

    @property
    def exhausted(self) -> bool:
        """Whether the number has not improved for too long."""
        return self.wait >= max(self.patience, 1)

    def on_train_begin(self) -> None:
        """Puts the last weights back, and ends the run if it was ended before."""
        # In reverse: each found what the one before it had restored, and took it for the last
        # weights.
        for callback in reversed(self.trainer.callbacks):
            if isinstance(callback, EarlyStopping):
                callback.put_last_weights_back()
        if self.exhausted:
            logging.warning("EarlyStopping has ended this run before; to go on, raise patience")
            self.trainer.stop()
        else:
            self.stopped_step = None

    def take_value(self, step: int, value: float) -> None:
        """Counts a value, and ends the run after too many without improvement."""
        if self.took_best(step, value):
            self.wait = 0
            if self.restore_best_weights:
                self.best_weights = read_weights(self.trainer)
            return
        self.wait += 1
        if self.exhausted:
            self.stopped_step = step
            logging.info(
                "EarlyStopping ends this run at step %s: %s was best, %s, at step %s",
                *(step, self.monitor, self.best, self.best_step),
            )
            self.trainer.stop()

    def on_train_end(self, summary: Any) -> None:
        """Puts the best weights into the model."""
        del summary
        if self.restore_best_weights and self.best_weights is not None:
            self._last_weights = read_weights(self.trainer)
            write_weights(self.trainer, self.best_weights)

    def put_last_weights_back(self) -> None:
        """Puts the last weights into the model, unless its weights were changed since then."""
        if self._last_weights is not None and self._is_restored():
            write_weights(self.trainer, self._last_weights)
        self._last_weights = None

    def _is_restored(self) -> bool:
        """Returns whether the model still has the best weights, bit for bit."""
        pairs = zip(read_weights(self.trainer), self.best_weights or [], strict=True)
        return all(now.tobytes() == best.tobytes() for now, best in pairs)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to act like one without interruption."""
        own = {"wait": self.wait, "stopped_step": self.stopped_step, "weights": self.best_weights}
        return super().state_dict() | own

    def continue_from(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned for the same number."""
        super().continue_from(state)
        self.wait, self.stopped_step = state["wait"], state["stopped_step"]
        self.best_weights = state["weights"]


class ReduceLROnPlateau(Monitored):
    """Multiplies the learning rate by a factor when a number has not improved for a while.

    With several optimizers, each one's learning rate is multiplied. The learning rates themselves
    are in checkpoints, and so are the counts.

    Args:
        monitor: as for `EarlyStopping`.
        factor: what the learning rate is multiplied by, between 0 and 1.
        patience: after how many values in a row without improvement; 0 is like 1, as in Keras.
        mode: as for `EarlyStopping`.
        min_delta: by how much a value must be better than the best one to count as better.
        cooldown: how many values the cooldown after a reduction takes. All but the last of them are
            not counted, as in Keras, so 1 is like 0.
        min_lr: the learning rate is not made smaller than this.

    Raises:
        ValueError: for an argument that is not allowed.
    """

    needs_training = True

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        """Checks and stores the arguments."""
        super().__init__(monitor, mode, min_delta)
        if not 0 < factor < 1:
            raise ValueError(f"`factor` must be between 0 and 1; got {factor}")
        self.factor = factor
        self.patience = patience
        self.cooldown = cooldown
        self.min_lr = min_lr
        self.wait = self.cooldown_counter = 0

    def take_value(self, step: int, value: float) -> None:
        """Counts a value, and reduces the learning rates after too many without improvement."""
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.wait = 0
        if self.took_best(step, value):
            self.wait = 0
        elif not self.cooldown_counter:
            self.wait += 1
            if self.wait >= self.patience and self._reduce():
                self.wait, self.cooldown_counter = 0, self.cooldown

    def _reduce(self) -> bool:
        """Reduces the learning rates that are above the minimum; returns whether there are any."""
        above = [
            (optimizer, rate)
            for optimizer in optimizers_of(self.trainer)
            if (rate := float(optimizer.learning_rate.numpy())) > self.min_lr
        ]
        for optimizer, rate in above:
            optimizer.learning_rate = max(rate * self.factor, self.min_lr)
        return bool(above)

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and the counts."""
        counts = {"wait": self.wait, "cooldown_counter": self.cooldown_counter}
        return super().state_dict() | counts

    def continue_from(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned for the same number."""
        super().continue_from(state)
        self.wait, self.cooldown_counter = state["wait"], state["cooldown_counter"]


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


def optimizers_of(trainer: Any) -> list[keras.optimizers.Optimizer]:
    """Returns all optimizers of a trainer, those in a `MultiOptimizer` one by one."""
    given = trainer.optimizer
    outer = given.values() if isinstance(given, dict) else [given]
    return [one for optimizer in outer for one in single_optimizers(optimizer)]


def evaluated_variables(trainer: Any) -> list[Variable]:
    """Returns the weights of a trainer's model, then the moving averages that it evaluates with.

    If there are averages, a weight without one, as of a frozen layer, stands in its place as well.
    So the list has the same length after layers were frozen or unfrozen.
    """
    weights = weights_of(trainer.model)
    pairs = [pair for optimizer in optimizers_of(trainer) for pair in averages_of(optimizer)]
    averages = {id(weight): average for weight, average in pairs}
    stand_ins = [averages.get(id(weight), weight) for weight in weights] if averages else []
    return [*weights, *stand_ins]


def read_weights(trainer: Any) -> list[np.ndarray]:
    """Returns the values of `evaluated_variables`."""
    return [np.array(variable.numpy()) for variable in evaluated_variables(trainer)]


def write_weights(trainer: Any, values: list[np.ndarray]) -> None:
    """Assigns the values that `read_weights` returned."""
    pairs = list(zip(evaluated_variables(trainer), values, strict=True))
    with trainer.strategy.scope():
        # Weights last: one that has no average now may have had one when the values were read.
        for variable, value in reversed(pairs):
            variable.assign(value)
