"""Calls that belong to no step are marked."""

import threading

import pytest

from trainer.base.trace_apart import apart, is_apart


def test_a_block_is_marked_until_it_ends():
    """Also if it ends with an error, and inside another block; other threads are not concerned."""
    elsewhere = []
    with pytest.raises(KeyError), apart():
        with apart():
            pass
        assert is_apart()
        other = threading.Thread(target=lambda: elsewhere.append(is_apart()))
        other.start()
        other.join()
        raise KeyError

    assert not is_apart()
    assert elsewhere == [False]
