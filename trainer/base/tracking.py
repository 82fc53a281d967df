"""Finds what TensorFlow and Keras track: the variables that a run owns, saves and restores.

Modules, layers, metrics and optimizers are entered, and lists, tuples and dicts in them. Other
Python objects, closures and classes are not.
"""

import collections
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from trainer.keras_compat import RECORDS, AutoTrackable

Variable: TypeAlias = keras.Variable | tf.Variable
# For each variable, the value of every replica's copy on this worker.
Copies: TypeAlias = list[list[tf.Tensor]]

# Classes whose attributes may be, or hold, variables.
HOLDERS = (
    tf.Module,
    AutoTrackable,
    keras.Layer,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.losses.Loss,
    keras.random.SeedGenerator,
)
LEAVES = (tf.Variable, keras.Variable, tf.Tensor)


def tracked(*roots: Any) -> Iterator[Any]:
    """Yields the objects that are tracked from some roots, the roots too, each once, nearest first.

    Args:
        roots: objects of any type. Those that cannot hold variables are yielded, and not entered.
    """
    queue = collections.deque(roots)
    seen: dict[int, Any] = {}  # holds the objects, so that no id is used again
    while queue:
        item = queue.popleft()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        yield item
        if isinstance(item, Mapping):  # the items of a container come next, in its place
            queue.extendleft(reversed(list(item.values())))
        elif isinstance(item, (list, tuple)):
            queue.extendleft(reversed(list(item)))
        elif isinstance(item, HOLDERS) and not isinstance(item, LEAVES):
            own = vars(item).items()
            queue.extend([value for name, value in own if not name.startswith(RECORDS)])
            if isinstance(item, keras.metrics.Metric):
                queue.extend(item.variables)


def tracked_variables(roots: Iterable[Any], but: Iterable[Variable] = ()) -> list[Variable]:
    """Returns the variables of TensorFlow and Keras that are tracked from some roots, each once.

    A `keras.Variable` and the `tf.Variable` that holds its value are one variable.

    Args:
        roots: objects of any type.
        but: variables to leave out.

    Example:
        >>> module = tf.Module()
        >>> module.counts = {"seen": tf.Variable(0, name="seen")}
        >>> [variable.name for variable in tracked_variables([module])]
        ['seen:0']
    """
    known = {id(tensorflow_variable(variable)) for variable in but}
    found: dict[int, Variable] = {}
    for item in tracked(*roots):
        if isinstance(item, (tf.Variable, keras.Variable)):
            key = id(tensorflow_variable(item))
            if key not in known and not isinstance(found.get(key), keras.Variable):
                found[key] = item
    return list(found.values())


def tensorflow_variable(variable: Variable) -> tf.Variable:
    """Returns the `tf.Variable` that holds a variable's value: for a `tf.Variable`, itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def name_of_variable(variable: Variable) -> str:
    """Returns the name of a variable, with the path of its layer if it has one."""
    return str(getattr(variable, "path", variable.name))


def leaves(root: Any, outer: tuple[Any, ...] = ()) -> list[Any]:
    """Returns the objects in nested containers; anything that is not a container is a leaf.

    Args:
        root: an object.
        outer: the containers in which it is. One that holds itself is not entered again.
    """
    kind = container_kind(root.__class__)
    if kind is None:
        return [root]
    if any(root is each for each in outer):
        return []
    found: list[Any] = []
    for item in root.values() if kind is Mapping else root:
        # Most items are leaves, and a call of this function for each takes most of the time.
        is_leaf = container_kind(item.__class__) is None
        found += [item] if is_leaf else leaves(item, (*outer, root))
    return found


@functools.cache
def container_kind(cls: type) -> type | None:
    """Returns `Mapping` or `Sequence` for a class of containers; asking objects takes longer."""
    if issubclass(cls, Mapping):
        return Mapping
    return Sequence if issubclass(cls, (list, tuple, set)) else None


def with_held(root: Any, kind: type) -> list[Any]:
    """Returns an object and the objects of a kind that it holds in attributes, at any depth."""
    found: dict[int, Any] = {}
    waiting = [root]
    while waiting:
        one = waiting.pop(0)
        if id(one) not in found:
            found[id(one)] = one
            waiting += [item for item in leaves(vars(one)) if isinstance(item, kind)]
    return list(found.values())


def read_copies(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> Copies:
    """Returns the values of all replicas' copies. Call it in cross-replica context."""
    return [[copy.read_value() for copy in copies_of(variable, strategy)] for variable in variables]


def write_copies(
    variables: Sequence[Any], values: Copies, strategy: tf.distribute.Strategy
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


def copies_of(variable: Any, strategy: tf.distribute.Strategy) -> tuple[tf.Variable, ...]:
    """Returns every replica's copy of a variable on this worker."""
    copies: tuple[tf.Variable, ...] = strategy.experimental_local_results(
        tensorflow_variable(variable)
    )
    return copies
