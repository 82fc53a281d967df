"""Checks of arguments that several rooms share. Each error names the argument and a remedy."""

import difflib
import inspect
import numbers
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from scaling.base.argument_checks import is_number


def check_count(name: str, value: Any) -> None:
    """Raises ValueError, naming the argument, unless `value` is an int of at least 1."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"`{name}` must be an int of at least 1; got {value!r}. It counts steps, examples or "
            "parts of a batch. Use 1 or more."
        )


def check_whole(name: str, value: Any) -> None:
    """Raises ValueError, naming the argument, unless `value` is an int of at least 0."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
        raise ValueError(
            f"`{name}` must be an int of at least 0; got {value!r}. It says how many; 0 is none at "
            "all. Use 0 or more."
        )


def check_bool(name: str, value: Any) -> None:
    """Raises TypeError, naming the argument, unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(
            f"`{name}` must be True or False; got {value!r}. It says whether or not. Use one of "
            "the two."
        )


def check_seed(
    seed: Any, bits: int = 32, why: str = "NumPy's generators are seeded with it, too."
) -> None:
    """Raises ValueError unless a seed is None, or an int that all who are given it can take."""
    whole = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    if seed is not None and not (whole and 0 <= seed < 2**bits):
        raise ValueError(
            f"`seed` must be an int from 0 to 2^{bits} - 1, or None; got {seed!r}. {why} Use for "
            "instance 0."
        )


def check_path(name: str, value: Any, example: str, *, optional: bool = False) -> None:
    """Raises TypeError, naming the argument, unless `value` can be a path, or may be None."""
    if value is None and optional:
        return
    if not isinstance(value, (str, os.PathLike)) or value == "":
        rule = "a path, or None" if optional else "a path"
        raise TypeError(
            f"`{name}` must be {rule}; got {value!r}. It says where files are. Use for instance "
            f'"{example}".'
        )


def check_no_unknown(unknown: dict[str, Any], function: Any) -> None:
    """Raises TypeError for arguments that there are not, and names the nearest that there is."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Leave it out."
        raise TypeError(
            f"`{name}` must be an argument of Trainer; got one that is not. It would have no "
            f"effect. {hint}"
        )


def check_writable(model_dir: pathlib.Path | None) -> None:
    """Raises ValueError unless files can be written to a `model_dir`, which is made."""
    if model_dir is None:
        return
    try:
        model_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=model_dir) as file:
            file.write(b"x")
    except OSError as error:
        raise ValueError(
            f"`model_dir` must be a directory that can be written to; got {str(model_dir)!r}: "
            f"{error.strerror}. Checkpoints and logs go there. Use another one, or None to write "
            "nothing."
        ) from error


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises ValueError, naming the argument, unless `value` is one of some words."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), list(map(str, choices)), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Choose one of them."
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, choices))}; got {value!r}. The trainer "
            f"knows no other way. {hint}"
        )


def check_kept(name: str, count: Any, model_dir: Any, what: str) -> None:
    """Raises ValueError unless nothing shall be kept, or there is a place to keep it."""
    check_whole(name, count)
    if count and model_dir is None:
        raise ValueError(
            f"`{name}` must be 0 without `model_dir`; got {count}. {what} are files. Pass "
            "model_dir=."
        )


def check_momentum(ema_momentum: Any) -> None:
    """Raises ValueError unless an average of the weights can be kept with it."""
    if ema_momentum is None:
        return
    if not is_number(ema_momentum) or not 0 < ema_momentum < 1:
        raise ValueError(
            f"`ema_momentum` must be between 0 and 1; got {ema_momentum!r}. It is the share of the "
            "old average that an update keeps. 0.999 is usual."
        )
