"""Marks calls of a model that are traced only to look at the result, and are no part of a step.

What counts the calls of a layer in a pass, or records what it adds, leaves them out.
"""

import contextlib
import contextvars
from collections.abc import Iterator

_APART: contextvars.ContextVar[bool] = contextvars.ContextVar("apart", default=False)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Context manager: what is called in the block belongs to no step."""
    token = _APART.set(True)
    try:
        yield
    finally:
        _APART.reset(token)


def is_apart() -> bool:
    """Returns whether the caller runs in such a block.

    Example:
        >>> with apart():
        ...     print(is_apart())
        True
        >>> is_apart()
        False
    """
    return _APART.get()
