"""The slots of a trainer's optimizers, when layers are frozen and unfrozen between calls.

An optimizer keeps the slots of every variable that it has ever trained. A frozen variable keeps its
value, its slots and its moving average, which goes on towards the value. A variable that is
unfrozen for the first time gets new slots. Rules such as Adam's correct for slots that began at 0,
so for each variable the updates are counted that it has missed.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from trainer.base.tracking import read_copies, write_copies
from trainer.checkpoint.warm_start import weights_of
from trainer.keras_compat import (
    MultiOptimizer,
    built_for,
    carry_over,
    inner_optimizer,
    unbuilt_copy,
)
from trainer.run.parts import Slot, Slots
from trainer.step.averages import averages_of
from trainer.step.objective import optimizers_in
from trainer.step.types import Optimizers, Variable

if TYPE_CHECKING:
    from trainer.trainer import Trainer


def slots_now(trainer: "Trainer", before: Slots | None) -> Slots:
    """Returns the slots of a trainer's optimizers, for the variables that are trained now.

    Args:
        trainer: the trainer.
        before: the slots until now; None if the optimizers are new or were just restored.
    """
    trained = {id(variable) for variable in trainer.model.trainable_variables}
    found: Slots = {}
    for name, optimizer in optimizers_of(trainer).items():
        known = {id(slot.variable): slot for slot in (before or {}).get(name, ())}
        found[name] = []
        for variable in built_for(optimizer):
            updates = updates_of(optimizer, variable, trainer)
            slot = known.get(id(variable)) or Slot(variable, 0 if before is None else updates, None)
            missed = missed_until(slot, updates)
            since = None if id(variable) in trained else updates
            found[name].append(Slot(variable, missed, since))
    return found


def missed_until(slot: Slot, updates: int) -> int:
    """Returns how many of an optimizer's first `updates` updates a variable was not part of."""
    return slot.missed + (0 if slot.since is None else updates - slot.since)


def missed_by_trained(slots: Slots) -> list[tuple[Variable, int]]:
    """Returns the trained variables that have missed updates, with the number of these."""
    every = [slot for own in slots.values() for slot in own]
    return [(slot.variable, slot.missed) for slot in every if slot.since is None and slot.missed]


def updates_of(
    optimizer: keras.optimizers.Optimizer, variable: Variable, trainer: "Trainer"
) -> int:
    """Returns how many updates the optimizer of a variable has made. Waits for the device."""
    if isinstance(optimizer, MultiOptimizer):
        optimizer = inner_optimizer(optimizer, variable)
    return int(read_copies([optimizer.iterations], trainer.strategy)[0][0].numpy())


def facts_of(slots: Slots, trainer: "Trainer") -> dict[str, Any]:
    """Returns the entries of `run.json` about frozen and unfrozen variables.

    "slots": for each optimizer, the position in the model's weights of each variable that it has
    slots for, and the number of updates that this variable has missed. "trained": the positions of
    the variables that are trained.
    """
    places = {id(variable): place for place, variable in enumerate(weights_of(trainer.model))}
    saved, trained = {}, []
    for name, optimizer in optimizers_of(trainer).items():
        saved[name] = [
            [
                places[id(slot.variable)],
                missed_until(slot, updates_of(optimizer, slot.variable, trainer)),
            ]
            for slot in slots.get(name, ())
        ]
        trained += [places[id(slot.variable)] for slot in slots.get(name, ()) if slot.since is None]
    return {"slots": saved, "trained": sorted(trained)}


def check_keeps_variables(trainer: "Trainer", slots: Slots) -> None:
    """Raises ValueError if a model no longer has a variable that its optimizer has trained.

    Args:
        trainer: the trainer.
        slots: the slots of its optimizers until now.
    """
    weights = {id(variable) for variable in weights_of(trainer.model)}
    for slot in (slot for own in slots.values() for slot in own):
        if id(slot.variable) not in weights:
            name = getattr(slot.variable, "path", slot.variable.name)
            raise ValueError(
                f"`model` must keep its variables, or get a new trainer; got one without {name!r}"
            )


def trained_places(trainer: "Trainer") -> list[int]:
    """Returns the positions of the trained variables in the model's weights."""
    places = {id(variable): place for place, variable in enumerate(weights_of(trainer.model))}
    return sorted(places[id(variable)] for variable in trainer.model.trainable_variables)


def slots_from(saved: dict[str, Any], trainer: "Trainer") -> Slots | None:
    """Returns the slots that a checkpoint describes, as of its step; None if it says nothing."""
    if not saved.get("slots"):
        return None
    weights = weights_of(trainer.model)
    return {
        name: [
            Slot(weights[place], missed, None)
            for place, missed in lines
            if 0 <= place < len(weights)
        ]
        for name, lines in saved["slots"].items()
    }


