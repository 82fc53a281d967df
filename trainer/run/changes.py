"""Notices what has changed about a model or an optimizer since its step was planned.

A step is planned and traced once. What Python reads while tracing is fixed from then on. The step
is planned and traced again if something changes between two calls that layers and optimizers
declare (which variables are trained, dtype policies, a dropout rate, a schedule, `clipnorm`), or if
the user's code may have changed: see `code_version`. For variables that are frozen or unfrozen see
`slots`.
"""

import contextlib
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
from absl import logging

from trainer.base.describe import Plain, describe, plain_attributes
from trainer.checkpoint.run_facts import differences, model_facts
from trainer.checkpoint.warm_start import weights_of
from trainer.evaluation.evaluator import Evaluator
from trainer.keras_compat import (
    all_layers,
    keep_rate_tracked,
    learning_rate_setting,
    recompute_constants,
    weight_decay_exclusions,
)
from trainer.run.build import (
    checkpoint_folder,
    create_metric_variables,
    give_saved_slots,
    make_checkpoints,
    make_plan,
    parts_of_plan,
    plan_evaluation,
)
from trainer.run.learning_rates import learning_rates
from trainer.run.protocol import Parts, RunnableTrainer
from trainer.run.slots import (
    check_keeps_variables,
    make_slots,
    missed_by_trained,
    slots_from,
    slots_now,
    trained_places,
)
from trainer.step import StepPlan
from trainer.step.checks import check_built_model
from trainer.step.held_back import frozen_or_unfrozen, name_of_variable
from trainer.step.objective import optimizers_in
from trainer.step.types import Batch, Variable


class Setup(NamedTuple):
    """What a step was planned for. Objects are held, so that no other can have their id."""

    trained: tuple[Variable, ...]  # `model.trainable_variables`
    layers: tuple[tuple[object, Plain], ...]  # each layer, and what it declares
    # Each optimizer, its learning rate (a variable, a schedule or a function), and its settings.
    optimizers: tuple[tuple[keras.optimizers.Optimizer, object, Plain], ...]
    code: object  # see `code_version`
    cell: int | None  # see `executed_cell`

    def same_variables(self, other: "Setup") -> bool:
        """Returns whether both train the same variables, in the same order."""
        return list(map(id, self.trained)) == list(map(id, other.trained))

    def same_settings(self, other: "Setup") -> bool:
        """Returns whether layers and optimizers are the same, and declare the same."""
        mine, theirs = (
            [
                *((id(layer), declared) for layer, declared in each.layers),
                *((id(one), id(rate), declared) for one, rate, declared in each.optimizers),
            ]
            for each in (self, other)
        )
        return mine == theirs


def setup_of(plan: StepPlan, trainer: RunnableTrainer) -> Setup:
    """Returns what a step is set to now. Reads nothing from a device."""
    model = plan.model
    layers = all_layers(model) if isinstance(model, keras.Layer) else []
    optimizers = [one for each in plan.objectives for one in optimizers_in(each.optimizer)]
    return Setup(
        tuple(model.trainable_variables),
        tuple((layer, declared_by(layer)) for layer in layers),
        tuple(map(settings_of, optimizers)),
        code_version(trainer),
        executed_cell(),
    )


def code_version(trainer: RunnableTrainer) -> object:
    """Returns another value whenever the code that a step was traced from may have changed.

    That is after `retrace`, after an attribute of the trainer was set, in each executed cell of
    IPython, and in each call in Python's own shell.
    """
    cell = executed_cell()
    in_shell = cell is None and hasattr(sys, "ps1")
    return trainer.edits, cell, object() if in_shell else None


def executed_cell() -> int | None:
    """Returns the number of the cell that IPython executes; None outside of IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell.execution_count if shell else None


def declared_by(layer: keras.Layer) -> Plain:
    """Returns the settings that a layer declares; its layers' are left out."""
    config = None if isinstance(layer, keras.Model) else config_of(layer)
    return layer.dtype_policy.name, layer.trainable, config


def config_of(part: Any) -> Plain:
    """Returns the configuration of a layer or a schedule; None for a user's own without one."""
    with contextlib.suppress(Exception):
        return describe(part.get_config())
    return None


def settings_of(
    optimizer: keras.optimizers.Optimizer,
) -> tuple[keras.optimizers.Optimizer, object, Plain]:
    """Returns an optimizer, its learning rate, and the settings of both."""
    rate = learning_rate_setting(optimizer)
    schedule = keras.optimizers.schedules.LearningRateSchedule
    of_rate = config_of(rate) if isinstance(rate, schedule) else None
    settings = {"learning rate": of_rate, "not decayed": weight_decay_exclusions(optimizer)}
    return optimizer, rate, plain_attributes(optimizer) | settings


