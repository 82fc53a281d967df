"""Fields of a settings group: each holds its default and its check, from which flags are made too.

A group is a frozen dataclass whose fields have the names of the trainer's arguments:

    @dataclasses.dataclass(frozen=True)
    class Example:
        max_to_keep: int = count(5)

        def __post_init__(self):
            check_fields(self)
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from scaling.base.argument_checks import is_number
from trainer.base.argument_checks import check_bool, check_choice, check_count, check_nonnegative

Check = Callable[[str, Any], None]  # (name, value): raises TypeError or ValueError

CHECK, CHOICES, LOWER_BOUND = "check", "choices", "lower_bound"  # keys of a field's metadata


def count(default: int | None, *, or_zero: bool = False) -> Any:
    """Returns a field for an int of at least 1 (or 0). None is allowed if it is the default."""
    check: Check = check_nonnegative if or_zero else check_count
    if default is None:
        check = optional(check)
    metadata = {CHECK: check, LOWER_BOUND: 0 if or_zero else 1}
    return dataclasses.field(default=default, metadata=metadata)


def choice(default: Any, choices: Sequence[Any]) -> Any:
    """Returns a field for one of several values."""

    def check(name: str, value: Any) -> None:
        check_choice(name, value, tuple(choices))

    return dataclasses.field(default=default, metadata={CHECK: check, CHOICES: tuple(choices)})


def switch(default: bool) -> Any:
    """Returns a field for True or False."""
    return dataclasses.field(default=default, metadata={CHECK: check_bool})


def checked(default: Any, check: Check, **metadata: Any) -> Any:
    """Returns a field with a check of its own; None is allowed if it is the default."""
    check = optional(check) if default is None else check
    return dataclasses.field(default=default, metadata={CHECK: check, **metadata})


def optional(check: Check) -> Check:
    """Returns a check that passes None."""

    def check_unless_none(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return check_unless_none


def check_seconds(name: str, value: Any) -> None:
    """Raises ValueError, naming the argument, unless `value` is a positive time."""
    if not (is_number(value) and value > 0):
        raise ValueError(
            f"`{name}` must be positive, or None; got {value!r}. It is a time in seconds. 600 is "
            "every ten minutes."
        )


def check_fields(group: Any) -> None:
    """Runs the check of every field of a group.

    Raises:
        TypeError, ValueError: naming the first argument that is refused.
    """
    for field in dataclasses.fields(group):
        if CHECK in field.metadata:
            field.metadata[CHECK](field.name, getattr(group, field.name))


def take_fields(group: type, arguments: dict[str, Any]) -> Any:
    """Returns a group made from those arguments that have the names of its fields."""
    return group(**{field.name: arguments[field.name] for field in dataclasses.fields(group)})


def argument_texts(cls: type) -> dict[str, str]:
    """Returns what a class's docstring says of each argument, as one line that starts in capitals.

    The docstring is the one place for these texts; flags take their help from it. Its arguments
    stand in sections "Args:" or "Args: TITLE".

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
