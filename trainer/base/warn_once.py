"""Warnings that are logged once per process, however often a step is traced."""

import functools
from collections.abc import Sequence

from absl import logging


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning, unless this process has logged the same message before."""
    logging.warning("%s", message)


def listed(names: Sequence[str], shown: int = 5) -> str:
    """Returns the first names of a list in words.

    Example:
        >>> listed(["a", "b"]), listed(["a", "b", "c"], shown=1)
        ("'a' and 'b'", "'a' and 2 more")
    """
    quoted = [repr(name) for name in names[:shown]]
    if len(names) > shown:
        quoted.append(f"{len(names) - shown} more")
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[1:] else quoted)
