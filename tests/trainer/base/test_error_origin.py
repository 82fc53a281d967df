"""Tests of whose code raised an error."""

import json

import pytest

from trainer.base.argument_checks import check_count
from trainer.base.error_origin import raising_package


@pytest.mark.parametrize(
    ("call", "package"),
    [
        (lambda: json.loads("{"), "json"),
        (lambda: check_count("steps", 0), "scaling"),
        (lambda: 1 / 0, __name__.split(".")[0]),
    ],
)
def test_the_line_that_raised_counts(call, package):
    """Not the code that called it: a check of `scaling` that `trainer` calls is `scaling`'s."""
    with pytest.raises((ValueError, ZeroDivisionError)) as error:
        call()

    assert raising_package(error.value) == package
