"""Fields of a settings group. Each field holds a default and a check.

The flags of `trainer.flags` are made from the same fields. A group is a frozen dataclass whose
fields have the names of the trainer's arguments:

    @dataclasses.dataclass(frozen=True)
    class Example:
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

from scaling.base.argument_checks import is_integer, is_number, shown
from scaling.base.number_formats import as_float
from trainer.base.argument_checks import (
    as_python,
    check_bool,
    check_choice,
    check_count,
    check_nonnegative,
)

Check = Callable[[str, Any], None]  # (name, value): raises TypeError or ValueError

CHECK, CHOICES, LOWER_BOUND = "check", "choices", "lower_bound"  # keys of a field's metadata


def count(default: int | None, *, or_zero: bool = False) -> Any:
    """Returns a field for an int of at least 1, or of at least 0 if `or_zero` is True.

    None is allowed if it is the default.
    """
    check: Check = check_nonnegative if or_zero else check_count
    if default is None:
        check = optional(check)
    metadata = {CHECK: check, LOWER_BOUND: 0 if or_zero else 1}
    return dataclasses.field(default=default, metadata=metadata)


def count_or_none(default: int) -> Any:
    """Returns a field for an int of at least 1, or None for no limit, which is not the default.

    Its flag takes 0 for None.
    """

    def check(name: str, value: Any) -> None:
        if value is not None and not (is_integer(value) and value >= 1):
            raise ValueError(
                f"`{name}` must be an int of at least 1, or None; got {shown(value)}. None sets no "
                "limit. Pass a count or None."
            )

    return dataclasses.field(default=default, metadata={CHECK: check, LOWER_BOUND: 0})


def choice(default: Any, choices: Sequence[Any]) -> Any:
    """Returns a field that accepts one of the given values."""

    def check(name: str, value: Any) -> None:
        check_choice(name, value, tuple(choices))

    return dataclasses.field(default=default, metadata={CHECK: check, CHOICES: tuple(choices)})


def switch(default: bool) -> Any:
    """Returns a field that accepts True or False."""
    return dataclasses.field(default=default, metadata={CHECK: check_bool})


def checked(default: Any, check: Check, **metadata: Any) -> Any:
    """Returns a field with the given check; None is allowed if it is the default."""
    check = optional(check) if default is None else check
    return dataclasses.field(default=default, metadata={CHECK: check, **metadata})


def optional(check: Check) -> Check:
    """Returns a check that accepts None and applies `check` to any other value."""

    def check_unless_none(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return check_unless_none


def check_seconds(name: str, value: Any) -> None:
    """Raises ValueError, naming the argument, unless `value` is a positive, finite number."""
    if not (is_number(value) and 0 < as_float(value) < math.inf):
        raise ValueError(
            f"`{name}` must be positive and finite, or None; got {shown(value)}. The value is an "
            "interval in seconds. Pass 600 for every ten minutes."
        )


def check_fields(group: Any) -> None:
    """Runs the check of every field of a group.

    Raises:
        TypeError, ValueError: for the first field whose value is not allowed.
    """
    for field in dataclasses.fields(group):
        if CHECK in field.metadata:
            field.metadata[CHECK](field.name, getattr(group, field.name))


def take_fields(group: type, arguments: dict[str, Any]) -> Any:
    """Returns a group whose fields have the values of the arguments with the same names.

    Numbers of NumPy become Python's, which can be written to JSON and compared with any tensor.
    """
    names = [field.name for field in dataclasses.fields(group)]
    return group(**{name: as_python(arguments[name]) for name in names})


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
