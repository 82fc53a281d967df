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
from trainer.run.names_read import chains_of, functions_added, is_of_framework
from trainer.run.plain_attributes import (
    OTHER,
    Field,
    Object,
    base_of,
    functions_of_trainer,
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
LONGEST_TEXT = 40  # characters of a text; a longer one is replaced by a hash
LONGEST = 500  # characters of a description; a longer one is replaced by a hash

Chains = Collection[tuple[str, str]]  # see `names_read.NamesUsed`


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
    functions = [*functions_of_trainer(trainer), *functions_of_penalties(variables)]
    outside = read_outside(functions)
    found |= {name.rpartition(":")[2]: each for name, each in outside.items()}
    return described(found, known, chains_of(functions))


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
    schedules = schedules_in(learning_rate_setting(optimizer))
    for place, each in enumerate(schedules):
        if not is_of_framework(type(each)):
            found |= named(f"learning_rate {place}", read_by(each, *SCHEDULE))
    functions = [*functions_added([optimizer], *OPTIMIZER), *functions_added(schedules, *SCHEDULE)]
    return described(found, known, chains_of(functions))


def named(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values with a prefix before their names."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def described(
    values: Mapping[str, Any], known: Collection[str], chains: Chains
) -> dict[str, Plain]:
    """Returns descriptions of snapshots that are the same in every process."""
    found = {}
    for name in sorted(values):
        owner = name.rpartition(".")[2]
        text = None if owner in known else description(values[name], owner, chains)
        if text is not None:
            found[name] = text
    return found


def description(value: Any, owner: str, chains: Chains) -> Plain:
    """Returns the description of a result of `snapshot`; None if it says nothing.

    Args:
        value: the snapshot.
        owner: the name by which the code reads the value.
        chains: what the code reads directly of a name. Other attributes may be of this run alone,
            such as its name and its folder, also if they have the name of one that is read.
    """
    if value is OTHER or (isinstance(value, str) and ADDRESS.search(value)):
        return None
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else f"hash {digest(value)}"
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Object | float):
        return describe(value.value if isinstance(value, Object) else value)
    if isinstance(value, tuple) and value[0] != "array":
        size, pairs = value
        return description_of_container(size, pairs, owner, chains)
    return digest(repr(value))


def description_of_container(
    size: int, pairs: Sequence[tuple[Any, Any]], owner: str, chains: Chains
) -> Plain:
    """Returns the descriptions of a container's items, or a hash of them if they are long."""
    read = {name for outer, name in chains if outer == owner}
    items = {
        str(key): description(item, str(key) if isinstance(key, Field) else owner, chains)
        for key, item in pairs
        if is_read(key, item, read)
    }
    kept = {key: item for key, item in items.items() if item is not None}
    if not kept:
        return None
    text = repr(kept)
    return kept if len(text) <= LONGEST else {"items": size, "hash": digest(text)}


def is_read(key: Any, item: Any, read: Collection[str]) -> bool:
    """Returns whether code reads an item of a container, as far as it can be known.

    Of an object, that is an attribute that it names; of a dict, a key that it names. If it names
    none, it may read all of them by a variable; texts are left out then.
    """
    if isinstance(key, Field):
        return key in read
    if not isinstance(key, str):
        return True
    keys = {name for name in read if not name.isidentifier()}
    unstable = ADDRESS.search(key) or "frozenset(" in key  # another text in each process
    return not unstable and (key in keys if keys else not isinstance(item, str))
