"""Holds back what a Keras model assigns in its forward pass until the verdict is known."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer.step.types import Model


class HoldBack(keras.StatelessScope):
    """A scope in which Keras variables have given values, and assignments are only recorded."""

    def __init__(self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> None:
        """Stores the value that each variable has inside the scope."""
        super().__init__(list(zip(variables, values, strict=True)), collect_losses=True)
        self._known = {id(variable) for variable in variables}
        self._unknown: list[keras.Variable] = []

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Records an assignment. Keras calls this method."""
        if id(update[0]) not in self._known:
            self._unknown.append(update[0])
        super().add_update(update)

    def check_no_unknown_variables(self) -> None:
        """Raises ValueError if other variables were assigned: their values would be lost."""
        for variable in self._unknown:
            raise ValueError(
                "`compute_loss` must not assign Keras variables other than those of the model and "
                f"its layers; got an assignment to {variable.path!r}. The new value would be lost, "
                "and a random generator would repeat its numbers in every step. For random "
                "numbers, pass a keras.random.SeedGenerator that the model or the trainer holds "
                "as seed=. Update metrics in update_metrics()."
            )


def held_back_variables(model: Model, others: Sequence[Any] = ()) -> list[keras.Variable]:
    """Returns the variables that a Keras model computes with, its weights first.

    Seed generators are not included: see `randomness.seed_states`. For a `tf.Module` the list is
    empty.

    Args:
        model: the model.
        others: other layers that the loss may call, in nested containers.
    """
    if not isinstance(model, keras.Model):
        return []
    found = [*model.trainable_variables, *model.non_trainable_variables]
    for leaf in leaves(others):
        if isinstance(leaf, keras.Layer) and leaf is not model:
            found += leaf.non_trainable_variables
    once = {id(variable): variable for variable in found if not is_seed_state(variable)}
    return list(once.values())


def is_seed_state(variable: keras.Variable) -> bool:
    """Returns whether a variable is the state of a seed generator."""
    return str(variable.name) == "seed_generator_state"


def leaves(root: Any) -> list[Any]:
    """Returns the objects in nested containers; anything that is not a container is a leaf."""
    if isinstance(root, Mapping):
        root = list(root.values())
    if isinstance(root, (list, tuple, set)):
        return [leaf for item in root for leaf in leaves(item)]
    return [root]
