"""The objectives of a step: each has a loss, an optimizer, and the variables that it trains."""

import dataclasses
from collections.abc import Mapping

import keras

from trainer.base.tracking import name_of_variable, with_held
from trainer.keras_compat import MultiOptimizer
from trainer.step.types import Model

# The objective's name if there is only one optimizer. No model attribute can have this name.
ONLY = ""


@dataclasses.dataclass(frozen=True)
class Objective:
    """One loss, the variables that it trains, and the optimizer that updates them."""

    name: str
    optimizer: keras.optimizers.Optimizer
    positions: tuple[int, ...]  # positions of the variables in `model.trainable_variables`
    updates: int = 1  # number of updates in each step; more than 1 only if optimizers alternate

    @property
    def updating(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers that update the variables, once built; see `single_optimizers`."""
        return [one for one in single_optimizers(self.optimizer) if one.built]


def single_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns the inner optimizers of a `MultiOptimizer`; of another optimizer, itself."""
    if isinstance(optimizer, MultiOptimizer):
        return list(optimizer.optimizers)
    return [optimizer]


def optimizers_in(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns an optimizer and those that it holds, at any depth.

    A wrapper, such as Lookahead, calls the `apply` of an optimizer that it keeps in an attribute. A
    `MultiOptimizer` has a list of them.
    """
    return with_held(optimizer, keras.optimizers.Optimizer)


def objectives_of(
    model: Model,
    optimizers: keras.optimizers.Optimizer | Mapping[str, keras.optimizers.Optimizer],
    updates_per_step: Mapping[str, int] | None = None,
) -> list[Objective]:
    """Returns one objective for each optimizer.

    A single optimizer trains all variables. Each of several optimizers trains one part of the
    model: the attribute that has the optimizer's name. A part that was trained before and is frozen
    now has no objective.

    Args:
        model: a built `keras.Model` or `tf.Module`. Its parts are models, layers or modules.
        optimizers: one optimizer, or a dict of optimizers, keyed by the name of the part.
        updates_per_step: number of updates in each step, keyed by name; 1 for other names.

    Raises:
        ValueError: if a variable belongs to no optimizer or to more than one, if a part does not
            exist or has no trainable variables, or if `updates_per_step` has another name.
    """
    variables = list(model.trainable_variables)
    names = list(optimizers) if isinstance(optimizers, Mapping) else []
    for name in updates_per_step or {}:
        if name not in names:
            raise ValueError(
                f"`updates_per_step` must be keyed by names of optimizers, {names}; got {name!r}"
            )
    if not isinstance(optimizers, Mapping):
        return [Objective(ONLY, optimizers, tuple(range(len(variables))))]
    objectives = [
        Objective(
            name, optimizer, positions_of_part(name, model), (updates_per_step or {}).get(name, 1)
        )
        for name, optimizer in optimizers.items()
        if not (optimizer.built and is_frozen(getattr(model, name, None)))
    ]
    for position, variable in enumerate(variables):
        owners = [objective.name for objective in objectives if position in objective.positions]
        if len(owners) != 1:
            raise ValueError(
                "`model` must have each trainable variable in one optimizer's part; got "
                f"{name_of_variable(variable)!r} in {owners}"
            )
    return objectives


def is_frozen(part: object) -> bool:
    """Returns whether a part of a model has variables, and none to train."""
    has_variables = bool(getattr(part, "variables", ()))
    return has_variables and not getattr(part, "trainable_variables", ())


def positions_of_part(name: str, model: Model) -> tuple[int, ...]:
    """Returns the positions of a part's variables in `model.trainable_variables`.

    Raises:
        ValueError: if there is no such part, or it has no trainable variables.
    """
    held = {id(each) for each in getattr(getattr(model, name, None), "trainable_variables", ())}
    variables = enumerate(model.trainable_variables)
    positions = tuple(position for position, variable in variables if id(variable) in held)
    if not positions:
        raise ValueError(
            f"`model` must have a part with trainable variables for each optimizer; got {name!r}"
        )
    return positions
