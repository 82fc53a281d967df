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
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from scaling.base.argument_checks import check_bool, check_integer, is_number, shown
from trainer.base.argument_checks import as_python, check_choice

Check = Callable[[str, Any], None]  # (name, value): raises TypeError or ValueError

CHECK, CHOICES, LEAST = "check", "choices", "least"  # keys of a field's metadata


def count(default: int | None, *, least: int = 1, optional: bool = False) -> Any:
    """Returns a field for an int of at least `least`.

    None is allowed as well if it is the default, or if `optional` is True.
    """
    optional = optional or default is None

    def check(name: str, value: Any) -> None:
        if not (optional and value is None):
            check_integer(name, value, least)

    return dataclasses.field(default=default, metadata={CHECK: check, LEAST: least})


def choice(default: Any, choices: Sequence[Any]) -> Any:
    """Returns a field for one of the given values; None is allowed if it is the default."""
    return checked(
        default,
        lambda name, value: check_choice(name, value, tuple(choices)),
        **{CHOICES: tuple(choices)},
    )


def switch(default: bool) -> Any:
    """Returns a field that accepts True or False."""
    return checked(default, check_bool)


def checked(default: Any, check: Check, **metadata: Any) -> Any:
    """Returns a field with the given check; None is allowed if it is the default."""

    def check_unless_none(name: str, value: Any) -> None:
        if default is not None or value is not None:
            check(name, value)

    return dataclasses.field(default=default, metadata={CHECK: check_unless_none, **metadata})


def check_seconds(name: str, value: Any) -> None:
    """Raises ValueError, naming the argument, unless `value` is a positive, finite number."""
    if not (is_number(value) and 0 < value < math.inf):
        raise ValueError(f"`{name}` must be positive and finite, in seconds; got {shown(value)}")


def check_fields(group: Any) -> None:
    """Runs the check of every field of a group; numbers of NumPy become Python's first.

    Python's numbers can be written to JSON, and be compared with a tensor of any dtype.

    Raises:
        TypeError, ValueError: for the first field whose value is not allowed.
    """
    for field in dataclasses.fields(group):
        value = as_python(getattr(group, field.name))
        object.__setattr__(group, field.name, value)  # the group is frozen
        if CHECK in field.metadata:
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
