"""Notices what has changed about a model or an optimizer since its step was planned.

A step is planned and traced once. What Python reads while tracing (which variables are trained,
dtype policies, a dropout rate, a schedule, `clipnorm`) is fixed from then on. If it changes between
two calls of a trainer's methods, the step is planned and traced again. A change of the trained
variables is an error, since the slots of an optimizer belong to the variables it was built for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from trainer.base.keras_private import all_layers, learning_rate_setting
from trainer.evaluation.ema_weights import keeps_average
from trainer.run.build import make_checkpoints, make_plan, parts_of_plan, plan_evaluation
from trainer.run.protocol import Parts, RunnableTrainer
from trainer.step import StepPlan
from trainer.step.types import Variable


class Setup(NamedTuple):
    """What a step was planned for. Objects are held, so that no other can have their id."""

    trained: tuple[Variable, ...]  # `model.trainable_variables`
    layers: tuple[tuple[Any, ...], ...]  # for each layer: itself, and its settings
    optimizers: tuple[
        tuple[Any, ...], ...
    ]  # for each optimizer: its learning rate and its settings

    def same_variables(self, other: "Setup") -> bool:
        """Returns whether both train the same variables, in the same order."""
        return list(map(id, self.trained)) == list(map(id, other.trained))

    def same_settings(self, other: "Setup") -> bool:
        """Returns whether everything else is the same, too."""
        mine, theirs = (
            [(id(one), *settings) for one, *settings in (*each.layers, *each.optimizers)]
            for each in (self, other)
        )
        return mine == theirs


def setup_of(plan: StepPlan) -> Setup:
    """Returns what a plan's model and optimizers are set to now. Reads nothing from a device."""
    layers = all_layers(plan.model) if isinstance(plan.model, keras.Model) else []
    optimizers = [one for objective in plan.objectives for one in objective.updating]
    return Setup(
        tuple(plan.model.trainable_variables),
        tuple(
            (layer, layer.dtype_policy.name, layer.trainable, numbers(layer)) for layer in layers
        ),
        tuple((learning_rate_setting(one), numbers(one, whole=True)) for one in optimizers),
    )


def numbers(owner: object, *, whole: bool = False) -> dict[str, Any]:
    """Returns the public attributes of an object that are numbers.

    Args:
        owner: a layer or an optimizer.
        whole: whether to include ints and None. A layer may count its calls in an int.
    """
    types = (float, bool, int, type(None)) if whole else (float, bool)
    return {
        name: value
        for name, value in vars(owner).items()
        if type(value) in types and not name.startswith("_") and name not in ("built", "trainable")
    }


def check_same_variables(before: Setup, now: Setup) -> None:
    """Raises ValueError if the model trains other variables than when its optimizer was built."""
    if before.same_variables(now):
        return
    raise ValueError(
        "`model` must train the variables for which its optimizer was built; got "
        f"{difference(before.trained, now.trained)}. The optimizer has slots for those variables "
        "only. Continue with a new trainer and a new optimizer: "
        "Trainer(model=lambda: trainer.model, strategy=trainer.strategy, optimizer=..., ...)."
    )


def check_rates(before: Setup, now: Setup) -> None:
    """Raises ValueError if a schedule or a function has replaced a learning rate that was a number.

    Keras then removes the number from the optimizer's variables, and TensorFlow refuses to save an
    object that has lost a variable.
    """
    for (old, *_), (new, *_) in zip(before.optimizers, now.optimizers, strict=True):
        if isinstance(old, keras.Variable) and not isinstance(new, keras.Variable):
            raise ValueError(
                "`optimizer` must keep a number as its learning rate if it was made with one; got "
                f"{type(new).__name__}. TensorFlow can no longer save this optimizer. Assign a "
                "number, or make the optimizer with the schedule. To change over now, continue "
                "with a new trainer and a new optimizer: Trainer(model=lambda: trainer.model, "
                "strategy=trainer.strategy, optimizer=..., ...)."
            )


def difference(before: Sequence[Variable], now: Sequence[Variable]) -> str:
    """Returns in words how two lists of trained variables differ."""
    old, new = ({id(variable): variable for variable in each} for each in (before, now))
    added = [name_of(variable) for key, variable in new.items() if key not in old]
    removed = [name_of(variable) for key, variable in old.items() if key not in new]
    if added:
        return f"{added[0]!r}, which was not trainable then"
    if removed:
        return f"{removed[0]!r}, which is no longer trainable"
    return "the same variables in another order"


def name_of(variable: Variable) -> str:
    """Returns the name of a variable, with the path of its layer if it has one."""
    return str(getattr(variable, "path", variable.name))


def adapted(trainer: RunnableTrainer, parts: Parts, before: Setup, *, training: bool) -> Parts:
    """Returns a trainer's parts for its model and optimizers as they are now.

    Args:
        trainer: a trainer that has started.
        parts: its parts.
        before: what they were made for.
        training: whether to train. Evaluation does not need the optimizer's slots, except for the
            averages of the weights.

    Raises:
        ValueError: if the model trains other variables.
    """
    now = setup_of(parts.plan)
    check_rates(before, now)
    if training or keeps_average(parts.plan):
        check_same_variables(before, now)
    if now.same_settings(before) or not before.same_variables(now):
        return parts
    with trainer.strategy.scope():
        trained = bool(parts.plan.groups)
        plan = make_plan(trainer, again=True) if trained else plan_evaluation(trainer)
        checkpoints = make_checkpoints(trainer, parts.state, parts.metrics.train, trainer.model_dir)
        checkpoints.continue_from(parts.checkpoints)
    depending = parts_of_plan(trainer, plan, parts.state, parts.stop)
    return parts._replace(checkpoints=checkpoints, **depending)


def check_unchanged(parts: Parts, before: Setup) -> None:
    """Raises ValueError if a hook or an action has changed what the step was traced with."""
    now = setup_of(parts.plan)
    check_rates(before, now)
    check_same_variables(before, now)
    if not now.same_settings(before):
        raise ValueError(
            "`train` must not meet a change of a layer's or an optimizer's settings while it runs; "
            f"got a change of {changed_settings(before, now)} in a hook or an action. The step was "
            "traced before and would not notice. Change it between two calls of train()."
        )


def changed_settings(before: Setup, now: Setup) -> str:
    """Returns what differs between two setups, for an error."""
    for old, new in zip(before.layers, now.layers, strict=False):
        if old[0] is not new[0] or old[1:] != new[1:]:
            return f"layer {new[0].name!r}"
    if len(before.layers) != len(now.layers):
        return "the layers"
    return "the optimizer"
