"""What a step minimizes: a loss, the variables that it moves, and the optimizer that moves them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

# The name of the objective of a run that has no other.
ONLY = "loss"


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
    place = {id(variable): position for position, variable in enumerate(variables)}
    objectives = []
    for name, optimizer in optimizers.items():
        if not hasattr(model, name):
            raise ValueError(
                f"`model` must have an attribute for each optimizer's name; got {name!r}, which "
                f"{type(model).__name__} has not. Its variables are the ones that this optimizer "
                "moves. Name the optimizers in build_optimizer() like the parts of the model."
            )
        part = getattr(model, name).trainable_variables
        objectives.append(Objective(name, optimizer, tuple(place[id(held)] for held in part)))
    check_partition(objectives, variables)
    return objectives


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
