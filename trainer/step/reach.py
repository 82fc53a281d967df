"""Finds every object that a trainer, a model or a function can reach.

The walk reads what Python objects hold: attributes, slots, containers, closures, default arguments,
partial functions, the owners of bound methods, and class attributes. It calls no property and no
method of a user, and it enters neither modules nor the inside of TensorFlow and Keras.
"""

import collections
import functools
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

# Types whose instances hold nothing; most attributes have one of them.
ATOMS = frozenset(
    [str, bytes, bytearray, int, float, bool, complex, type(None), type(Ellipsis), range, slice]
)
# Leaves of the walk: what they hold is their own matter.
LEAVES = (tf.Variable, keras.Variable, tf.Tensor, type, types.ModuleType, tf.distribute.Strategy)
# Classes of TensorFlow and Keras whose instances can hold variables. Other objects of these
# packages (graphs, datasets, symbolic tensors) are not entered.
HOLDERS = (
    tf.Module,
    tf.__internal__.tracking.AutoTrackable,
    tf.train.ExponentialMovingAverage,
    keras.Layer,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.losses.Loss,
    keras.initializers.Initializer,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    keras.random.SeedGenerator,
)
# Modules of Python whose classes are plain holders of attributes. Threads, files and locks of
# other modules are not entered.
PLAIN_MODULES = frozenset(["types", "collections", "argparse", "functools", "weakref"])
CLOSED_PACKAGES = (sys.stdlib_module_names - PLAIN_MODULES) | {
    "absl",
    "google",
    "keras",
    "ml_dtypes",
    "numpy",
    "tensorflow",
    "wrapt",
}
# Attributes in which Keras and TensorFlow keep records of their own.
RECORDS = ("_self_", "_tracker", "_inbound_nodes", "_outbound_nodes", "_obj_reference_counts_dict")


# Attributes with the functions of decorated methods.
WRAPPED = {property: ("fget", "fset"), staticmethod: ("__func__",), classmethod: ("__func__",)}
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
IN_SET = "{"  # begins the step of a path to an item of a set: the order may differ the next time


class Reached(NamedTuple):
    """An object, and where it was found."""

    path: str  # for example "teacher.layers[0].kernel"
    item: Any
    stable: bool  # whether the path is the same in every process: not if it leads through a set


def reach(roots: Mapping[str, Any]) -> Iterator[Reached]:
    """Yields every object that the roots reach, each once, the nearest first.

    An object whose class has the attribute `ends_reach = True` is not entered.

    Args:
        roots: objects of any type, keyed by the names with which paths begin.

    Example:
        >>> def counted(counter):
        ...     def loss(batch):
        ...         counter.assign_add(1.0)
        ...         return batch
        ...     return loss
        >>> loss = counted(tf.Variable(0.0))
        >>> [path for path, item, _ in reach({"loss": loss}) if isinstance(item, tf.Variable)]
        ['loss.closure.counter']
    """
    queue = collections.deque(Reached(name, root, True) for name, root in roots.items())
    seen: dict[int, Any] = {}  # holds the objects, so that no id is used again
    while queue:
        here = queue.popleft()
        if id(here.item) in seen:
            continue
        seen[id(here.item)] = here.item
        yield here
        found = [
            Reached(here.path + step, child, here.stable and not step.startswith(IN_SET))
            for step, child in children(here.item, seen)
            if type(child) not in ATOMS
        ]
        if issubclass(type(here.item), CONTAINERS):  # its items come next, as if it were not there
            queue.extendleft(reversed(found))
        else:
            queue.extend(found)


