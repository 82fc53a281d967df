"""Moving averages of the weights (EMA): each applied update moves them.

Optimizers hold them (`use_ema`), so checkpoints of Keras's optimizers have them, too. They are
updated here and not by Keras, which overwrites weights (`ema_overwrite_frequency`) inside a `cond`,
where replicas cannot exchange anything, and those of frozen layers too; which fails at variables
that have no average, as float8 scales; and which an optimizer with an `apply` of its own may never
ask to.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer.base.tracking import tensorflow_variable
from trainer.keras_compat import built_for
from trainer.step.objective import single_optimizers
from trainer.step.types import Variable


def average_weights(optimizers: Iterable[keras.optimizers.Optimizer]) -> bool:
    """Returns whether all of a run's optimizers keep moving averages of what they update."""
    updating = [one for each in optimizers for one in single_optimizers(each) if one.built]
    return bool(updating) and all(one.use_ema for one in updating)


def averages_of(optimizer: keras.optimizers.Optimizer) -> list[tuple[Variable, keras.Variable]]:
    """Returns pairs (weight, its moving average) of an optimizer; none without `use_ema`."""
    if not optimizer.use_ema:
        return []
    # Keras makes one for each variable, before the slots, but for those that are no weights.
    weights = [
        variable
        for variable in built_for(optimizer)
        if not getattr(variable, "overwrite_with_gradient", False)
    ]
    averages = [one for one in optimizer.variables if one.name.endswith("_average")]
    return list(zip(weights, averages[: len(weights)], strict=True))


@contextlib.contextmanager
def updating_averages(
    optimizer: keras.optimizers.Optimizer,
    trained: Sequence[Variable],
    strategy: tf.distribute.Strategy,
) -> Iterator[None]:
    """Context manager: `optimizer.apply` updates the averages as Keras's would, and on replicas.

    As in Keras, they are of the weights before constraints, which are applied last.

    Args:
        optimizer: an optimizer; without averages, nothing changes.
        trained: the variables that are trained now. Only these are overwritten.
        strategy: the strategy under which `apply` is called, in replica context.
    """
    averages = averages_of(optimizer)
    if not averages:
        yield
        return
    apply, patched = optimizer.apply, vars(optimizer).get("apply")
    known = {id(variable) for variable in trained}
    keras_weights = [weight for weight, _ in averages if isinstance(weight, keras.Variable)]
    constrained = [(weight, weight.constraint) for weight in keras_weights if weight.constraint]

    def apply_and_average(grads: Any, trainable_variables: Any = None) -> None:
        count = tf.convert_to_tensor(optimizer.iterations)
        apply(grads, trainable_variables)
        for weight, average in averages:
            update_average(average, tensorflow_variable(weight), count, optimizer.ema_momentum)
        if frequency := optimizer.ema_overwrite_frequency:
            overwrite(averages, known, (count + 1) % frequency == 0, strategy)
        updated = {id(variable) for variable in trainable_variables or trained}
        for weight, constraint in constrained:
            if id(weight) in updated:
                weight.assign(constraint(weight))

    optimizer.apply, optimizer.use_ema = apply_and_average, False
    for weight, _ in constrained:
        weight.constraint = None
    try:
        yield
    finally:
        del optimizer.apply
        optimizer.use_ema = True
        for weight, constraint in constrained:
            weight.constraint = constraint
        if patched is not None:
            optimizer.apply = patched


def update_average(
    average: keras.Variable, weight: tf.Variable, count: tf.Tensor, momentum: float
) -> None:
    """Moves an average towards its weight; the first update makes it the weight.

    Args:
        average: the average.
        weight: the weight after the update.
        count: number of updates before this one: shape (), integer.
        momentum: what the average keeps of itself, from 0 to 1.
    """
    kept = tf.cast(count != 0, weight.dtype) * momentum
    average.assign(kept * average.value + (1 - kept) * weight)


def overwrite(
    averages: Sequence[tuple[Variable, keras.Variable]],
    known: set[int],
    due: tf.Tensor,
    strategy: tf.distribute.Strategy,
) -> None:
    """Overwrites weights with their averages if it is due, those whose ids are known.

    Without a branch, in which replicas could not exchange anything: each is assigned the average or
    itself.
    """
    for weight, average in averages:
        if id(weight) in known:
            assign_on_devices(weight, strategy, assign_if, average.value, due)


def assign_averages(
    optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy
) -> None:
    """Overwrites an optimizer's weights with their moving averages, those of frozen weights too."""
    for weight, average in averages_of(optimizer):
        assign_on_devices(weight, strategy, assign, average.value)


def assign_on_devices(
    variable: Variable,
    strategy: tf.distribute.Strategy,
    assign: Callable[..., None],
    *values: tf.Tensor,
) -> None:
    """Calls `assign(copy, *values)` for each copy of a variable, on its device."""
    strategy.extended.update(tensorflow_variable(variable), assign, args=values)


def assign(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns a value."""
    variable.assign(value)


def assign_if(variable: tf.Variable, value: tf.Tensor, due: tf.Tensor) -> None:
    """Assigns a value if it is due, and otherwise the variable's own."""
    variable.assign(tf.where(due, value, variable))
