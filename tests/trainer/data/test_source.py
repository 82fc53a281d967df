"""Generators, lists and iterables: what they yield, and how their position is found again."""

import keras
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


@pytest.mark.sampled
@pytest.mark.parametrize("kind", SOURCES)
def test_a_position_is_found_again(kind, tmp_path):
    """A new object of the same data goes on with the next batch, in the middle and at the end of a
    pass, and in the passes after it.
    """
    assert_found_again(SOURCES[kind], tmp_path)


class Refilled(keras.utils.PyDataset):
    """Batches in one array, which is filled again for each; TensorFlow takes over aligned memory.

    Args:
        offset: distance of the array from an aligned address, in bytes.
    """

    def __init__(self, offset):
        """Makes the array."""
        super().__init__()
        memory = np.zeros(256, np.uint8)
        start = -memory.ctypes.data % 64 + offset
        self.rows = memory[start : start + 8].view(np.float32).reshape(2, 1)

    def __len__(self):
        """Returns the number of batches."""
        return 6

    def __getitem__(self, number):
        """Returns the array, filled with a number."""
        self.rows[:] = number
        return self.rows


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize(
    "kind", ["generator", pytest.param("PyTorch", marks=pytest.mark.extras), "PyDataset"]
)
def test_an_array_may_be_filled_again(kind, offset):
    """One array for all batches: the first two are read in advance, and others are read ahead."""
    source = Refilled(offset)
    of_torch = pytest.importorskip("torch").from_numpy if kind == "PyTorch" else np.asarray

    def refilled():
        for number in range(6):
            yield of_torch(source[number])

    data = source if kind == "PyDataset" else refilled
    found = batches(data, "data", tf.distribute.get_strategy())
    read = list(found.dataset.prefetch(6))
    assert [batch.numpy().tolist() for batch in read] == [[[n], [n]] for n in range(6)]


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
