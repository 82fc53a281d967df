"""What the traced code of a run reads, as its checkpoints record it.

Numbers that a function reads of its object, its module and its closure are described with the
function (`base/describe.py`). Here is the rest: private and inherited attributes, containers and
objects, what helper methods read, and what losses and penalties of the user's own classes read.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras

from trainer.base.describe import Plain, describe, digest
from trainer.base.keras_private import learning_rate_setting
from trainer.config.attributes import TRACED_METHODS
from trainer.run.names_read import is_of_framework
from trainer.run.plain_attributes import (
    OTHER,
    OUTSIDE,
    Object,
    base_of,
    losses_of,
    owner_of_loss,
    read_by,
    read_outside,
)
from trainer.run.protocol import RunnableTrainer
from trainer.run.update_settings import (
    OPTIMIZER,
    PENALTIES,
    SCHEDULE,
    functions_of_penalties,
    penalties,
    schedules_in,
    without_variables,
)

ADDRESS = re.compile(r" at 0x[0-9a-f]+>")  # in the text of an object, another one in each process
LONGEST = 500  # characters of a description; a longer one is replaced by a hash


def reads_of_trainer(trainer: RunnableTrainer, known: Collection[str]) -> dict[str, Plain]:
    """Returns what a trainer's traced methods, its losses and its penalties read, by name.

    Args:
        trainer: the trainer, whose model is built.
        known: the names that are described elsewhere.
    """
    variables = trainer.model.trainable_variables
    found = read_by(trainer, base_of(trainer), TRACED_METHODS)
    for place, loss in enumerate(losses_of(trainer)):
        found |= named(f"loss_fn {place}", read_by(*owner_of_loss(loss)))
    for place, variable in enumerate(variables):
        for name, part in penalties(variable):
            if not is_of_framework(type(part)):
                found |= named(f"{name} {place}", read_by(part, *PENALTIES[name]))
    outside = read_outside([], trainer, functions_of_penalties(variables))
    found |= {name.removeprefix(OUTSIDE).rpartition(":")[2]: each for name, each in outside.items()}
    return described(found, known)


def reads_of_optimizer(
    optimizer: keras.optimizers.Optimizer, known: Collection[str]
) -> dict[str, Plain]:
    """Returns what the update rule and the schedules of a user's own classes read, by name.

    Args:
        optimizer: the optimizer.
        known: the names that are described elsewhere.
    """
    found: dict[str, Any] = {}
    if not is_of_framework(type(optimizer)):
        base, (rule, *_) = OPTIMIZER
        found = without_variables(optimizer, read_by(optimizer, base, (rule,)))
    setting = learning_rate_setting(optimizer)
    for place, each in enumerate(schedules_in(setting)):
        if not is_of_framework(type(each)):
            found |= named(f"learning_rate {place}", read_by(each, *SCHEDULE))
    return described(found, known)


def named(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values with a prefix before their names."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def described(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Plain]:
    """Returns descriptions of snapshots that are the same in every process."""
    plain = {
        name: description(value)
        for name, value in values.items()
        if name.rpartition(".")[2] not in known
    }
    return {name: each for name, each in sorted(plain.items()) if each is not None}


def description(value: Any) -> Plain:
    """Returns the description of a result of `snapshot`; None if it says nothing."""
    if value is OTHER or (isinstance(value, str) and ADDRESS.search(value)):
        return None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Object | float):
        return describe(value.value if isinstance(value, Object) else value)
    if isinstance(value, tuple) and value[0] != "array":
        return description_of_container(*value)
    return digest(repr(value))


def description_of_container(size: int, pairs: Sequence[tuple[Any, Any]]) -> Plain:
    """Returns the descriptions of a container's items, or a hash of them if they are long."""
    items = {str(key): description(item) for key, item in pairs if not ADDRESS.search(str(key))}
    kept = {key: item for key, item in items.items() if item is not None}
    text = repr(kept)
    return kept if len(text) <= LONGEST else {"items": size, "hash": digest(text)}