def children(item: Any, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yields what an object holds, each with the end of its path.

    Args:
        item: the object.
        seen: what the walk has visited; the object's class is added, so that it is read once.
    """
    try:
        if isinstance(item, LEAVES) or getattr(type(item), "ends_reach", False) is True:
            return
        yield from in_container(item)
        yield from in_callable(item)
        if isinstance(item, keras.metrics.Metric):
            yield ".variables", item.variables
        if isinstance(item, HOLDERS) or not in_closed_package(type(item)):
            yield from attributes(item)
            yield from in_class(type(item), seen)
    except Exception:  # noqa: BLE001  # an object that cannot even be looked at holds nothing
        return


def in_container(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields the items of a container."""
    if isinstance(item, Mapping):
        yield from in_mapping(item)
    elif isinstance(item, CONTAINERS):
        fields = getattr(type(item), "_fields", None) if isinstance(item, tuple) else None
        in_set = isinstance(item, (set, frozenset)) and len(item) > 1
        for place, value in enumerate(values_of(item)):
            if fields:
                yield f".{fields[place]}", value
            else:
                yield f"{IN_SET}{place}}}" if in_set else f"[{place}]", value
    elif isinstance(item, np.ndarray) and item.dtype == object:
        for place, value in enumerate(item.flat):
            yield f"[{place}]", value


def in_mapping(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values and the keys of a mapping."""
    for place, (key, value) in enumerate(items_of(item)):
        yield f"[{key!r}]" if isinstance(key, (str, int)) else f"[{place}]", value
        yield f"[key {place}]", key
    if isinstance(item, collections.defaultdict):
        yield ".default_factory", item.default_factory


def items_of(item: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the items of a mapping, without calling a method of a user's class."""
    if in_closed_package(type(item)) or type(item).__module__ in PLAIN_MODULES:
        yield from item.items()
    elif isinstance(item, dict):
        yield from dict.items(item)


def values_of(item: Any) -> Iterator[Any]:
    """Yields the items of a container, without calling a method of a user's class."""
    if in_closed_package(type(item)):
        yield from item
    else:
        bases = (list, tuple, collections.deque, set, frozenset)
        base: Any = next(base for base in bases if isinstance(item, base))
        yield from base.__iter__(item)


def in_callable(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a function or another callable holds."""
    if isinstance(item, types.FunctionType):
        yield from in_function(item)
    elif isinstance(item, (types.MethodType, types.BuiltinMethodType)):
        yield ".__self__", item.__self__
        yield ".__func__", getattr(item, "__func__", None)
    elif isinstance(item, functools.partial):
        yield ".func", item.func
        yield ".args", item.args
        yield ".keywords", item.keywords
    elif isinstance(item, weakref.ReferenceType):
        yield "()", item()
    elif isinstance(item, tf.types.experimental.ConcreteFunction):
        yield ".variables", item.variables
    elif isinstance(item, tf.types.experimental.PolymorphicFunction):
        yield "", item.python_function
    else:
        for name in WRAPPED.get(type(item), ()):
            yield f".{name}", getattr(item, name)


def in_function(item: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields a function's closure, default arguments and attributes."""
    for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=False):
        for contents in filled(cell):
            yield f".closure.{name}", contents
    yield ".defaults", item.__defaults__
    yield ".defaults", item.__kwdefaults__
    for name, value in vars(item).items():
        yield f".{name}", value


def filled(cell: Any) -> tuple[Any, ...]:
    """Returns the contents of a closure's cell, or () if nothing has been assigned to it."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields an object's attributes, from its `__dict__` and its slots."""
    try:
        own = object.__getattribute__(item, "__dict__")
    except AttributeError:
        own = {}
    for name, value in list(own.items()):
        if not name.startswith(RECORDS):
            yield f".{name}", value
    for cls in type(item).__mro__:
        for name, member in vars(cls).items() if "__slots__" in vars(cls) else ():
            if isinstance(member, types.MemberDescriptorType) and name != "__weakref__":
                try:
                    yield f".{name}", member.__get__(item)
                except AttributeError:  # nothing has been assigned to the slot
                    continue


def in_class(cls: type, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the class attributes and methods of a user's class, once."""
    for base in cls.__mro__:
        if id(base) in seen or in_closed_package(base):
            continue
        seen[id(base)] = base
        for name, value in list(vars(base).items()):
            yield f".{name}", value


def in_closed_package(cls: type) -> bool:
    """Returns whether a class belongs to a package whose objects are not entered."""
    return str(cls.__module__).partition(".")[0] in CLOSED_PACKAGES
