"""Which data is read batch by batch in Python."""

import pytest
import tensorflow as tf
from data_sources import Batches, Shuffled, X, generate

from trainer.data.batches import batches
from trainer.data.choose_source import is_source


def test_what_is_a_source():
    """Arrays, datasets and functions of an input context are none."""
    none = [X, (X, X), {"x": X}, [X, X], tf.data.Dataset.range(3), lambda context: context, [[1.0]]]
    some = [Shuffled(), generate, generate(), Batches(), [(X, X)], iter([X])]

    assert not any(map(is_source, none))
    assert all(map(is_source, some))


def test_a_function_that_returns_a_dataset():
    """A function without parameters may return a tf.data.Dataset, which stays a pipeline."""
    found = batches(lambda: tf.data.Dataset.range(8).batch(4), "data", tf.distribute.get_strategy())

    assert found.reader is None
    assert found.steps_per_epoch == 2


def test_a_function_that_returns_no_iterable():
    """The error says what a function may return."""
    with pytest.raises(TypeError) as error:
        batches(lambda: 3, "train_data", tf.distribute.get_strategy())

    assert str(error.value) == (
        "`train_data` must return an iterable of batches if it is a function without parameters; "
        "got int. It is called once for each pass. Write a generator function, or one that takes a "
        "tf.distribute.InputContext and returns a tf.data.Dataset."
    )
