"""What a traced update has read: of optimizers, schedules, regularizers and constraints."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer.base.argument_checks import as_python
from trainer.base.keras_private import learning_rate_setting, weight_decay_exclusions
from trainer.run.names_read import functions_added, is_of_framework
from trainer.run.plain_attributes import Object, Part, plain_attributes, read_by
from trainer.step.held_back import leaves, with_held
from trainer.step.objective import optimizers_in
from trainer.step.plan import StepPlan
from trainer.step.types import Variable

OF_OPTIMIZER = float, bool, int, type(None)  # the types of its settings
NUMBERS = float, int, bool
Schedule = keras.optimizers.schedules.LearningRateSchedule


def updating(plan: StepPlan) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers with a rule of their own, those in a wrapper among them."""
    found = [one for objective in plan.objectives for one in optimizers_in(objective.optimizer)]
    return [one for one in found if not isinstance(one, keras.optimizers.MultiOptimizer)]


def settings_of(optimizer: keras.optimizers.Optimizer) -> tuple[Any, ...]:
    """Returns an optimizer, its learning rate, the numbers of that, and its other settings."""
    settings = {
        **plain_attributes(optimizer, OF_OPTIMIZER),
        **without_variables(optimizer, read_by(optimizer, *OPTIMIZER)),
        "not decayed": weight_decay_exclusions(optimizer),
    }
    return optimizer, Object(learning_rate_setting(optimizer)), rate_of(optimizer), settings


def without_variables(owner: object, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values without lists and dicts of slots, which may be made while it is traced."""

    def holds_slots(value: Any) -> bool:
        items = leaves(value) if isinstance(value, dict | list | tuple) else [value]
        return not items or any(isinstance(one, keras.Variable | tf.Variable) for one in items)

    return {name: each for name, each in values.items() if not holds_slots(getattr(owner, name))}


def rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the numbers of a learning rate that a traced update holds.

    Left out are numbers that a schedule counts itself, and those of a function that returns another
    one in each call.
    """
    setting = learning_rate_setting(optimizer)
    if schedules := schedules_in(setting):
        return [read_by(each, *SCHEDULE) for each in schedules]
    if not callable(setting):
        return None
    found, again = setting(), setting()
    number = isinstance(as_python(found), OF_OPTIMIZER)
    return repr(as_python(found)) if number and found == again else None


def schedules_in(setting: Any) -> list[Any]:
    """Returns a schedule and those that it holds, at any depth; none for another learning rate."""
    return with_held(setting, Schedule) if isinstance(setting, Schedule) else []


def penalties_of(variable: Variable) -> tuple[Any, ...]:
    """Returns a variable, and the settings of its regularizer and of its constraint."""
    settings: dict[str, Any] = {}
    for name, part in penalties(variable):
        numbers = plain_attributes(part, NUMBERS) if hasattr(part, "__dict__") else {}
        read = {} if is_of_framework(type(part)) else read_by(part, *PENALTIES[name])
        settings[name] = Object(part), numbers | read
    return variable, settings


def penalties(variable: Variable) -> list[tuple[str, Any]]:
    """Returns the regularizer and the constraint of a variable, by name, as far as it has them."""
    pairs = [(name, getattr(variable, name, None)) for name in PENALTIES]
    return [pair for pair in pairs if pair[1] is not None]


def functions_of_update(
    optimizers: Sequence[keras.optimizers.Optimizer], variables: Iterable[Variable]
) -> list[Any]:
    """Returns the user's functions that an update and the penalties of the weights call.

    Args:
        optimizers: the result of `updating`.
        variables: the trained variables.
    """
    settings = [learning_rate_setting(one) for one in optimizers]
    schedules = [each for one in settings for each in schedules_in(one)]
    return [
        *functions_added(optimizers, *OPTIMIZER),
        *functions_added(schedules, *SCHEDULE),
        *functions_of_penalties(variables),
    ]


def functions_of_penalties(variables: Iterable[Variable]) -> list[Any]:
    """Returns the user's functions that are regularizers or constraints, and methods of such."""
    parts = [pair for each in variables for pair in penalties(each)]
    return [each for name, part in parts for each in functions_added([part], *PENALTIES[name])]


# A class of Keras, and its methods that are traced.
OPTIMIZER: Part = keras.optimizers.Optimizer, ("update_step", "apply", "build")
SCHEDULE: Part = Schedule, ("__call__",)
PENALTIES: dict[str, Part] = {
    "regularizer": (keras.regularizers.Regularizer, ("__call__",)),
    "constraint": (keras.constraints.Constraint, ("__call__",)),
}
