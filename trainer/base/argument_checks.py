"""Argument checks for several packages. Each error names the argument and says what to pass."""

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
    check_integer,
    did_you_mean,
    is_integer,
    is_number,
    shown,
)
from trainer.base.atomic_files import make_folder

LONGEST_NAME = 255  # bytes of a file's or a folder's name


def check_count(name: str, value: object) -> None:
    """Raises ValueError, naming the argument, unless `value` is an int of at least 1."""
    check_integer(name, value, 1)


def as_python(value: Any) -> Any:
    """Returns an int or float of NumPy as one of Python, and any other value as it is.

    Example:
        >>> import numpy as np
        >>> as_python(np.int64(3)), as_python("three")
        (3, 'three')
    """
    return value.item() if isinstance(value, np.integer | np.floating) else value


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


def check_nonnegative(name: str, value: object) -> None:
    """Raises ValueError, naming the argument, unless `value` is an int of at least 0."""
    check_integer(name, value, 0)


def check_bool(name: str, value: object) -> None:
    """Raises TypeError, naming the argument, unless `value` is True or False.

    This check is stricter than its namesake in `scaling`, which also takes NumPy's bools.
    """
    if not isinstance(value, bool):
        raise TypeError(
            f"`{name}` must be True or False; got {shown(value)}. This argument is an on/off "
            "switch. Pass True or False."
        )


def check_seed(
    seed: object, bits: int = 32, why: str = "NumPy's seed must be in this range too."
) -> None:
    """Raises ValueError unless `seed` is None or an unsigned integer of at most `bits` bits."""
    if seed is not None and not (is_integer(seed) and 0 <= seed < 2**bits):
        raise ValueError(
            f"`seed` must be an int from 0 to 2^{bits} - 1, or None; got {shown(seed)}. {why} Use "
            "0, for example."
        )


def check_path(name: str, value: object, example: str, *, optional: bool = False) -> None:
    """Raises an error, naming the argument, unless `value` is a non-empty local path.

    Args:
        name: the argument's name, for the error.
        value: the argument.
        example: a path that the error suggests.
        optional: whether None is allowed too.

    Raises:
        TypeError: if it is no path, or empty.
        ValueError: if it is a URL, such as gs://bucket/run.
    """
    if value is None and optional:
        return
    if not isinstance(value, (str, os.PathLike)) or value == "":
        rule = "a path or None" if optional else "a path"
        raise TypeError(
            f"`{name}` must be {rule}; got {shown(value)}. This argument names a file or a folder. "
            f'Pass "{example}", for example.'
        )
    if not isinstance(os.fspath(value), str):
        raise TypeError(
            f"`{name}` must be a path of characters; got {shown(value)}. Names of files are put "
            f'together from it. Pass "{example}", for example.'
        )
    check_file_names(name, os.fspath(value), example)
    try:
        local_path(value)
    except RuntimeError as error:  # of a user who does not exist
        raise ValueError(
            f"`{name}` must begin with an existing home folder if it begins with ~; got "
            f"{shown(value)}. There is no such user. Write the folder's path."
        ) from error
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", os.fspath(value)):
        raise ValueError(
            f"`{name}` must be a local path; got {shown(os.fspath(value))}. Files are locked and "
            "renamed as they are written, which object stores do not offer. Mount the store as a "
            "folder and pass that folder, or copy the files when the run has ended."
        )


def check_file_names(name: str, path: str, example: str) -> None:
    """Raises ValueError, naming the argument, for a path that no file can have."""
    if "\0" in path or not is_encodable(path):
        raise ValueError(
            f"`{name}` must be a path that a file can have; got {shown(path)}. No file system "
            "takes a zero byte or a lone surrogate in a name. "
            f'Pass "{example}", for example.'
        )
    longest = max((part.encode() for part in pathlib.Path(path).parts), key=len, default=b"")
    if len(longest) > LONGEST_NAME:
        raise ValueError(
            f"`{name}` must have names of at most {LONGEST_NAME} bytes; got a name of "
            f"{len(longest):,}. No usual file system takes a longer one. "
            f'Pass "{example}", for example.'
        )


def is_encodable(path: str) -> bool:
    """Returns whether a path can be written in the encoding of the file system, and printed."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_checkpoint_path(name: str, value: object, example: str) -> None:
    """As `check_path`, for a path under which TensorFlow reads checkpoints.

    TensorFlow looks for a checkpoint's files with its path as a pattern. With a bracket or a
    backslash in it, a checkpoint can be written and not be read.
    """
    check_path(name, value, example)
    whole = str(local_path(value).absolute())  # type: ignore[arg-type]  # it has been checked
    if found := re.search(r"[\[\\]", whole):
        raise ValueError(
            f"`{name}` must not contain {found[0]!r}; got {shown(whole)}. TensorFlow reads the "
            "path of a checkpoint as a pattern, and would not find it again. Use another name."
        )


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
            f"`model_dir` must be a writable directory; got {str(model_dir)!r}: {error.strerror}. "
            "Checkpoints and logs are written there. Choose another directory, or pass None to "
            "write no files."
        ) from error


def check_choice(name: str, value: object, choices: Sequence[Any]) -> None:
    """Raises ValueError, naming the argument, unless `value` is one of `choices`."""
    # Only values of one type are compared: 1 is not True, and an array has no single answer.
    if not any(isinstance(value, type(each)) and value == each for each in choices):
        remedy = did_you_mean(value, [str(each) for each in choices], "Pass one of these values.")
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, choices))}; got {shown(value)}. There "
            f"are no other choices. {remedy}"
        )


def check_ema_momentum(ema_momentum: Any) -> None:
    """Raises ValueError unless `ema_momentum` is None or strictly between 0 and 1."""
    if ema_momentum is None:
        return
    if not is_number(ema_momentum) or not 0 < ema_momentum < 1:
        raise ValueError(
            f"`ema_momentum` must be strictly between 0 and 1; got {shown(ema_momentum)}. Each "
            "update keeps this fraction of the old average. 0.999 is a common choice."
        )
