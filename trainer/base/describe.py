"""Describes settings, Keras objects and functions as plain values that JSON can hold.

Two descriptions are equal if the objects compute the same, as far as that can be known. Left out
are names, which Keras numbers anew in every process, and whatever only says how something begins:
initializers, and the shapes that a layer was built for. A function is described by its name, by a
hash of its bytecode, and by the numbers that it reads from its closure, its module or its owner.
What is called by it is not followed.
"""

import dataclasses
import functools
import hashlib
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from trainer.keras_compat import arguments_of_loss

Plain: TypeAlias = Any  # None, a bool, a number, a string, or lists and dicts of such values

NUMBERS = bool, int, float, np.integer, np.floating
LONG = 32  # lists and arrays with more items are described by a hash
# Entries of a Keras config that have no effect on what an object computes.
UNUSED = ("name", "build_config", "build_input_shape", "compile_config", "registered_name")
# Attributes that Keras gives to every layer and model.
EVERY_LAYER = (
    "autocast", "built", "compiled", "name", "steps_per_execution", "supports_jit",
    "supports_masking", "unrolled_steps_per_execution",
)  # fmt: skip
HALFSTEP = ("scaling", "strategies", "trainer")
# Functions of these packages are described by their names; so are those of any installed package.
LIBRARIES = ("keras", "tensorflow", "numpy", *HALFSTEP)


def describe(value: Any) -> Plain:
    """Returns a description of a setting, an array, a function, or a Keras object.

    Example:
        >>> describe(keras.regularizers.L2(0.5))
        {'class': 'L2', 'l2': 0.5}
        >>> describe({"axis": np.int64(1), "mask": None})
        {'axis': 1}
    """
    if value is None or isinstance(value, bool | str):
        return value
    for kind, describe_kind in BY_TYPE.items():
        if isinstance(value, kind):
            return describe_kind(value)
    return describe_function(value) if is_function(value) else describe_object(value)


def describe_float(value: float | np.floating) -> float | str:
    """Returns a number that JSON can hold; inf and NaN as text."""
    return float(value) if math.isfinite(value) else str(value)


def describe_shape(shape: tf.TensorShape) -> list[int | None] | None:
    """Returns the dimensions of a shape."""
    dimensions: list[int | None] | None = None if shape.rank is None else shape.as_list()
    return dimensions


def describe_variable(variable: tf.Variable | keras.Variable) -> str:
    """Returns the dtype and the shape of a variable, whose value belongs to the state of a run."""
    return f"variable: {tf.as_dtype(variable.dtype).name} {tf.TensorShape(variable.shape)}"


def describe_sequence(items: Sequence[Any]) -> list[Plain] | dict[str, Plain]:
    """Returns the descriptions of the items, or a hash of these if there are many."""
    found = [describe(item) for item in items]
    return found if len(found) <= LONG else {"items": len(found), "hash": digest(repr(found))}


def describe_mapping(value: Mapping[Any, Any]) -> dict[str, Plain] | str:
    """Returns the description of a dict, or of a Keras object that is in the form of one."""
    if "class_name" not in value or "config" not in value:
        return described_entries(value)
    config = value["config"]
    if value["class_name"] in ("DTypePolicy", "function"):
        return str(config["name"] if isinstance(config, Mapping) else config)
    rest = config if isinstance(config, Mapping) else {"config": config}
    return {"class": str(value["class_name"]), **without_unused(rest)}


def described_entries(value: Mapping[Any, Any]) -> dict[str, Plain]:
    """Returns the descriptions of a dict's values, keyed by text; None is left out."""
    found = {str(key): describe(item) for key, item in value.items()}
    return {key: item for key, item in found.items() if item is not None}


def without_unused(config: Mapping[str, Any]) -> dict[str, Plain]:
    """Returns the description of a Keras config, without entries that change no result."""
    return described_entries(
        {
            key: value
            for key, value in config.items()
            if key not in UNUSED and not key.endswith("initializer")
        }
    )


def describe_array(value: np.ndarray | tf.Tensor) -> Plain:
    """Returns the elements of a small array; dtype, shape and a hash of a larger one."""
    if tf.is_symbolic_tensor(value):
        return f"tensor: {value.dtype.name} {value.shape}"
    array = np.asarray(value)
    if array.size <= LONG:
        return describe(array.tolist())
    return f"{array.dtype.name} {array.shape}, hash {digest(array.tobytes())}"


def describe_object(value: Any) -> dict[str, Plain]:
    """Returns an object's class with its configuration: Keras's config, or plain attributes."""
    name = {"class": type(value).__name__}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return name | described_entries(fields)
    try:
        config = without_unused(value.get_config())
    except Exception:  # noqa: BLE001  # a user's class may raise anything here
        config = plain_attributes(value)
    return name | config | without_unused(arguments_of_loss(value))


