"""Fields of a settings group: defaults and checks in one place."""

import dataclasses

import numpy as np
import pytest

from trainer.base.fields import (
    check_fields,
    checked,
    choice,
    count,
    switch,
)


def refuse_zero(name, value):
    """A check of a field's own."""
    if not value:
        raise ValueError(f"`{name}` must not be 0; got {value!r}")


@dataclasses.dataclass(frozen=True)
class Group:
    """A field of each kind."""

    steps: int = count(5)
    retries: int = count(0, least=0)
    limit: int | None = count(None)
    kept: int | None = count(3, optional=True)
    mode: str = choice("a", ["a", "b"])
    on: bool = switch(default=True)
    secs: float | None = checked(None, refuse_zero)
    free: object = None

    def __post_init__(self):
        """Checks the fields."""
        check_fields(self)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"steps": 1, "retries": 0, "limit": 3, "mode": "b", "on": False, "secs": 0.5, "free": []},
        {"limit": None, "kept": None, "secs": None},
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
        ("steps", True),
        ("steps", 2.0),
        ("retries", -1),
        ("limit", 0),
        ("kept", 0),
        ("mode", "c"),
        ("on", 1),
        ("secs", 0),
    ],
)
def test_bad_values_are_refused_by_name(name, value):
    """The error names the field and the value."""
    with pytest.raises((TypeError, ValueError), match=rf"^`{name}` must .*; got {value!r}"):
        Group(**{name: value})


def test_numbers_of_numpy_become_numbers_of_python():
    """They can be written to `run.json`, and computed with beside tensors of any dtype."""
    taken = Group(steps=np.int64(3), secs=np.float32(2))

    assert (type(taken.steps), type(taken.secs)) == (int, float)
