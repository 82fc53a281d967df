"""Checks of the trainer's own kinds of arguments: paths, seeds, choices, results of methods.

Those of numbers and switches stand in `scaling/base/argument_checks.py`.
"""

import contextlib
import os
import pathlib
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from scaling.base.argument_checks import (
    did_you_mean,
    is_integer,
    shown,
)
from trainer.base.atomic_files import make_folder


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
    raise TypeError(
        f"`{name}` must return {what}; got {type(value).__name__}. TensorFlow cannot convert it to "
        "a tensor. Check what the method returns, and that it returns something."
    )


def as_returned_loss(value: Any, what: str) -> tf.Tensor:
    """Returns what `compute_loss` has returned as a float32 tensor; see `as_returned_tensor`.

    Raises:
        TypeError: unless it is in float32 or float64.
    """
    loss = as_returned_tensor("compute_loss", value, what)
    if loss.dtype not in (tf.float32, tf.float64):
        raise TypeError(
            f"`compute_loss` must return float32; got {loss.dtype.name}. Cast the model's output "
            "to float32 before the loss."
        )
    return tf.cast(loss, tf.float32)


def check_seed(seed: object, bits: int = 32) -> None:
    """Raises ValueError unless `seed` is None or an unsigned integer of at most `bits` bits."""
    if seed is not None and not (is_integer(seed) and 0 <= seed < 2**bits):
        raise ValueError(
            f"`seed` must be an int from 0 to 2^{bits} - 1, or None; got {shown(seed)}"
        )


def check_path(name: str, value: object) -> None:
    """Raises ValueError, naming the argument, unless `value` is a non-empty local path.

    Files are locked and renamed as they are written, which object stores do not offer. Both an
    empty path and a URL such as gs://bucket/run would be folders on this machine.
    """
    text = os.fspath(value)  # type: ignore[call-overload]  # or raises TypeError
    if not text or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text):
        raise ValueError(f"`{name}` must be a local path; got {shown(text)}")


def check_checkpoint_path(name: str, value: Any) -> None:
    """As `check_path`, for a path under which TensorFlow reads checkpoints.

    TensorFlow looks for a checkpoint's files with its path as a pattern. With a bracket or a
    backslash in it, a checkpoint can be written and not be read.
    """
    check_path(name, value)
    whole = str(local_path(value).absolute())
    if found := re.search(r"[\[\\]", whole):
        raise ValueError(f"`{name}` must not contain {found[0]!r}; got {shown(whole)}")


def local_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a path with `~` replaced by the user's home folder, also where no shell has done it.

    Example:
        >>> local_path("~/runs/a") == pathlib.Path.home() / "runs" / "a"
        True
    """
    return pathlib.Path(path).expanduser()


def check_writable(model_dir: pathlib.Path | None) -> None:
    """Creates `model_dir` if needed, and raises ValueError unless files can be written there."""
    if model_dir is None:
        return
    try:
        make_folder(model_dir)
        with tempfile.TemporaryFile(dir=model_dir) as file:
            file.write(b"x")
    except OSError as error:
        raise ValueError(
            f"`model_dir` must be a writable directory; got {str(model_dir)!r}: {error.strerror}"
        ) from error


def check_choice(name: str, value: object, choices: Sequence[Any]) -> None:
    """Raises ValueError, naming the argument, unless `value` is one of `choices`."""
    # Only values of one type are compared: 1 is not True, and an array has no single answer.
    if not any(isinstance(value, type(each)) and value == each for each in choices):
        remedy = did_you_mean(value, [str(each) for each in choices], "")
        allowed = ", ".join(map(repr, choices))
        raise ValueError(f"`{name}` must be one of {allowed}; got {shown(value)}. {remedy}".strip())