def plain_attributes(owner: object, names: Sequence[str] | None = None) -> dict[str, Plain]:
    """Returns the public attributes of an object that are numbers or strings.

    Args:
        owner: any object.
        names: the attributes to return, as far as they exist; None returns all.
    """
    found = {
        name: value
        for name, value in getattr(owner, "__dict__", {}).items()
        if isinstance(value, (*NUMBERS, str)) and not name.startswith("_")
    }
    found = {name: found[name] for name in (found if names is None else names) if name in found}
    return {name: describe(value) for name, value in found.items() if name not in EVERY_LAYER}


def text_of_rule(rule: Any) -> str:
    """Returns a loss-scale rule as text that another process returns for the same rule, too.

    Example:
        >>> class Halving:
        ...     def __init__(self, start):
        ...         self.start = start
        >>> text_of_rule(Halving(2.0))
        'Halving(start=2.0)'
    """
    text = repr(rule)
    if hex(id(rule)) not in text:  # as in the one of `object`
        return text
    numbers = [f"{name}={value!r}" for name, value in sorted(plain_attributes(rule).items())]
    return f"{type(rule).__name__}({', '.join(numbers)})"


def is_function(value: Any) -> bool:
    """Returns whether a value is a function or a method, also one that `tf.function` has made."""
    kinds = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
    return isinstance(value, kinds) or hasattr(value, "python_function")


def describe_function(function: Any, *, owner: bool = True) -> dict[str, Plain] | str:
    """Returns the name of a function, a hash of its code, and the numbers that it uses.

    The hash is the same in every process of one version of Python. Functions of installed packages
    are described by their names alone.

    Args:
        function: the function, or a method.
        owner: whether to include the numbers that a method uses of its object.
    """
    if isinstance(function, functools.partial):
        found = describe_function(function.func)
        arguments = {"arguments": describe([*function.args, dict(function.keywords)])}
        return ({"function": found} if isinstance(found, str) else found) | arguments
    plain = inspect.unwrap(getattr(function, "python_function", function))
    instance = getattr(plain, "__self__", getattr(function, "__self__", None))
    plain = getattr(plain, "__func__", plain)
    code, name = getattr(plain, "__code__", None), str(getattr(plain, "__name__", plain))
    if code is None or is_of_library(plain):
        return name
    used = names_in(code)
    values = {key: plain.__globals__[key] for key in used if key in plain.__globals__}
    values |= dict(zip(code.co_freevars, cells_of(plain), strict=True))
    defaults = [*(plain.__defaults__ or ()), *(plain.__kwdefaults__ or {}).values()]
    numbers = {key: value for key, value in values.items() if isinstance(value, NUMBERS)}
    numbers |= {f"default {place}": value for place, value in enumerate(defaults)}
    return {
        "function": name,
        "code": digest(text_of(code)),
        **described_entries(dict(sorted(numbers.items()))),
        **plain_attributes(instance if owner else None, sorted(used)),
    }


def is_of_library(function: types.FunctionType) -> bool:
    """Returns whether a function belongs to an installed package or to halfstep."""
    return package_of(function) in LIBRARIES or "site-packages" in function.__code__.co_filename


def package_of(item: Any) -> str:
    """Returns the package that defines a function or a class, or to which a module belongs."""
    module = item.__name__ if isinstance(item, types.ModuleType) else item.__module__
    return str(module).partition(".")[0]


def cells_of(function: types.FunctionType) -> list[Any]:
    """Returns the values of a function's closure; None for a cell that is still empty."""
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:
            values.append(None)
    return values


def names_in(code: types.CodeType) -> set[str]:
    """Returns the names of globals and attributes that a function reads, in inner functions too."""
    inner = [names_in(constant) for constant in code.co_consts if is_code(constant)]
    return set(code.co_names).union(*inner)


def text_of(code: types.CodeType) -> str:
    """Returns what a function does as text, without its docstring, file name and line numbers."""
    constants = [text_of(each) if is_code(each) else constant(each) for each in code.co_consts]
    first = code.co_consts[0] if code.co_consts else 0
    if (first is None or isinstance(first, str)) and not code.co_name.startswith("<"):
        constants = constants[1:]  # the docstring, or None in its place
    return repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars))


def constant(value: Any) -> str:
    """Returns a constant of a function as text; the items of a set are sorted."""
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def is_code(value: Any) -> bool:
    """Returns whether a constant of a function is the code of an inner function."""
    return isinstance(value, types.CodeType)


def digest(content: str | bytes) -> str:
    """Returns the first 12 digits of the SHA-256 of a text, in hexadecimal."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:12]


BY_TYPE: dict[Any, Callable[[Any], Plain]] = {
    int | np.integer: int,
    float | np.floating: describe_float,
    tf.DType: lambda dtype: dtype.name,
    tf.TensorShape: describe_shape,
    tf.Variable | keras.Variable: describe_variable,
    np.ndarray | tf.Tensor: describe_array,
    Mapping: describe_mapping,
    set | frozenset: lambda items: sorted((describe(item) for item in items), key=repr),
    Sequence: describe_sequence,
    type: lambda kind: kind.__name__,
}
