"""The learning rates of a run, for its log."""

import keras
import tensorflow as tf

from trainer.keras_compat import learning_rate_setting
from trainer.step import StepPlan

NAME = "learning_rate"  # under which a single optimizer's learning rate is logged


def learning_rates(plan: StepPlan) -> dict[str, float]:
    """Returns the learning rates that the last update used. Waits for the device.

    A schedule is evaluated at that update's number. Before the first update, these are the
    rates that it will use.

    Returns:
        The learning rate under the name "learning_rate". With several optimizers, one for each,
        under "learning_rate/NAME"; the optimizers in a `keras.optimizers.MultiOptimizer` are named
        by their own names and positions.
    """
    rates = {}
    for objective in plan.objectives:
        name = f"{NAME}/{objective.name}" if objective.name else NAME
        parts = objective.updating
        for position, optimizer in enumerate(parts):
            suffix = f"/{optimizer.name}_{position}" if len(parts) > 1 else ""
            rates[name + suffix] = last_learning_rate(optimizer)
    return rates


def last_learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the learning rate of an optimizer's last update. Waits for the device."""
    setting = learning_rate_setting(optimizer)
    if not isinstance(setting, keras.optimizers.schedules.LearningRateSchedule):
        return float(tf.convert_to_tensor(optimizer.learning_rate))
    count = optimizer.iterations
    last = tf.maximum(tf.convert_to_tensor(count) - 1, 0)
    # As in an update, a schedule gets the variable, to which floats can be added. They cannot be
    # added to a tensor of integers.
    with keras.StatelessScope([(count, last)]):
        return float(tf.convert_to_tensor(setting(count)))
