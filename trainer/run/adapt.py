"""Adapts a started trainer: to what its model and optimizers are now, and to newer checkpoints.

A step is planned and traced once. What Python reads while tracing is fixed from then on. The step
is planned and traced again if something changes between two calls that layers and optimizers
declare (which variables are trained, a dropout rate, a schedule, `clipnorm`), or if the user's code
may have changed: see `code_version`. For variables that are frozen or unfrozen see `slots`.
"""

import math
import sys
from typing import TYPE_CHECKING, NamedTuple

import keras
from absl import logging

from trainer.base.tracking import name_of_variable
from trainer.checkpoint.warm_start import weights_of
from trainer.evaluation.evaluator import Evaluator
from trainer.fingerprint import (
    Fingerprint,
    diff,
    entries_of,
    fingerprint,
    model_entries,
    replaced,
    select,
)
from trainer.keras_compat import learning_rate_setting, recompute_constants
from trainer.run.build import (
    create_metric_variables,
    give_saved_slots,
    make_checkpoints,
    make_plan,
    parts_of_plan,
    plan_evaluation,
)
from trainer.run.parts import Parts
from trainer.run.reporting import learning_rates
from trainer.run.slots import (
    check_keeps_variables,
    make_slots,
    missed_by_trained,
    optimizers_of,
    slots_from,
    slots_now,
    trained_places,
)
from trainer.step import StepPlan
from trainer.step.checks import check_model
from trainer.step.held_back import frozen_or_unfrozen
from trainer.step.objective import optimizers_in
from trainer.step.types import Batch, Variable

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class Setup(NamedTuple):
    """What a step was planned for. Objects are held, so that no other can have their id."""

    trained: tuple[Variable, ...]  # `model.trainable_variables`
    # Each optimizer, and its learning rate: a variable, a schedule or a function.
    rates: tuple[tuple[keras.optimizers.Optimizer, object], ...]
    declared: Fingerprint  # by layers and optimizers
    code: object  # see `code_version`
    cell: int | None  # see `executed_cell`

    def same_variables(self, other: "Setup") -> bool:
        """Returns whether both train the same variables, in the same order."""
        return list(map(id, self.trained)) == list(map(id, other.trained))

    def changed(self, other: "Setup") -> str | None:
        """Returns the place of a setting that differs from another setup's; None if none does."""
        rates = [[(id(one), id(rate)) for one, rate in each.rates] for each in (self, other)]
        found = diff(self.declared, other.declared)
        return next(iter(found), None if rates[0] == rates[1] else "optimizer.learning_rate")


def setup_of(plan: StepPlan, trainer: "Trainer") -> Setup:
    """Returns what a step is set to now."""
    optimizers = [one for each in plan.objectives for one in optimizers_in(each.optimizer)]
    rates = tuple((one, learning_rate_setting(one)) for one in optimizers)
    places = {f"optimizer[{at}]": one for at, one in enumerate(optimizers)}
    layers = model_entries(plan.model, trainer.precision.policy, graphs=False)
    declared = layers | entries_of(places)
    for at, (_, rate) in enumerate(rates):
        if isinstance(rate, keras.Variable):  # its value is part of the state
            declared.pop(f"optimizer[{at}].learning_rate", None)
    trained = tuple(plan.model.trainable_variables)
    return Setup(trained, rates, declared, code_version(trainer), executed_cell())


def code_version(trainer: "Trainer") -> object:
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


def replaced_numbers(before: Setup, now: Setup) -> dict[int, keras.Variable]:
    """Returns the learning rates that a schedule or a function has replaced, for `make_slots`."""
    replaced = {id(one) for one, rate in now.rates if not isinstance(rate, keras.Variable)}
    numbers = {id(one): rate for one, rate in before.rates if isinstance(rate, keras.Variable)}
    return {at: number for at, number in numbers.items() if at in replaced}


def must_look_again(plan: StepPlan, before: Setup) -> bool:
    """Returns whether `train_on_batch` must ask `adapted` before its next step.

    To keep steps fast, that is only in another cell, or if layers were frozen or unfrozen.
    """
    return (
        before.cell != executed_cell() or frozen_or_unfrozen(plan.weights, plan.model) is not None
    )


