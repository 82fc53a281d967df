"""A trainer's optimizers, copies of its weights in memory, and the callback that keeps the best."""

from typing import Any

import keras
import numpy as np

from trainer.callbacks.monitored import Monitored
from trainer.checkpoint.warm_start import weights_of
from trainer.keras_compat import averages_of
from trainer.step.objective import single_optimizers
from trainer.step.types import Variable


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
