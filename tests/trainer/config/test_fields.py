"""Fields of a settings group: defaults and checks in one place."""

import dataclasses

import numpy as np
import pytest

from trainer.config.fields import (
    argument_texts,
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


def test_numbers_of_numpy_become_numbers_of_python():
    """They can be written to `run.json`, and computed with beside tensors of any dtype."""
    given = dataclasses.asdict(Group()) | {"steps": np.int64(3), "secs": np.float32(2)}
    taken = take_fields(Group, given)

    assert (type(taken.steps), type(taken.secs)) == (int, float)
    with pytest.raises(TypeError, match="`on` must be True or False"):
        take_fields(Group, given | {"on": np.bool_(1)})


def test_optional():
    """An optional check sees every value but None."""
    seen = []
    check = optional(lambda name, value: seen.append((name, value)))
    check("a", None)
    check("b", 0)

    assert seen == [("b", 0)]


def documented(doc):
    """A class with a docstring."""
    return type("Documented", (), {"__doc__": doc})


def test_texts_of_arguments():
    """Texts are collected from every "Args" section, each on one line with a capital first letter."""
    texts = argument_texts(
        documented("""Does something.

    Args: First
        one: the first
            argument: with a colon, and
            two lines more.
        two_2: "quoted".

    Text between sections: no argument.

    Args:
        three: last.

    Raises:
        ValueError: not an argument.

    Example:
        >>> four: 4
    """)
    )

    assert texts == {
        "one": "The first argument: with a colon, and two lines more.",
        "two_2": '"quoted".',
        "three": "Last.",
    }


@pytest.mark.parametrize(
    "doc",
    [
        None,
        "",
        "Has no section.",
        "Has another one.\n\n    Returns:\n        one: a result.\n    ",
        "Is empty.\n\n    Args:\n\n    Raises:\n        one: an error.\n    ",
    ],
)
def test_no_argument_has_a_text(doc):
    """A docstring without arguments yields no texts."""
    assert argument_texts(documented(doc)) == {}


def test_a_docstring_may_end_with_its_arguments():
    """The last line needs no line break after it."""
    assert argument_texts(documented("Is short.\n\n    Args:\n        one: x")) == {"one": "X"}
