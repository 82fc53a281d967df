"""Checks of arguments that would otherwise give wrong numbers without a word."""

import difflib
import numbers
from collections.abc import Iterable
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

LONGEST = 400  # characters of a value in an error


def shown(value: Any) -> str:
    """Returns a value as an error shows it: its repr in one line, without the middle if it is long.

    A list of a million numbers, passed by mistake, must not bury the error.

    Example:
        >>> shown("text"), len(shown(list(range(10**5))))
        ("'text'", 400)
    """
    text = " ".join(repr(value).split("\n"))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 53]}...{text[-50:]}"


def as_flag(name: str, value: Any) -> tf.Tensor:
    """Returns a flag as a tensor: shape (), bool.

    Of several flags, as of one per gradient, a rule would make several scales.

    Args:
        name: the argument's name, for the error.
        value: a Python bool, or a tensor of shape (), bool.

    Raises:
        ValueError: if the value is not a single bool.
    """
    flag = tf.convert_to_tensor(value)
    if flag.dtype != tf.bool or flag.shape.rank not in (0, None):
        raise ValueError(
            f"`{name}` must be a single bool; got {flag.dtype.name} of shape {flag.shape}"
        )
    return flag


def check_bool(name: str, value: Any) -> None:
    """Raises TypeError, naming the argument, unless `value` is True or False.

    The text "no", as from a command line, would count as True.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be True or False; got {shown(value)}")


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises ValueError, naming the argument, unless `value` is an int within bounds."""
    if not is_integer(value) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"`{name}` must be an int {bounds}; got {shown(value)}")


def did_you_mean(name: object, known: Iterable[str], otherwise: str) -> str:
    """Returns a question that suggests the most similar known name, or `otherwise`.

    Example:
        >>> did_you_mean("pytorhc", ["pytorch", "jmp"], "Use one of these.")
        "Did you mean 'pytorch'?"
    """
    near = difflib.get_close_matches(str(name)[:LONGEST], known, n=1)
    return f"Did you mean {near[0]!r}?" if near else otherwise


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether `value` is a real number from Python or NumPy; bools do not count."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: Any) -> TypeGuard[int]:
    """Returns whether `value` is an int from Python or NumPy; bools do not count."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