def adapted(
    trainer: "Trainer", parts: Parts, before: Setup, *, training: bool
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
    same = before.same_variables(now)
    if same and not now.changed(before) and now.code == before.code:
        return parts, before
    check_not_replaced(trainer, parts.plan)
    if not (same or training):
        return with_new_evaluator(trainer, parts), before
    slots, checkpoints = parts.slots, parts.checkpoints
    with trainer.strategy.scope():
        if not same:
            check_model(trainer.model, trainer.strategy)
            check_keeps_variables(trainer, slots)
        make_slots(trainer, numbers=replaced_numbers(before, now))
        if not same:
            slots = slots_now(trainer, slots)
        plan = make_plan(trainer, slots) if parts.plan.groups else plan_evaluation(trainer)
        new = make_checkpoints(trainer, parts.state, parts.metrics.train)
        new.continue_from(checkpoints)
        if not same:
            new.facts = new.facts | {"trained": trained_places(trainer)}
    depending = parts_of_plan(trainer, plan, parts.state, parts.stop, parts.metrics)
    declared = parts.declared
    if not same:  # a layer may have got other variables, as by enable_lora
        model = fingerprint(trainer.model, {}, trainer.precision.policy)
        # What is trained is compared apart: see `check_trained_as_saved`.
        if any(not at.endswith(".trainable") for at in diff(select(declared, "model"), model)):
            declared = replaced(declared, model, "model")
    parts = parts._replace(checkpoints=new, slots=slots, declared=declared, **depending)
    return parts, setup_of(plan, trainer)


def check_not_replaced(trainer: "Trainer", plan: StepPlan) -> None:
    """Raises ValueError if a trainer has another model or optimizer than it was built with."""
    planned = {id(each.optimizer) for each in plan.objectives}
    same_optimizers = planned <= {*map(id, optimizers_of(trainer).values())}
    if trainer.model is plan.model and same_optimizers:
        return
    name = "optimizer" if trainer.model is plan.model else "model"
    raise ValueError(f"`{name}` must not be replaced once it is used: make another Trainer")


def with_metric_variables(trainer: "Trainer", parts: Parts, batch: Batch) -> Parts:
    """Returns the parts after metrics have got their variables, which `predict` does not need."""
    with trainer.strategy.scope():
        if not create_metric_variables(trainer, parts.metrics, batch):
            return parts
        checkpoints = make_checkpoints(trainer, parts.state, parts.metrics.train)
    return parts._replace(checkpoints=checkpoints)  # which restores its newest checkpoint


def restored_again(trainer: "Trainer", parts: Parts, setup: Setup) -> tuple[Parts, Setup]:
    """Restores the newest checkpoint for a call of `train` to which an earlier one has left that.

    The checkpoint is from a later step than the program has repeated, and holds what the program
    had done by then.
    """
    if replaced_numbers(setup, setup_of(parts.plan, trainer)):
        parts, setup = adapted(trainer, parts, setup, training=True)
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
    return parts, setup


def with_new_evaluator(trainer: "Trainer", parts: Parts) -> Parts:
    """Returns parts whose evaluator traces the model again."""
    task = trainer, parts.plan, trainer.eval_step, parts.state, parts.stop
    return parts._replace(evaluator=Evaluator(*task))


def followed(trainer: "Trainer", parts: Parts, *, clean_up: bool) -> Parts:
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
            new = make_checkpoints(trainer, parts.state, parts.metrics.train)
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


def check_trained_as_saved(trainer: "Trainer", parts: Parts) -> None:
    """Raises ValueError if a resumed run would train other variables than its checkpoint did.

    A change in this process, after the checkpoint was restored, is meant.
    """
    saved, now = parts.checkpoints.facts.get("trained"), trained_places(trainer)
    if saved in (None, now):
        return
    weights = weights_of(trainer.model)
    other = name_of_variable(weights[min({*saved} ^ {*now})])
    step = parts.checkpoints.facts["step"]
    raise ValueError(
        f"`model` must train the same variables as {parts.checkpoints.latest}; {other!r} differs: "
        f"set `trainable` after train(..., steps={step})"
    )


def check_unchanged(trainer: "Trainer", parts: Parts, before: Setup) -> None:
    """Raises ValueError if a hook or an action has changed what the step was traced with."""
    now = setup_of(parts.plan, trainer)
    found = now.changed(before) or (None if before.same_variables(now) else "model.trainable")
    if found:
        raise ValueError(f"`{found}` must not change while `train` runs, but between two calls")
