"""Fields of a settings group: defaults and checks in one place."""

import dataclasses

import pytest

from trainer.config.fields import (
    check_fields,
    check_seconds,
    checked,
    choice,
    count,
    optional,
    switch,
    take_fields,
)


@dataclasses.dataclass(frozen=True)
class Group:
    """A field of each kind."""

    steps: int = count(5)
    retries: int = count(0, or_zero=True)
    limit: int | None = count(None)
    mode: str = choice("a", ["a", "b"])
    on: bool = switch(default=True)
    secs: float | None = checked(None, check_seconds)
    free: object = None

    def __post_init__(self):
        """Checks the fields."""
        check_fields(self)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"steps": 1, "retries": 0, "limit": 3, "mode": "b", "on": False, "secs": 0.5, "free": []},
        {"limit": None, "secs": None},
    ],
)
def test_valid_values_are_accepted(arguments):
    """Defaults pass their own checks, and None is allowed where it is the default."""
    assert dataclasses.asdict(Group(**arguments)).items() >= arguments.items()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("steps", None),
        ("retries", -1),
        ("limit", 0),
        ("mode", "c"),
        ("on", 1),
        ("secs", 0),
        ("secs", "10"),
    ],
)
def test_bad_values_are_refused_by_name(name, value):
    """The error names the field and the value."""
    with pytest.raises((TypeError, ValueError), match=rf"^`{name}` must .*; got {value!r}"):
        Group(**{name: value})


def test_take_fields():
    """A group takes the arguments with its fields' names out of many."""
    arguments = dataclasses.asdict(Group(steps=7)) | {"other": 1}

    assert take_fields(Group, arguments) == Group(steps=7)


def test_optional():
    """An optional check sees every value but None."""
    seen = []
    check = optional(lambda name, value: seen.append((name, value)))
    check("a", None)
    check("b", 0)

    assert seen == [("b", 0)]
