"""The optimizers whose learning rates a callback sets."""

from typing import Any

import keras

from trainer.keras_compat import learning_rate_setting
from trainer.step.objective import optimizers_in, single_optimizers


def optimizers_of(trainer: Any) -> list[keras.optimizers.Optimizer]:
    """Returns all optimizers of a trainer, those in a `MultiOptimizer` one by one."""
    given = trainer.optimizer
    outer = given.values() if isinstance(given, dict) else [given]
    return [one for optimizer in outer for one in single_optimizers(optimizer)]


def check_rates_are_numbers(trainer: Any, user: str, why: str, remedy: str) -> None:
    """Raises ValueError if a schedule or an inner optimizer decides an optimizer's learning rate.

    Args:
        trainer: the trainer.
        user: what sets the learning rate.
        why: what would happen, for the error.
        remedy: what to do if the schedule is to stay, for the error.
    """
    for optimizer in optimizers_of(trainer):
        if held := optimizers_in(optimizer)[1:]:
            raise ValueError(
                f"`optimizer` must not hold another optimizer with {user}; got "
                f"{type(optimizer).__name__} with {type(held[0]).__name__} in it. Which of their "
                "learning rates counts is not known. Set it in a hook instead, "
                "as with self.optimizer.inner.learning_rate.assign(0.001)."
            )
        setting = learning_rate_setting(optimizer)
        if not isinstance(setting, keras.Variable):
            raise ValueError(
                f"`optimizer` must have a number as its learning rate with {user}; got "
                f"{type(setting).__name__}. The schedule decides the learning rate, so {why}. "
                f"Make the optimizer with a number, or {remedy}."
            )
