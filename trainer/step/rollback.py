"""Rolls back a skipped step: restores variables whose assignments could not be held back.

What a Keras model assigns is held back until the verdict is known. A `tf.Module` assigns its
variables itself, and so does a loss that writes to other variables or draws from a
`tf.random.Generator`. Their values are read before the step and written back if it is skipped, for
each replica's copy separately, because copies may differ.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from trainer.base.tracking import tensorflow_variable
from trainer.step.trace import ByHandle
from trainer.step.types import Variable

# For each variable, the value of every replica's copy on this worker.
Copies: TypeAlias = list[list[tf.Tensor]]


class Before(NamedTuple):
    """What forward and backward passes write themselves, with the values from before the step."""

    variables: list[Variable | ByHandle]
    copies: Copies


def read_copies(
    variables: Sequence[Variable | ByHandle], strategy: tf.distribute.Strategy
) -> Copies:
    """Returns the values of all replicas' copies. Call it in cross-replica context."""
    return [[copy.read_value() for copy in copies_of(variable, strategy)] for variable in variables]


def write_copies(
    variables: Sequence[Variable | ByHandle], values: Copies, strategy: tf.distribute.Strategy
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


def copies_of(
    variable: Variable | ByHandle, strategy: tf.distribute.Strategy
) -> tuple[tf.Variable, ...]:
    """Returns every replica's copy of a variable on this worker."""
    copies: tuple[tf.Variable, ...] = strategy.experimental_local_results(
        tensorflow_variable(variable)
    )
    return copies
