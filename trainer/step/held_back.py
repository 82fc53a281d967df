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

    Args:
        model: the model.
        others: what else the loss may draw random numbers from: generators and layers, in
            containers however deep.
    """
    if not isinstance(model, keras.Model):
        return []
    own = [*model.trainable_variables, *model.non_trainable_variables]
    known = {id(variable) for variable in own}
    beside: list[keras.Variable] = []
    for leaf in contents(others):
        if isinstance(leaf, keras.Layer) and leaf is not model:
            beside += leaf.non_trainable_variables
    beside = list({id(state): state for state in [*beside, *seed_states(others)]}.values())
    return own + [state for state in beside if id(state) not in known]


def seed_states(roots: Sequence[Any]) -> list[keras.Variable]:
    """Returns the states of Keras's seed generators in some containers and `tf.Module`s."""
    leaves = contents(roots)
    modules = [leaf for leaf in leaves if isinstance(leaf, tf.Module)]
    for module in modules:
        for inner in (module, *module.submodules):
            leaves += contents(vars(inner))
    found = [leaf.state for leaf in leaves if isinstance(leaf, keras.random.SeedGenerator)]
    return list({id(state): state for state in found}.values())


def contents(root: Any) -> list[Any]:
    """Returns what is in a container, however deep; anything else is in itself."""
    if isinstance(root, Mapping):
        root = list(root.values())
    if isinstance(root, (list, tuple, set)):
        return [leaf for item in root for leaf in contents(item)]
    return [root]
