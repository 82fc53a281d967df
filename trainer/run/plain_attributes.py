"""The values that a step may have read while it was traced: numbers, flags, names, functions.

They may be in lists, dicts, arrays, dataclasses, namespaces and objects of the user's own classes,
and in the module or the closure of a function. What a call of a layer or of a trainer's method
assigns itself is left out: it counts something, such as its calls.
"""

import argparse
import dataclasses
import enum
import functools
import math
import sys
import types
import zlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias, cast

import keras
import numpy as np
import tensorflow as tf
from absl import flags

from trainer.base.describe import HALFSTEP, describe, describe_object, package_of
from trainer.config.attributes import TRACED_METHODS
from trainer.run.names_read import (
    FRAMEWORKS,
    functions_added,
    names_loaded,
    reads_of,
    values_outside,
)

PACKAGE = f"{__name__.partition('.')[0]}."  # our own classes assign what they read themselves
OUTSIDE = "outside: "  # before a function and the name of a value that it reads, as in "f:FACTOR"
LONG = 1000  # of a container with more items, about so many are compared
LARGE = 10**6  # the same for the elements of an array
# Modules, classes and objects of these packages are not looked into.
LIBRARIES = {*FRAMEWORKS, *sys.stdlib_module_names, *HALFSTEP, "absl"} - {"__main__"}
PENALTIES = keras.regularizers.Regularizer, keras.constraints.Constraint
DESCRIBED = keras.losses.Loss, *PENALTIES  # objects that are looked into by their configurations
# The methods that are traced; they may call others.
OF_LAYERS = ("call", "compute_mask")

Part: TypeAlias = tuple[type, tuple[str, ...]]  # see `read_by`


class Object:
    """Stands for an object in comparisons: two are equal if they hold the same object.

    Args:
        value: a function or a tensor, whose content does not change; None for any other object.
    """

    def __init__(self, value: Any = None) -> None:
        """Holds the object, so that no other can have its place in memory."""
        self.value = value

    def __eq__(self, other: object) -> bool:
        """Returns whether both stand for the same object."""
        return isinstance(other, Object) and other.value is self.value

    def __hash__(self) -> int:
        """Returns the hash of the object's identity."""
        return hash(id(self.value))


OTHER = Object()


class Field(str):
    """The name of an attribute in a snapshot, as opposed to a key."""

    __slots__ = ()


def plain(value: Any) -> Any:
    """Returns a number, flag or text of NumPy as one of Python, and any other value as it is.

    NaN is always the same object, so that it does not differ from itself in a dict.
    """
    found = value.item() if isinstance(value, np.generic) else value
    return math.nan if isinstance(found, float) and math.isnan(found) else found


def plain_attributes(owner: object, kinds: tuple[type, ...]) -> dict[str, Any]:
    """Returns the public attributes of an object that are of some types.

    Args:
        owner: a layer, a module or an optimizer.
        kinds: the types.
    """
    found = {
        name: plain(value)
        for name, value in vars(owner).items()
        if (type(value) in kinds or isinstance(value, np.generic))
        and not name.startswith("_")
        and name not in ("built", "trainable", "stop_training")
    }
    return {name: value for name, value in found.items() if type(value) in kinds}


def attributes_of_layer(layer: object) -> dict[str, Any]:
    """Returns the numbers and names on which a layer's computation depends.

    These are its flags and fractions, the numbers of its regularizers and constraints, and the
    other numbers, names and functions that its calls read.
    """
    parts = {
        f"{name}.{field}": value
        for name, part in vars(layer).items()
        if isinstance(part, PENALTIES)
        for field, value in plain_attributes(part, (float, int, bool)).items()
    }
    own = plain_attributes(layer, (float, bool))
    return own | parts | read_by(layer, keras.Layer, OF_LAYERS)


def attributes_of_trainer(trainer: object) -> dict[str, Any]:
    """Returns what the traced methods of a trainer's subclass read, and the losses' settings."""
    settings = {}
    for place, loss in enumerate(losses_of(trainer)):
        numbers = snapshot(describe(loss)) if isinstance(loss, keras.losses.Loss) else None
        settings[f"loss_fn {place}"] = numbers, read_by(*owner_of_loss(loss))
    settings = {name: each for name, each in settings.items() if each != (None, {})}
    return read_by(trainer, base_of(trainer), TRACED_METHODS) | settings


def owner_of_loss(loss: Any) -> tuple[Any, type, tuple[str, ...]]:
    """Returns the object whose methods compute a loss, its base class, and their names."""
    if isinstance(loss, types.MethodType):
        return loss.__self__, object, (loss.__name__,)
    if isinstance(loss, keras.losses.Loss):
        return loss, keras.losses.Loss, ("call", "__call__")
    return loss, object, ("__call__",)


def base_of(trainer: object) -> type:
    """Returns the class of ours that a trainer's class is derived from."""
    return next(cls for cls in type(trainer).__mro__ if cls.__module__.startswith(PACKAGE))


def losses_of(trainer: object) -> list[Any]:
    """Returns a trainer's losses: objects and functions."""
    given = getattr(trainer, "_loss_fn", None)
    losses: list[Any] = tf.nest.flatten(getattr(given, "losses", given))
    return losses


