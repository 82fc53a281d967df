"""What a skipped step must put back: the variables that nobody could hold back beforehand.

A Keras model's own writes are held back until the verdict is known. A `tf.Module` writes
its variables itself, and so does a `tf.Variable` or a `tf.random.Generator` anywhere in
reach of the loss. Their values are read before the step and written back if it is skipped:
every replica's own, since copies may differ.
"""

from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer.step.held_back import contents

Copies = list[list[tf.Tensor]]


def variables_in_reach(roots: Collection[Any], held_back: Collection[Any]) -> list[Any]:
    """Returns the variables under some objects, of TensorFlow or of Keras, each once.

    Args:
        roots: models, modules, variables, containers of them; anything else is ignored.
        held_back: variables to leave out.
    """
    holder = tf.Module()
    for place, root in enumerate(contents(roots)):
        setattr(holder, f"root_{place}", root)  # which ignores what has no variables
    nodes = tf.train.TrackableView(holder).descendants()
    found = {id(node): node for node in nodes if isinstance(node, (tf.Variable, keras.Variable))}
    known = {id(variable) for variable in held_back}
    return [variable for key, variable in found.items() if key not in known]


def read_copies(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> Copies:
    """Returns the values of every replica's copy. Call it in cross-replica context."""
    return [[copy.read_value() for copy in copies_of(variable, strategy)] for variable in variables]


def write_copies(
    variables: Sequence[Any], values: Copies, strategy: tf.distribute.Strategy
) -> bool:
    """Writes back what `read_copies` returned, bit for bit; returns True.

    Call it in cross-replica context.
    """
    for variable, old in zip(variables, values, strict=True):
        # Copy by copy: an assignment to all of them at once would be aggregated, and at three
        # replicas the mean of three equal numbers need not be that number.
        for copy, value in zip(copies_of(variable, strategy), old, strict=True):
            copy.assign(value)
    return True


def copies_of(variable: Any, strategy: tf.distribute.Strategy) -> tuple[tf.Variable, ...]:
    """Returns every replica's copy of a variable on this worker."""
    return strategy.experimental_local_results(tensorflow_variable(variable))


def tensorflow_variable(variable: Any) -> Any:
    """Returns the variable of TensorFlow that a variable of Keras keeps its value in."""
    return variable.value if isinstance(variable, keras.Variable) else variable
