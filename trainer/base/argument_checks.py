"""Checks of the trainer's own kinds of arguments: paths, choices, results of methods.

Those of numbers and switches stand in `scaling/base/argument_checks.py`.
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from scaling.base.argument_checks import did_you_mean, shown


def as_python(value: Any) -> Any:
    """Returns a bool, int or float of NumPy as one of Python, and any other value as it is.

    Example:
        >>> import numpy as np
        >>> as_python(np.int64(3)), as_python("three")
        (3, 'three')
    """
    return value.item() if isinstance(value, np.bool_ | np.integer | np.floating) else value


def as_returned_tensor(name: str, value: Any, what: str) -> tf.Tensor:
    """Returns what a user's method has returned as a tensor.

    Args:
        name: the method.
        value: what it has returned.
        what: what it should return, for the error.

    Raises:
        TypeError: if that is no tensor, and no array or list of numbers.
    """
    tensors = isinstance(value, list | tuple) and any(map(tf.is_tensor, value))
    if not tensors:  # they would be stacked
        with contextlib.suppress(Exception):  # TensorFlow raises many kinds
            return tf.convert_to_tensor(value)
    raise TypeError(f"`{name}` must return {what}; got {type(value).__name__}")


def as_returned_loss(value: Any, what: str) -> tf.Tensor:
    """Returns what `compute_loss` has returned as a float32 tensor; see `as_returned_tensor`.

    Raises:
        TypeError: unless it is in float32 or float64.
    """
    loss = as_returned_tensor("compute_loss", value, what)
    if loss.dtype not in (tf.float32, tf.float64):
        raise TypeError(f"`compute_loss` must return float32; got {loss.dtype.name}")
    return tf.cast(loss, tf.float32)


def check_path(name: str, value: Any, *, of_checkpoints: bool = False) -> None:
    """Raises ValueError, naming the argument, unless `value` is a local path that can be used.

    Files are locked and renamed as they are written, which object stores do not offer. Both an
    empty path and a URL such as gs://bucket/run would be folders on this machine.

    Args:
        name: the argument.
        value: the path.
        of_checkpoints: whether TensorFlow reads checkpoints there. It takes their paths for
            patterns: under a bracket or a backslash, they can be written and not be read.
    """
    text = os.fspath(value)
    if not text or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text):
        raise ValueError(f"`{name}` must be a local path; got {shown(text)}")
    whole = str(local_path(value).absolute())
    if of_checkpoints and (found := re.search(r"[\[\\]", whole)):
        raise ValueError(f"`{name}` must not contain {found[0]!r}; got {shown(whole)}")


def local_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a path with `~` replaced by the user's home folder, also where no shell has done it.

    Example:
        >>> local_path("~/runs/a") == pathlib.Path.home() / "runs" / "a"
        True
    """
    return pathlib.Path(path).expanduser()


def check_choice(name: str, value: object, choices: Sequence[Any]) -> None:
    """Raises ValueError, naming the argument, unless `value` is one of `choices`."""
    # Only values of one type are compared: 1 is not True, and an array has no single answer.
    if not any(isinstance(value, type(each)) and value == each for each in choices):
        remedy = did_you_mean(value, [str(each) for each in choices], "")
        allowed = ", ".join(map(repr, choices))
        raise ValueError(f"`{name}` must be one of {allowed}; got {shown(value)}. {remedy}".strip())
