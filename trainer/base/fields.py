"""Fields of a settings group: each holds a default, a check, and what its flag needs to know.

A group is a frozen dataclass that stands beside what it configures. Its docstring describes each
field, and `trainer.flags` makes a flag from each:

    @dataclasses.dataclass(frozen=True)
    class Example:
        \"\"\"What an example does.

Args:
            max_to_keep: number of files to keep.
        \"\"\"

        max_to_keep: int = count(5)

        def __post_init__(self):
            check_fields(self)
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from scaling.base.argument_checks import check_bool, check_integer
from trainer.base.argument_checks import as_python, check_choice

Check = Callable[[str, Any], None]  # (name, value): raises TypeError or ValueError

# Keys of a field's metadata: its check, whether None is allowed, and what its flag needs to know.
CHECK, OPTIONAL, CHOICES, LEAST = "check", "optional", "choices", "least"


def checked(
    default: Any,
    check: Check,
    *,
    optional: bool = False,
    choices: Sequence[Any] = (),
    least: int = 1,
) -> Any:
    """Returns a field with a check. None is allowed if it is the default, or if `optional`."""
    known = {CHECK: check, OPTIONAL: optional or default is None, CHOICES: choices, LEAST: least}
    return dataclasses.field(default=default, metadata=known)


def count(default: int | None, *, least: int = 1, optional: bool = False) -> Any:
    """Returns a field for an int of at least `least`; for `optional`, see `checked`."""
    check = functools.partial(check_integer, least=least)
    return checked(default, check, optional=optional, least=least)


def choice(default: Any, choices: Sequence[Any]) -> Any:
    """Returns a field for one of the given values."""
    allowed = tuple(choices)
    return checked(default, functools.partial(check_choice, choices=allowed), choices=allowed)


def switch(default: bool) -> Any:
    """Returns a field that accepts True or False."""
    return checked(default, check_bool)


def check_fields(group: Any) -> None:
    """Runs the check of every field of a group; numbers of NumPy become Python's first.

    Python's numbers can be written to JSON, and be compared with a tensor of any dtype.

    Raises:
        TypeError, ValueError: for the first field whose value is not allowed.
    """
    for field in dataclasses.fields(group):
        value = as_python(getattr(group, field.name))
        object.__setattr__(group, field.name, value)  # the group is frozen
        if CHECK in field.metadata and not (value is None and field.metadata[OPTIONAL]):
            field.metadata[CHECK](field.name, value)


def argument_texts(cls: type) -> dict[str, str]:
    """Returns the text of each argument in a class's docstring, keyed by the argument's name.

    Each text is joined into one line and capitalized. Arguments are documented in sections headed
    "Args:" or "Args: TITLE". Flags take their help from these texts.

    Example:
        >>> class Car:
        ...     '''Drives.
        ...
        ...     Args:
        ...         speed: kilometers per hour; 0
        ...             stops.
        ...     '''
        >>> argument_texts(Car)
        {'speed': 'Kilometers per hour; 0 stops.'}
    """
    texts: dict[str, str] = {}
    sections = re.findall(
        r"^Args:.*\n((?:(?:    .*)?\n)+)", inspect.cleandoc(cls.__doc__ or "") + "\n", re.MULTILINE
    )
    for section in sections:
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
            line = re.sub(r"\s+", " ", text)
            texts[name] = line[0].upper() + line[1:]
    return texts
