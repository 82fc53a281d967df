"""Runs a module's source with a line changed or a function replaced, beside the module itself."""

import inspect
from types import ModuleType
from typing import Any

Change = tuple[str, str] | None


def loaded(module: ModuleType, change: Change = None, **names: Any) -> dict[str, Any]:
    """Returns the names of a module after its source has been run again.

    Args:
        module: the module; it is left as it is.
        change: a text that occurs once in its source, and what to put in its place: a mutant.
        **names: what takes the place of functions that compute with Python's own numbers, which
            cannot be traced. It must be said where it is done.
    """
    source = inspect.getsource(module)
    if change:
        old, new = change
        if source.count(old) != 1:
            raise ValueError(f"{old!r} occurs {source.count(old)} times in {module.__name__}.")
        source = source.replace(old, new)
    found = dict(vars(module))
    exec(compile(source, module.__name__, "exec"), found)  # noqa: S102  # our own source
    found.update(names)
    return found
