"""The optimizers whose learning rates a callback sets."""

from typing import Any

import keras

from trainer.keras_compat import learning_rate_setting
from trainer.step.objective import single_optimizers


def optimizers_of(trainer: Any) -> list[keras.optimizers.Optimizer]:
    """Returns all optimizers of a trainer, those in a `MultiOptimizer` one by one."""
    given = trainer.optimizer
    outer = given.values() if isinstance(given, dict) else [given]
    return [one for optimizer in outer for one in single_optimizers(optimizer)]


def check_rates_are_numbers(trainer: Any, user: str) -> None:
    """Raises ValueError if a schedule decides an optimizer's learning rate.

    Args:
        trainer: the trainer.
        user: what sets the learning rate.
    """
    for optimizer in optimizers_of(trainer):
        setting = learning_rate_setting(optimizer)
        if not isinstance(setting, keras.Variable):
            raise ValueError(
                f"`optimizer` must have a number as its learning rate with {user}; got "
                f"{type(setting).__name__}"
            )
