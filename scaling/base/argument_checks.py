"""Argument checks. They use static information only and add no ops to a graph."""

import difflib
import numbers
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

from scaling.base.types import RuleState

LONGEST = 400  # characters of a value in an error


def shown(value: Any) -> str:
    """Returns a value as an error shows it: its repr, without the middle if it is long.

    A list of a million numbers, passed by mistake, must not bury the error. Of an object that
    cannot be printed, the type is shown.

    Example:
        >>> shown("text"), len(shown(list(range(10**5))))
        ("'text'", 400)
    """
    try:
        text = re.sub(r"\s*\n\s*", " ", repr(value))
    except Exception:  # noqa: BLE001  # the error to raise is the caller's
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 53]}...{text[-50:]}"


def as_tensor(name: str, value: Any) -> tf.Tensor:
    """Returns `value` as a tensor; raises TypeError, naming the argument, if it cannot be one."""
    try:
        tensor = tf.convert_to_tensor(value)
    except Exception as error:  # TensorFlow raises many kinds
        raise not_a_tensor(name, value) from error
    if tensor is None:  # as of the class tf.Tensor
        raise not_a_tensor(name, value)
    return tensor


def not_a_tensor(name: str, value: Any) -> TypeError:
    """Returns the error about an argument that TensorFlow cannot convert."""
    return TypeError(
        f"`{name}` must be convertible to tensors; got {type(value).__name__}. TensorFlow "
        "cannot convert this type. Pass tensors, NumPy arrays or numbers."
    )


def map_leaves(name: str, function: Callable[[Any], Any], structure: Any) -> Any:
    """Returns a structure with `function` applied to each leaf.

    Args:
        name: the argument's name, for errors.
        function: takes a leaf.
        structure: any structure that `tf.nest` can make again.

    Raises:
        TypeError: if `tf.nest` cannot make such a structure again, as of a mapping without changes.
    """
    try:
        flat = tf.nest.flatten(structure)
    except TypeError as error:  # keys of a dict that cannot be sorted
        raise unknown_structure(name, structure) from error
    leaves = [function(leaf) for leaf in flat]
    try:
        return tf.nest.pack_sequence_as(structure, leaves)
    except (TypeError, ValueError) as error:
        raise unknown_structure(name, structure) from error


def unknown_structure(name: str, structure: Any) -> TypeError:
    """Returns the error for a structure that `tf.nest` cannot take apart and make again."""
    return TypeError(
        f"`{name}` must be a structure that tf.nest can make again; got "
        f"{type(structure).__name__}. The results are returned in the same structure. Pass "
        "lists, tuples and dicts."
    )


def as_flag(name: str, value: Any, why: str, remedy: str) -> tf.Tensor:
    """Returns a flag as a tensor: shape (), bool.

    Args:
        name: the argument's name, for errors.
        value: a Python bool, or a tensor of shape (), bool.
        why: one sentence for the error: what the argument is for.
        remedy: what to do instead, without the final period.

    Raises:
        ValueError: if the value is not a scalar.
        TypeError: if the value is not a bool.
    """
    flag = as_tensor(name, value)
    if flag.dtype != tf.bool:
        raise TypeError(f"`{name}` must be a bool; got {flag.dtype.name}. {why} {remedy}.")
    check_scalar(name, flag, why, remedy)
    return flag


def check_scalar(name: str, tensor: tf.Tensor, why: str, remedy: str) -> None:
    """Raises ValueError, naming the argument, if a tensor's rank is known and is not 0."""
    if tensor.shape.rank not in (0, None):
        raise ValueError(
            f"`{name}` must be a scalar; got shape {tuple(tensor.shape)}. {why} {remedy}."
        )


def check_bool(name: str, value: Any, why: str, remedy: str) -> None:
    """Raises TypeError, naming the argument, unless `value` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be True or False; got {shown(value)}. {why} {remedy}.")


def check_integer(name: str, value: Any, least: int, why: str, remedy: str) -> None:
    """Raises ValueError, naming the argument, unless `value` is an int of at least `least`."""
    if not is_integer(value) or value < least:
        raise ValueError(
            f"`{name}` must be an int of at least {least}; got {shown(value)}. {why} {remedy}."
        )


def is_name_in(value: Any, known: Iterable[Any]) -> TypeGuard[str]:
    """Returns whether `value` is one of some names; a value of another type is none of them."""
    return isinstance(value, str) and value in known


def check_state(state: Any, kind: type[Any]) -> None:
    """Raises TypeError unless `state` has the type that a rule uses for its state."""
    if not isinstance(state, kind) or not are_numbers(state):
        found = shown(state) if isinstance(state, kind) else type(state).__name__
        raise TypeError(
            f"`state` must be a {kind.__name__}; got {found}. Each rule has a "
            "state type of its own. Pass what the rule's initial_state() or advance() returned."
        )


def are_numbers(fields: Iterable[Any]) -> bool:
    """Returns whether the fields of a state are tensors of numbers, or Python's numbers."""
    return all(
        is_number(field) or (tf.is_tensor(field) and is_real(field.dtype)) for field in fields
    )


def is_real(dtype: tf.DType) -> bool:
    """Returns whether a dtype is one of a state's fields: real numbers and bools."""
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)


def loss_scale_of(state: RuleState) -> tf.Tensor:
    """Returns the scale in a rule's state; raises TypeError if there is no scale."""
    if not hasattr(state, "loss_scale") or not are_numbers([state.loss_scale]):
        found = shown(state) if hasattr(state, "loss_scale") else type(state).__name__
        raise TypeError(
            f"`state` must be a rule's state; got {found}. A rule's state has the "
            "scale in its `loss_scale` field. Pass what the rule's initial_state() or advance() "
            "returned."
        )
    return state.loss_scale


def shown_name(name: object) -> str:
    """Returns what similar names are looked for: the start of a string, or of another value."""
    return name[:LONGEST] if isinstance(name, str) else shown(name)


def did_you_mean(name: object, known: Iterable[str], otherwise: str) -> str:
    """Returns a question that suggests the most similar known name, or `otherwise`.

    Example:
        >>> did_you_mean("pytorhc", ["pytorch", "jmp"], "Use one of these.")
        "Did you mean 'pytorch'?"
    """
    near = difflib.get_close_matches(shown_name(name), known, n=1)
    return f"Did you mean {near[0]!r}?" if near else otherwise


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether `value` is a real number from Python or NumPy; bools do not count."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: Any) -> TypeGuard[int]:
    """Returns whether `value` is an int from Python or NumPy; bools do not count."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
