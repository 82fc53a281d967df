"""Generators, lists and iterables: what they yield, and how their position is found again."""

import numpy as np
import pytest
import tensorflow as tf
from data_sources import Batches, assert_found_again, assert_trains, generate

from trainer.data.batches import batches

SOURCES = {
    "generator function": lambda: generate,
    "function": lambda: lambda: generate(),  # noqa: PLW0108  # is not a generator function
    "iterable": Batches,
    "list": lambda: list(generate()),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_position_is_found_again(kind, tmp_path):
    """A new object of the same data goes on with the next batch, in the middle and at the end of a
    pass, and in the passes after it.
    """
    assert_found_again(SOURCES[kind], tmp_path)


def test_an_array_may_be_filled_again():
    """A generator may use one array for all batches. The first two are read in advance."""

    def refilled():
        rows = np.zeros([2, 1], np.float32)
        for number in range(4):
            rows[:] = number
            yield rows

    found = batches(refilled, "data", tf.distribute.get_strategy())
    assert [batch.numpy().tolist() for batch in found.dataset] == [[[n], [n]] for n in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "kind", ["generator function", pytest.param("list", marks=pytest.mark.slow)]
)
def test_a_source_trains_as_a_dataset_does(mirrored, kind, replicas, tmp_path):
    """In float16, a source and a dataset of the same batches end with the same weight, also after a
    resume.
    """
    assert_trains(SOURCES[kind], mirrored(replicas), tmp_path)