def functions_of_trainer(trainer: object) -> list[types.FunctionType]:
    """Returns the user's functions that a trainer's traced methods and its losses run."""
    found = functions_added([trainer], base_of(trainer), TRACED_METHODS)
    for owner, base, methods in map(owner_of_loss, losses_of(trainer)):
        found += functions_added([owner], base, methods)
    return found


def read_outside(functions: Iterable[types.FunctionType]) -> dict[str, Any]:
    """Returns the values that traced functions read of their modules and closures, by name."""
    return known(
        {
            f"{OUTSIDE}{function.__module__}.{function.__qualname__}:{name}": snapshot(
                value, names=names_loaded(function)
            )
            for function in functions
            for name, value in values_outside(function).items()
        }
    )


def read_by(owner: object, base: type, methods: tuple[str, ...]) -> dict[str, Any]:
    """Returns the values that an object's methods read and do not change, by name.

    Those of its classes are among them.

    Args:
        owner: the object.
        base: the class to whose methods its class has added others.
        methods: the names of the methods; what they call is looked at, too.
    """
    cls = type(owner)
    # Classes can be hashed, and mypy takes the method that hashes their objects for that.
    names, loaded, _ = reads_of(cast("Any", cls), base, methods)
    found: dict[str, Any] = {}
    if not names:
        return found
    for part in (*(each for each in reversed(cls.__mro__) if each not in base.__mro__), owner):
        values = {name: vars(part)[name] for name in names & vars(part).keys()}
        if part is not owner:  # whose functions are methods
            values = {k: v for k, v in values.items() if type(v) is not types.FunctionType}
        found |= known({name: snapshot(value, names=loaded) for name, value in values.items()})
    return found


def known(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that say something."""
    return {name: value for name, value in values.items() if value is not OTHER}


def snapshot(value: Any, depth: int = 4, names: frozenset[str] = frozenset()) -> Any:
    """Returns what is compared of a value: itself, or the numbers, flags and texts in it.

    Args:
        value: any value.
        depth: how many containers inside each other are looked into.
        names: the attributes that are looked at in modules, in classes of the user's own, and in
            their objects.

    Returns:
        A value that does not change with the given one; `OTHER` for an object that tells nothing.

    Example:
        >>> weights = {"a": 1.0, "b": [2, None]}
        >>> before = snapshot(weights)
        >>> weights["b"][0] = 3
        >>> snapshot(weights) == before
        False
    """
    value = plain(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or type(value) in (float, bool, int, str, bytes):
        return value
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, hash_of(value)
    if type(value) is types.FunctionType or is_eager(value):
        return Object(value)
    return content_of(value, depth - 1, names) if depth else OTHER


def content_of(value: Any, depth: int, names: frozenset[str]) -> Any:
    """Returns what is compared of a container; `OTHER` for any other object; see `snapshot`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        pairs: list[tuple[Any, Any]] = [
            (Field(name), getattr(value, name, None)) for name in fields
        ]
    elif isinstance(value, types.SimpleNamespace | argparse.Namespace):
        pairs = [(Field(name), item) for name, item in vars(value).items()]
    elif isinstance(value, Mapping):
        pairs = [(repr(plain(key)), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    elif isinstance(value, AbstractSet):
        pairs = list(enumerate(sorted(map(repr, value))))
    elif isinstance(value, functools.partial):
        pairs = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif isinstance(value, DESCRIBED):
        pairs = list(describe_object(value).items())
    else:
        pairs = attributes_named(value, names)
        if not pairs:
            return OTHER
    some = pairs[:: 1 + len(pairs) // LONG]
    return len(pairs), tuple((key, snapshot(item, depth, names)) for key, item in some)


def attributes_named(value: Any, names: frozenset[str]) -> list[tuple[str, Any]]:
    """Returns the attributes of an object of the user's, of a class or of a module, by name.

    Those of a class are among those of its objects. Absl's flags are attributes, too.
    """
    if isinstance(value, flags.FlagValues):
        return [(Field(name), value[name].value) for name in sorted(names) if name in value]
    if isinstance(value, types.ModuleType):
        held = {} if package_of(value) in LIBRARIES else dict(vars(value))
    else:
        cls = value if isinstance(value, type) else type(value)
        if is_of_library(cast("Any", cls)):
            return []
        held = {k: item for each in reversed(cls.__mro__[:-1]) for k, item in vars(each).items()}
        held = {name: item for name, item in held.items() if not hasattr(item, "__get__")}
        held |= {} if value is cls else getattr(value, "__dict__", {})
    return [(Field(name), held[name]) for name in sorted(names & held.keys())]


@functools.cache
def is_of_library(cls: type) -> bool:
    """Returns whether a class is not the user's own, or is derived from one of a framework."""
    of_framework = set(map(package_of, cls.__mro__[:-1])) & {*FRAMEWORKS, *HALFSTEP}
    return bool(of_framework) or package_of(cls) in LIBRARIES


def is_eager(value: Any) -> bool:
    """Returns whether a value is a tensor that has a value, which a graph holds as a constant."""
    return isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value)


def hash_of(array: np.ndarray) -> int:
    """Returns a checksum of an array's elements, or of some of them if there are very many."""
    rows = array.reshape(-1)[:: 1 + array.size // LARGE]
    return zlib.crc32(np.ascontiguousarray(rows).tobytes()) if array.dtype.kind != "O" else 0
