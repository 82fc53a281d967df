"""Argument checks. They use static information only and add no ops to a graph."""

import difflib
import numbers
from collections.abc import Iterable
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

from scaling.base.types import RuleState

LONGEST = 200  # characters of a value in an error


def shown(value: Any) -> str:
    """Returns a value as an error shows it: its repr, without the middle if it is long.

    A list of a million numbers, passed by mistake, must not bury the error. Of an object that
    cannot be printed, the type is shown.

    Example:
        >>> shown("text"), len(shown(list(range(10**5))))
        ("'text'", 200)
    """
    try:
        text = repr(value)
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


def check_state(state: Any, kind: type) -> None:
    """Raises TypeError unless `state` has the type that a rule uses for its state."""
    if not isinstance(state, kind) or not is_scalars(state):
        raise TypeError(
            f"`state` must be a {kind.__name__}; got {state_shown(state)}. Each rule has a "
            "state type of its own. Pass what the rule's initial_state() or advance() returned."
        )


def is_scalars(state: Any) -> bool:
    """Returns whether a state holds nothing but numbers: Python's, or tensors of shape ()."""
    return all(
        is_number(value)
        or (
            tf.is_tensor(value)
            and value.shape.rank in (0, None)
            and not value.dtype.is_complex
            and (value.dtype.is_floating or value.dtype.is_integer)
        )
        for value in state
    )


def state_shown(state: Any) -> str:
    """Returns the type of what was passed as a state; of a state, also its fields."""
    kind = type(state).__name__
    return shown(state) if isinstance(state, tuple) and kind.endswith("State") else kind


def loss_scale_of(state: RuleState) -> tf.Tensor:
    """Returns the scale in a rule's state; raises TypeError if there is no scale."""
    fields = [getattr(state, "loss_scale", None)]
    if not isinstance(state, tuple) or not is_scalars(fields):
        raise TypeError(
            f"`state` must be a rule's state; got {state_shown(state)}. A rule's state has the "
            "scale in its `loss_scale` field. Pass what the rule's initial_state() or advance() "
            "returned."
        )
    return state.loss_scale


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Returns a question that suggests the most similar known name, or `otherwise`.

    Example:
        >>> did_you_mean("pytorhc", ["pytorch", "jmp"], "Use one of these.")
        "Did you mean 'pytorch'?"
    """
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"Did you mean {near[0]!r}?" if near else otherwise


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether `value` is a real number from Python or NumPy; bools do not count."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: Any) -> TypeGuard[int]:
    """Returns whether `value` is an int from Python or NumPy; bools do not count."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
