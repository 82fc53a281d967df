"""The float8 formats against ml_dtypes."""

import ml_dtypes
import pytest

from scaling.float8.formats import FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_the_limits_are_those_of_ml_dtypes(name):
    """The largest number, and the dtype of that name."""
    assert FORMATS[name].largest == float(ml_dtypes.finfo(name).max)
    assert FORMATS[name].dtype.name == name
