"""Finds a learning rate: a short run in which it grows, as in Smith, 2017 (arXiv:1506.01186)."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.callbacks.callback import Callback
from trainer.callbacks.monitored import optimizers_of
from trainer.callbacks.stuck import TrainingStuckError

SMOOTHING = 0.9  # momentum of the moving average of losses
TOO_HIGH = 4.0  # a loss that is this many times the best one ends the search


@dataclasses.dataclass(frozen=True)
class LearningRates:
    """What `find_learning_rate` has found."""

    rates: np.ndarray  # shape (steps,), float64: the learning rate of each applied step
    losses: np.ndarray  # shape (steps,), float64: the loss before that step, smoothed
    suggestion: float  # a tenth of the rate at which the loss was lowest


class Sweep(Callback):
    """Sets a learning rate that grows from step to step, and notes the losses.

    Args:
        rates: shape (steps,): the learning rates.
    """

    def __init__(self, rates: np.ndarray) -> None:
        """Has no losses yet."""
        self.rates = rates
        self.used: list[float] = []
        self.losses: list[float] = []
        self._mean = 0.0

    def is_due(self, before: int, step: int) -> bool:
        """Returns True: the report is needed after each step."""
        del before, step
        return True

    def on_loop_begin(self, step: int) -> None:
        """Sets the learning rate of the next step."""
        for optimizer in optimizers_of(self.trainer):
            optimizer.learning_rate = float(self.rates[step])

    def take_reports(self, steps: Any) -> None:
        """Notes the loss of a step that was applied, and ends the run if it is too high."""
        if not steps.grads_finite[-1]:
            return
        self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * float(steps.loss[-1])
        self.used.append(float(self.rates[int(steps.step[-1]) - 1]))
        self.losses.append(self._mean / (1 - SMOOTHING ** (len(self.losses) + 1)))
        best = min(self.losses)
        if self.losses[-1] > best + (TOO_HIGH - 1) * abs(best):
            self.trainer.stop()


def find_learning_rate(
    make: Callable[..., Any],
    data: Any,
    *,
    global_batch: int | None = None,
    min_lr: float = 1e-6,
    max_lr: float = 1.0,
    steps: int = 100,
) -> LearningRates:
    """Suggests a learning rate, from a short run in which it grows exponentially.

    The run is that of a new trainer, whose weights are of no use afterwards. It ends early when
    the loss is far above its best. Skipped steps are left out.

    Args:
        make: a function that returns a new trainer and passes its keyword arguments on to it: the
            class of a trainer, or `functools.partial(Trainer, ...)` with functions as `model` and
            `optimizer`. The optimizer's learning rate must be a number.
        data: as `train_data` of `Trainer.train`.
        global_batch: the batch size, if `data` is arrays.
        min_lr: the learning rate of the first step.
        max_lr: the learning rate of the last step.
        steps: the number of steps.

    Raises:
        ValueError: if the trainer was made without the settings or has a model_dir; if too few
            steps could be applied.
        TypeError: by Keras, if the optimizer has a schedule.

    Example:
        >>> import functools, keras, numpy as np
        >>> from trainer import Trainer
        >>> make = functools.partial(
        ...     Trainer, optimizer="sgd", loss_fn="mse",
        ...     model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]))
        >>> x = np.ones([8, 1], np.float32)
        >>> found = find_learning_rate(make, (x, 3 * x), global_batch=8, steps=50)
        >>> 0.001 < found.suggestion < 1.0
        True
    """
    sweep = Sweep(np.geomspace(min_lr, max_lr, steps))
    settings = {"callbacks": [sweep], "steps_per_loop": 1, "log_interval": steps, "verbose": False}
    trainer = make(**settings)
    if sweep not in trainer.callbacks:
        raise ValueError("`make` must pass its keyword arguments on to the trainer")
    if trainer.model_dir is not None:
        raise ValueError("`make` must make a trainer without model_dir")
    with contextlib.suppress(TrainingStuckError):  # the last learning rates were far too high
        trainer.train(data, steps, global_batch=global_batch)
    losses, rates = np.array(sweep.losses), np.array(sweep.used)
    if len(losses) < 5:  # fewer have no slope that is worth a name
        raise ValueError(
            f"`steps` must be more, or `min_lr` lower: of {steps}, {len(losses)} were applied"
        )
    return LearningRates(rates, losses, float(rates[np.argmin(losses)]) / 10)