def keep_rates_tracked(before: Setup, now: Setup) -> None:
    """Lets optimizers be saved in which a schedule or a function has replaced a number."""
    rates = {id(one): rate for one, rate, _ in before.optimizers}
    for optimizer, *_ in now.optimizers:
        rate = rates.get(id(optimizer))
        keep_rate_tracked(optimizer, rate if isinstance(rate, keras.Variable) else None)


def must_look_again(plan: StepPlan, before: Setup) -> bool:
    """Returns whether `train_on_batch` must ask `adapted` before its next step.

    To keep steps fast, that is only in another cell, or if layers were frozen or unfrozen.
    """
    return (
        before.cell != executed_cell() or frozen_or_unfrozen(plan.weights, plan.model) is not None
    )


def difference(before: Sequence[Variable], now: Sequence[Variable]) -> str:
    """Returns in words how two lists of trained variables differ."""
    old, new = ({id(variable): variable for variable in each} for each in (before, now))
    added = [name_of_variable(variable) for key, variable in new.items() if key not in old]
    removed = [name_of_variable(variable) for key, variable in old.items() if key not in new]
    if added:
        return f"{added[0]!r}, which was not trainable before"
    if removed:
        return f"{removed[0]!r}, which is no longer trainable"
    return "the same variables in another order"


def adapted(
    trainer: RunnableTrainer, parts: Parts, before: Setup, *, training: bool
) -> tuple[Parts, Setup]:
    """Returns a trainer's parts for its model and optimizers as they are now.

    Args:
        trainer: a trainer that has started.
        parts: its parts.
        before: what they were made for.
        training: whether to train. Evaluation needs no slots for variables that were unfrozen.

    Returns:
        The parts, and what they were made for.

    Raises:
        ValueError: if an optimizer cannot train the variables that the model has now.
    """
    now = setup_of(parts.plan, trainer)
    keep_rates_tracked(before, now)
    same = before.same_variables(now)
    if same and now.same_settings(before) and now.code == before.code:
        return parts, before
    check_average(before, now)
    if not (same or training):
        return with_new_evaluator(trainer, parts), before
    slots, checkpoints = parts.slots, parts.checkpoints
    with trainer.strategy.scope():
        if not same:
            check_built_model(trainer.model, trainer.strategy)
            check_keeps_variables(trainer, slots)
            make_slots(trainer)
            slots = slots_now(trainer, slots)
        plan = make_plan(trainer, slots) if parts.plan.groups else plan_evaluation(trainer)
        new = make_checkpoints(
            trainer, parts.state, parts.metrics.train, checkpoint_folder(trainer)
        )
        new.continue_from(checkpoints)
        if not same:
            new.facts = new.facts | {"trained": trained_places(trainer)}
    depending = parts_of_plan(trainer, plan, parts.state, parts.stop, parts.metrics)
    identity = parts.identity
    if not same:  # a layer may have got other variables, as by enable_lora
        model = model_facts(trainer.model, trainer.precision.policy)
        # What is trained is compared apart: see `check_trained_as_saved`.
        if differences(identity["model"], model, ignored=("trainable",)):
            identity = identity | {"model": model}
    parts = parts._replace(checkpoints=new, slots=slots, identity=identity, **depending)
    return parts, setup_of(plan, trainer)


def check_average(before: Setup, now: Setup) -> None:
    """Raises ValueError if an optimizer is to keep an average of the weights from now on."""
    for (*_, was), (*_, settings) in zip(before.optimizers, now.optimizers, strict=False):
        if settings.get("use_ema") and not was.get("use_ema"):
            raise ValueError(
                "`optimizer` must keep an average of the weights from its first update on; got "
                "use_ema=True, set between two calls. It has no variables for the average. Pass "
                "ema_momentum= to the trainer, or make the optimizer with use_ema=True."
            )


def with_metric_variables(trainer: RunnableTrainer, parts: Parts, batch: Batch) -> Parts:
    """Returns the parts after metrics have got their variables, which `predict` does not need."""
    with trainer.strategy.scope():
        if not create_metric_variables(trainer, parts.metrics, batch):
            return parts
        metrics, folder = parts.metrics.train, checkpoint_folder(trainer)
        checkpoints = make_checkpoints(trainer, parts.state, metrics, folder)
    return parts._replace(checkpoints=checkpoints)  # which restores its newest checkpoint


