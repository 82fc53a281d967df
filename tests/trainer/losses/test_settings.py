"""Settings of losses; what they do is tested where they are used."""

import pytest

from trainer import Losses


def test_an_unknown_reduction_is_refused():
    """The names are not those of Keras, whose "sum" is none of a batch in parts."""
    with pytest.raises(ValueError, match=r"^`reduction` must "):
        Losses(reduction="sum")
