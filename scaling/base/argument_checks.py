"""Argument checks. They use static information only and add no ops to a graph."""

import difflib
import numbers
from collections.abc import Iterable
from typing import Any, TypeGuard

import tensorflow as tf

from scaling.base.types import RuleState


def as_tensor(name: str, value: Any) -> tf.Tensor:
    """Returns `value` as a tensor; raises TypeError, naming the argument, if it cannot be one."""
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` must be convertible to tensors; got {type(value).__name__}. TensorFlow "
            "cannot convert this type. Pass tensors, NumPy arrays or numbers."
        ) from error


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
    if value not in (True, False):
        raise TypeError(f"`{name}` must be True or False; got {value!r}. {why} {remedy}.")


def check_integer(name: str, value: Any, least: int, why: str, remedy: str) -> None:
    """Raises ValueError, naming the argument, unless `value` is an int of at least `least`."""
    if not is_integer(value) or value < least:
        raise ValueError(
            f"`{name}` must be an int of at least {least}; got {value!r}. {why} {remedy}."
        )


def check_state(state: Any, kind: type) -> None:
    """Raises TypeError unless `state` has the type that a rule uses for its state."""
    if not isinstance(state, kind):
        raise TypeError(
            f"`state` must be a {kind.__name__}; got {type(state).__name__}. Each rule has a "
            "state type of its own. Pass what the rule's initial_state() or advance() returned."
        )


def loss_scale_of(state: RuleState) -> tf.Tensor:
    """Returns the scale in a rule's state; raises TypeError if there is no scale."""
    if not hasattr(state, "loss_scale"):
        raise TypeError(
            f"`state` must be a rule's state; got {type(state).__name__}. A rule's state has the "
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