def restored_again(trainer: RunnableTrainer, parts: Parts, before_setup: Setup) -> Parts:
    """Restores the newest checkpoint for a call of `train` to which an earlier one has left that.

    The checkpoint is from a later step than the program has repeated, and holds what the program
    had done by then.
    """
    keep_rates_tracked(before_setup, setup_of(parts.plan, trainer))
    before = learning_rates(parts.plan)
    parts.checkpoints.latest, parts.checkpoints.facts = None, {}
    parts = followed(trainer, parts, clean_up=True)
    now = learning_rates(parts.plan)
    if changed := [name for name in now if now[name] != before.get(name)]:
        logging.warning(
            "%s %g was assigned before train() had come to the step of %s. The run goes on with "
            "the checkpoint's %g.",
            changed[0],
            before.get(changed[0], math.nan),
            parts.checkpoints.latest,
            now[changed[0]],
        )
    return parts


def with_new_evaluator(trainer: RunnableTrainer, parts: Parts) -> Parts:
    """Returns parts whose evaluator traces the model again."""
    task = trainer, parts.plan, trainer.eval_step, parts.state, parts.stop
    return parts._replace(evaluator=Evaluator(*task))


def followed(trainer: RunnableTrainer, parts: Parts, *, clean_up: bool) -> Parts:
    """Restores the newest checkpoint, if it is not the one that was restored last.

    Args:
        trainer: a trainer that has started, and has no steps of its own.
        parts: its parts.
        clean_up: as for `CheckpointSaver.restore`.

    Returns:
        The parts: new ones if the checkpoint holds slots of variables that were unfrozen.
    """
    with trainer.strategy.scope():
        again = bool(parts.plan.groups) and give_saved_slots(trainer, parts.checkpoints)
        if again:
            metrics = parts.metrics.train
            new = make_checkpoints(trainer, parts.state, metrics, checkpoint_folder(trainer))
            new.continue_from(parts.checkpoints)
            parts = parts._replace(checkpoints=new)
        restored = parts.checkpoints.follow(clean_up=clean_up)
        if not restored and not again:
            return parts
        if recompute_constants(trainer.model):
            parts = with_new_evaluator(trainer, parts)
        slots = slots_now(trainer, slots_from(parts.checkpoints.facts, trainer))
        late = missed_by_trained(slots) or missed_by_trained(parts.slots)
        parts = parts._replace(slots=slots)
        if not (again or late):
            return parts
        plan = make_plan(trainer, slots)
    return parts._replace(**parts_of_plan(trainer, plan, parts.state, parts.stop, parts.metrics))


def check_trained_as_saved(trainer: RunnableTrainer, parts: Parts) -> None:
    """Raises ValueError if a resumed run would train other variables than its checkpoint did.

    A change in this process, after the checkpoint was restored, is meant.
    """
    saved, now = parts.checkpoints.facts.get("trained"), trained_places(trainer)
    if saved in (None, now):
        return
    weights = weights_of(trainer.model)
    before = [weights[place] for place in saved if 0 <= place < len(weights)]
    path, step = parts.checkpoints.latest, parts.checkpoints.facts["step"]
    raise ValueError(
        f"`model` must train the same variables as in {path} to resume from it; got "
        f"{difference(before, trainer.model.trainable_variables)}. The run would go on as another "
        "one. Set `trainable` as in that run; or, to train other variables from here on, change it "
        f"after the checkpoint has been restored, which train(..., steps={step}) does."
    )


def check_unchanged(trainer: RunnableTrainer, parts: Parts, before: Setup) -> None:
    """Raises ValueError if a hook or an action has changed what the step was traced with."""
    now = setup_of(parts.plan, trainer)
    keep_rates_tracked(before, now)
    if not before.same_variables(now):
        found = f"what is trained ({difference(before.trained, now.trained)})"
    elif not now.same_settings(before):
        found = changed_settings(before, now)
    else:
        return
    raise ValueError(
        f"`train` must not meet a change of {found} while it runs: change it between two calls."
    )


def changed_settings(before: Setup, now: Setup) -> str:
    """Returns what differs between two setups, for an error."""
    if len(before.layers) != len(now.layers):
        return "the layers"
    for (old, was), (new, declared) in zip(before.layers, now.layers, strict=True):
        if old is not new or was != declared:
            return f"layer {getattr(new, 'name', new)!r}"
    return "the optimizer"
