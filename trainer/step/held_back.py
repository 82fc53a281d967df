"""What Keras writes in a forward pass, held back until the verdict is known."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf


class HoldBack(keras.StatelessScope):
    """Within, Keras's variables have the values they are given, and writes are kept apart."""

    def __init__(self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> None:
        """Takes a value for each variable."""
        super().__init__(list(zip(variables, values, strict=True)), collect_losses=True)
        self._known = {id(variable) for variable in variables}
        self._unknown: list[keras.Variable] = []

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Called by Keras for each assignment."""
        if id(update[0]) not in self._known:
            self._unknown.append(update[0])
        super().add_update(update)

    def check_all_known(self) -> None:
        """Raises ValueError if something else was written: it would be lost without a word."""
        for variable in self._unknown:
            raise ValueError(
                "`compute_loss` must write no Keras variable but the model's; got "
                f"{variable.path!r}, written in the forward pass. It would not be kept: a random "
                "number would repeat in every step. Draw with seed=, from a "
                "keras.random.SeedGenerator that the model or the trainer holds; update metrics in "
                "update_metrics()."
            )


def held_back_variables(model: Any, others: Sequence[Any] = ()) -> list[keras.Variable]:
    """Returns what a Keras model computes with, its weights first; nothing for a `tf.Module`.

    Seed generators are not among it: see `randomness.seed_states`.

    Args:
        model: the model.
        others: what else the loss may call: layers, in containers however deep.
    """
    if not isinstance(model, keras.Model):
        return []
    found = [*model.trainable_variables, *model.non_trainable_variables]
    for leaf in contents(others):
        if isinstance(leaf, keras.Layer) and leaf is not model:
            found += leaf.non_trainable_variables
    once = {id(variable): variable for variable in found if not is_seed_state(variable)}
    return list(once.values())


def is_seed_state(variable: keras.Variable) -> bool:
    """Returns whether a variable is the state of a seed generator."""
    return variable.name == "seed_generator_state"


def contents(root: Any) -> list[Any]:
    """Returns what is in a container, however deep; anything else is in itself."""
    if isinstance(root, Mapping):
        root = list(root.values())
    if isinstance(root, (list, tuple, set)):
        return [leaf for item in root for leaf in contents(item)]
    return [root]