def make_slots(
    trainer: "Trainer",
    wanted: Slots | None = None,
    numbers: Mapping[int, keras.Variable] | None = None,
) -> bool:
    """Gives a trainer's optimizers slots for more variables. Call it in the strategy's scope.

    Args:
        trainer: the trainer. Its optimizers are built.
        wanted: the variables, in this order; None for those that are trained now.
        numbers: learning rates that were numbers until a schedule or a function was assigned, by
            the optimizer's id. TensorFlow cannot save such an optimizer until it is built again.

    Returns:
        Whether an optimizer was built again.

    Raises:
        ValueError: if an optimizer cannot be made again from its configuration, or has variables
            that are not made when it is built. All optimizers stay as they were.
    """
    numbers = numbers or {}
    built = []
    for name, optimizer in optimizers_of(trainer).items():
        held = built_for(optimizer)
        ids = {id(variable) for variable in held}
        if wanted is None:
            owners = trained_by(name, trainer)
            order = [*held, *(variable for variable in owners if id(variable) not in ids)]
        else:
            order = [slot.variable for slot in wanted.get(name, ())]
        more = len(order) > len(held) and ids <= {id(variable) for variable in order}
        replaced = any(id(one) in numbers for one in optimizers_in(optimizer))
        if optimizer.built and (more or replaced):
            fresh = built_again(optimizer, order if more else held, numbers.get(id(optimizer)))
            built.append((optimizer, fresh))
    for optimizer, fresh in built:
        take_over(optimizer, fresh, trainer.strategy)
    return bool(built)


def trained_by(name: str, trainer: "Trainer") -> list[Variable]:
    """Returns the variables that an optimizer trains now, given its name in a checkpoint."""
    part = trainer.model
    if isinstance(trainer.optimizer, dict):
        part = getattr(part, name.removeprefix("optimizer_"))
    held = {id(variable) for variable in part.trainable_variables}
    return [one for one in trainer.model.trainable_variables if id(one) in held]


def built_again(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[Variable],
    number: keras.Variable | None = None,
) -> keras.optimizers.Optimizer:
    """Returns a copy of an optimizer that is built for other variables.

    Args:
        optimizer: the optimizer.
        variables: what the copy is built for.
        number: as for `unbuilt_copy`.

    Raises:
        ValueError: if the copy has not all variables of the optimizer.
    """
    fresh = unbuilt_copy(optimizer, number)
    pairs = list(zip(optimizers_in(optimizer), optimizers_in(fresh), strict=True))
    for one, other in pairs:
        carry_over(one, other)
    fresh.build(list(variables))
    for one, other in pairs:
        made = by_path(other)
        for path, old in by_path(one).items():
            if len(old) > len(made.get(path, ())):
                raise ValueError(
                    f"`optimizer` must create all variables in build() to train more; got {path!r}"
                )
    return fresh


def by_path(optimizer: keras.optimizers.Optimizer) -> dict[str, list[keras.Variable]]:
    """Returns the variables of an optimizer, keyed by their paths; several may share one."""
    found: dict[str, list[keras.Variable]] = {}
    for variable in optimizer.variables:
        found.setdefault(variable.path, []).append(variable)
    return found


def take_over(
    optimizer: keras.optimizers.Optimizer,
    fresh: keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
) -> None:
    """Gives an optimizer the variables of a copy that was built for more of the model's.

    The optimizer's own values are copied first. The moving average of a weight that had none begins
    at the weight.
    """
    for one, other in zip(optimizers_in(optimizer), optimizers_in(fresh), strict=True):
        made = by_path(other)
        pairs = [
            (old, new)
            for path, olds in by_path(one).items()
            for old, new in zip(olds, made[path], strict=False)
        ]
        known = {id(new) for _, new in pairs}
        pairs += [pair for pair in averages_of(other) if id(pair[1]) not in known]
        values = read_copies([before for before, _ in pairs], strategy)
        write_copies([after for _, after in pairs], values, strategy)
        vars(one).clear()
        vars(one).update(vars(other))


def optimizers_of(trainer: "Trainer") -> dict[str, keras.optimizers.Optimizer]:
    """Returns a trainer's optimizers, keyed by their names in a checkpoint; {} if it has none."""
    return optimizers_by_item(trainer.optimizer) if trainer.has_optimizer else {}


def optimizers_by_item(optimizer: Optimizers) -> dict[str, keras.optimizers.Optimizer]:
    """Returns the optimizers, keyed by their names in a checkpoint."""
    if isinstance(optimizer, dict):
        return {f"optimizer_{name}": one for name, one in optimizer.items()}
    return {"optimizer": optimizer}
