"""Rolls back a skipped step: restores variables whose assignments could not be held back.

What a Keras model assigns is held back until the verdict is known. A `tf.Module` assigns its
variables itself, and the loss can reach other `tf.Variable`s and `tf.random.Generator`s. Their
values are read before the step and written back if it is skipped, for each replica's copy
separately, because copies may differ.
"""

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from trainer.step.held_back import tensorflow_variable
from trainer.step.reach import reach
from trainer.step.types import Variable

# For each variable, the value of every replica's copy on this worker.
Copies: TypeAlias = list[list[tf.Tensor]]


def variables_in_reach(roots: Collection[Any], held_back: Collection[Variable]) -> list[Variable]:
    """Returns the TensorFlow and Keras variables that the given objects reach, each once.

    Args:
        roots: objects of any type; see `reach`.
        held_back: variables to leave out.
    """
    known = {id(tensorflow_variable(variable)) for variable in held_back}
    found: dict[int, Variable] = {}
    for _, item, _ in reach({str(place): root for place, root in enumerate(roots)}):
        if isinstance(item, (tf.Variable, keras.Variable)):
            key = id(tensorflow_variable(item))
            # A keras.Variable and the tf.Variable that holds its value are one variable.
            if key not in known and not isinstance(found.get(key), keras.Variable):
                found[key] = item
    return list(found.values())


def read_copies(variables: Sequence[Variable], strategy: tf.distribute.Strategy) -> Copies:
    """Returns the values of all replicas' copies. Call it in cross-replica context."""
    return [[copy.read_value() for copy in copies_of(variable, strategy)] for variable in variables]


def write_copies(
    variables: Sequence[Variable], values: Copies, strategy: tf.distribute.Strategy
) -> bool:
    """Writes back what `read_copies` returned, bit for bit. Call it in cross-replica context.

    Returns:
        True, because both branches of a `tf.cond` must return the same type.
    """
    for variable, old in zip(variables, values, strict=True):
        # Assign each copy separately: assigning all at once would average the values, and after
        # rounding the mean of three equal numbers is not always that number.
        for copy, value in zip(copies_of(variable, strategy), old, strict=True):
            copy.assign(value)
    return True


def copies_of(variable: Variable, strategy: tf.distribute.Strategy) -> tuple[tf.Variable, ...]:
    """Returns every replica's copy of a variable on this worker."""
    copies: tuple[tf.Variable, ...] = strategy.experimental_local_results(
        tensorflow_variable(variable)
    )
    return copies
