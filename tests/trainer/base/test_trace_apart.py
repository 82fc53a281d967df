"""Calls that belong to no step are marked."""

import threading

import pytest

from trainer.base.trace_apart import apart, is_apart


def test_a_block_is_marked_until_it_ends():
    """Also after another block inside it. Other threads are not concerned."""
    elsewhere = []
    with apart():
        with apart():
            pass
        assert is_apart()
        other = threading.Thread(target=lambda: elsewhere.append(is_apart()))
        other.start()
        other.join()

    assert not is_apart()
    assert elsewhere == [False]


def test_an_error_ends_a_block():
    """What is called after a refusal belongs to a step again."""
    with pytest.raises(KeyError), apart():
        raise KeyError

    assert not is_apart()
