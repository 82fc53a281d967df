"""The attributes that a step may have read while it was traced: numbers, flags, names, functions.

What a call of a layer or of a trainer's method assigns itself is left out: it counts something,
such as its calls.
"""

import collections
import dis
import functools
import inspect
import math
import types
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import keras
import numpy as np

from trainer.config.attributes import TRACED_METHODS

PACKAGE = f"{__name__.partition('.')[0]}."  # our own classes assign what they read themselves
# The methods that are traced; they may call others.
OF_LAYERS = ("call", "compute_mask")


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
    values = {name: plain(value) for name, value in vars(owner).items()}
    return {
        name: value
        for name, value in values.items()
        if type(value) in kinds
        and not name.startswith("_")
        and name not in ("built", "trainable", "stop_training")
    }


def attributes_of_layer(layer: object) -> dict[str, Any]:
    """Returns a layer's flags and fractions, the numbers of its regularizers and constraints, and
    the other numbers, names and functions that its calls read.
    """
    parts = {
        f"{name}.{field}": value
        for name, part in vars(layer).items()
        if isinstance(part, keras.regularizers.Regularizer | keras.constraints.Constraint)
        for field, value in plain_attributes(part, (float, int, bool)).items()
    }
    own = plain_attributes(layer, (float, bool))
    return own | parts | read_by(layer, keras.Layer, OF_LAYERS)


def attributes_of_trainer(trainer: object) -> dict[str, Any]:
    """Returns the plain attributes that the traced methods of a trainer's subclass read."""
    base = next(cls for cls in type(trainer).__mro__ if cls.__module__.startswith(PACKAGE))
    return read_by(trainer, base, TRACED_METHODS)


def read_by(owner: object, base: type, methods: tuple[str, ...]) -> dict[str, Any]:
    """Returns the plain attributes that an object's methods read and do not assign, by name.

    Those of its classes are among them.

    Args:
        owner: the object.
        base: the class to whose methods its class has added others.
        methods: the names of the methods; what they call is looked at, too.
    """
    cls = type(owner)
    # Classes can be hashed, and mypy takes the method that hashes their objects for that.
    names = names_read(cast("Any", cls), base, methods)
    found: dict[str, Any] = {}
    if not names:
        return found
    for part in (*(each for each in reversed(cls.__mro__) if each not in base.__mro__), owner):
        kinds = (float, bool, int, str, *([types.FunctionType] if part is owner else []))
        values = {name: plain(vars(part)[name]) for name in names & vars(part).keys()}
        found |= {name: value for name, value in values.items() if type(value) in kinds}
    return found


@functools.cache
def names_read(cls: type, base: type, methods: tuple[str, ...]) -> frozenset[str]:
    """Returns the names of the attributes that methods read and do not assign; see `read_by`."""
    own: dict[str, list[types.FunctionType]] = collections.defaultdict(list)
    added = (
        [each for each in cls.__mro__ if each not in base.__mro__] if base in cls.__mro__ else []
    )
    for owner in added:
        for name, method in vars(owner).items():
            if isinstance(function := plain_function(method), types.FunctionType):
                own[name].append(function)  # a method may call the one that it overrides
    read: set[str] = set()
    assigned: set[str] = set()
    todo, seen = [*methods], set()
    while todo:
        name = todo.pop()
        if name in seen or name not in own:
            continue
        seen.add(name)
        for used in (names_used(each.__code__) for each in own[name]):
            read |= used.of_self
            assigned |= used.assigned
            todo += used.loaded
    hidden = "_" if cls.__module__.startswith("keras.") else " "  # Keras's own state
    return frozenset(name for name in read - assigned if not name.startswith(hidden))


def plain_function(method: Any) -> Any:
    """Returns the function in a property, a class method, a `tf.function` or a decorated method."""
    for wrapper in ("fget", "__func__", "python_function"):
        method = getattr(method, wrapper, method)
    return inspect.unwrap(method) if callable(method) else method


class NamesUsed(NamedTuple):
    """The names of attributes in the code of a method, and of the functions defined in it."""

    loaded: set[str]  # of any object; they may be methods
    of_self: set[str]  # those of the method's own object
    assigned: set[str]  # to any object


def names_used(code: types.CodeType) -> NamesUsed:
    """Returns the names of the attributes that a method's code uses."""
    used = NamesUsed(set(), set(), set())
    owner = code.co_varnames[0] if code.co_argcount else None
    for part in parts_of(code):
        before = None  # the local variable that the instruction before has loaded
        for instruction in dis.get_instructions(part):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                used.loaded.add(instruction.argval)
                if before == owner:
                    used.of_self.add(instruction.argval)
            elif instruction.opname == "STORE_ATTR":
                used.assigned.add(instruction.argval)
            loads = instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
            before = instruction.argval if loads else None
            before = before[-1] if isinstance(before, tuple) else before  # loads several at once
    return used


def parts_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a function's code and that of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from parts_of(constant)
