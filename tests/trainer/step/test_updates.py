"""Settings of updates; what they do is tested where they are used."""

import math
import re

import pytest

from trainer import Updates


@pytest.mark.parametrize("name", ["global_clipnorm", "clipnorm", "clipvalue"])
@pytest.mark.parametrize("bound", [0, -1.0, 1e39, 1e-50, math.inf, math.nan, True, "1"])
def test_a_bound_must_be_one_of_float32(name, bound):
    """The error names the bound and its value."""
    with pytest.raises(ValueError, match=rf"`{name}` must be .*; got {re.escape(repr(bound))}$"):
        Updates(**{name: bound})


def test_the_bound_that_is_set():
    """There is at most one, and by default none."""
    assert Updates(clipnorm=2.0).bounds == {"clipnorm": 2.0}
    assert Updates().bounds == {}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("global_clipnorm", {"global_clipnorm": 1.0, "clipnorm": 1.0}),
        *[("ema_momentum", {"ema_momentum": value}) for value in (0.0, 1.0, -0.5, "0.9", True)],
        ("updates_per_step", {"alternate_optimizers": True, "updates_per_step": {"critic": 0}}),
        ("updates_per_step", {"updates_per_step": {"critic": 5}}),
        ("reduce_dtype", {"reduce_dtype": "float8"}),
        ("reduce_bucket_bytes", {"reduce_bucket_bytes": 0}),
    ],
)
def test_values_that_cannot_be_used_are_refused(name, arguments):
    """The error names the field."""
    with pytest.raises((TypeError, ValueError), match=f"^`{name}` must "):
        Updates(**arguments)
