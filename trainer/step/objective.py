"""What a step minimizes: a loss, the variables that it moves, and the optimizer that moves them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

# The name of the objective of a run that has no other: no attribute of a model is called so.
ONLY = ""


@dataclasses.dataclass(frozen=True)
class Objective:
    """One loss and what it trains."""

    name: str
    optimizer: keras.optimizers.Optimizer
    positions: tuple[int, ...]  # of its variables in `model.trainable_variables`


def objectives_of(
    model: Any, optimizers: keras.optimizers.Optimizer | Mapping[str, keras.optimizers.Optimizer]
) -> list[Objective]:
    """Returns who trains what: one optimizer everything, or several each a part of the model.

    Args:
        model: a `keras.Model` or `tf.Module`, built. With several optimizers it has one
            attribute of each one's name, a model or layer or module of its own.
        optimizers: one, or several by name.

    Raises:
        ValueError: if a variable would be trained by no optimizer, or by two.
    """
    variables = list(model.trainable_variables)
    if not isinstance(optimizers, Mapping):
        return [Objective(ONLY, optimizers, tuple(range(len(variables))))]
    objectives = [
        Objective(name, optimizer, positions_of_part(name, model))
        for name, optimizer in optimizers.items()
    ]
    check_partition(objectives, variables)
    return objectives


def positions_of_part(name: str, model: Any) -> tuple[int, ...]:
    """Returns where the variables of a part of a model stand in `model.trainable_variables`.

    Raises:
        ValueError: if there is no such part, or it has no trainable variables.
    """
    part = getattr(model, name, None)
    if not hasattr(part, "trainable_variables"):
        raise ValueError(
            f"`model` must have a part for each optimizer's name; got {name!r}, which is no model, "
            f"layer or module in {type(model).__name__}. Its variables are the ones that this "
            "optimizer moves. Name the optimizers in build_optimizer() like the parts."
        )
    held = {id(variable) for variable in getattr(part, "trainable_variables", ())}
    variables = enumerate(model.trainable_variables)
    positions = tuple(position for position, variable in variables if id(variable) in held)
    if not positions:
        raise ValueError(
            "`model` must have trainable variables in each optimizer's part; got none in "
            f"{name!r}. There is nothing to update. Set its trainable to True, or leave its "
            "optimizer out."
        )
    return positions


def check_partition(objectives: Sequence[Objective], variables: Sequence[Any]) -> None:
    """Raises ValueError unless every variable belongs to exactly one objective."""
    for position, variable in enumerate(variables):
        owners = [objective.name for objective in objectives if position in objective.positions]
        if len(owners) != 1:
            raise ValueError(
                f"`model` must have each trainable variable in one optimizer's part; got "
                f"{getattr(variable, 'path', variable.name)!r} in {owners or 'none'}. It would be "
                "updated twice, or never. Keep the parts apart, and name an optimizer for each."
            )
