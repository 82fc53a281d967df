"""Data that Python makes batch by batch, and the two laws that hold for all of it."""

import itertools

import keras
import numpy as np
import tensorflow as tf
from helpers import Linear

from trainer import Monitoring
from trainer.data.batches import batches
from trainer.data.source_position import position_in

X = np.arange(20, dtype=np.float32)[:, None]


class Shuffled(keras.utils.PyDataset):
    """Five batches of four numbers, in a new order in each pass."""

    def __init__(self, **arguments):
        """Begins with the order of the numbers."""
        super().__init__(**arguments)
        self.generator, self.order, self.calls = np.random.default_rng(3), np.arange(20), []

    def __len__(self):
        """The number of batches."""
        return 5

    def __getitem__(self, index):
        """One batch."""
        return {"x": X[self.order[4 * index : 4 * index + 4]]}

    def on_epoch_begin(self):
        """Notes the call."""
        self.calls.append("begin")

    def on_epoch_end(self):
        """Shuffles the numbers."""
        self.calls.append("end")
        self.order = self.generator.permutation(20)


def generate():
    """Yields the five batches."""
    for start in range(0, 20, 4):
        yield {"x": X[start : start + 4]}


class Batches:
    """An iterable of batches that knows its length."""

    def __iter__(self):
        """A new generator."""
        return generate()

    def __len__(self):
        """The number of batches."""
        return 5


def begin(data, resume_mode="exact"):
    """A position at the beginning, whose places are kept."""
    found = batches(data, "train_data", tf.distribute.get_strategy())
    position = position_in(found, resume_mode)
    position.check_savable()
    return position


def take(position, count):
    """The numbers in the next batches."""
    taken = [next(position.iterator)["x"].numpy().ravel().tolist() for _ in range(count)]
    position.taken += count
    return taken


def assert_found_again(make, folder):
    """Asserts that a new object of the same data goes on with the next batch, in the middle and at the
    end of a pass, and in the passes after it.
    """
    whole = begin(make())
    expected = take(whole, 17)
    for steps in (5, 7):
        stopped = begin(make())
        assert take(stopped, steps) == expected[:steps]
        stopped.write(str(folder))
        resumed = begin(make())
        resumed.read(folder, steps)
        assert take(resumed, 17 - steps) == expected[steps:]
        assert resumed.taken == 17

    assert sorted(itertools.chain(*expected[:5])) == X.ravel().tolist()


class Scaled(Linear):
    """An example's loss is the product of its prediction and its number, between 0 and 1."""

    def compute_loss(self, batch, training):
        """The product."""
        numbers = batch["x"] / 20
        predictions = tf.cast(self.model(numbers, training=training), tf.float32)
        return predictions[:, 0] * numbers[:, 0]


def assert_trains(make, strategy, folder):
    """Asserts that a source trains as a tf.data pipeline of its batches does, in float16, and with the
    same bits if the run is stopped in the middle of a pass and resumed.
    """
    rows = np.concatenate([np.reshape(each, [-1, 1]) for each in take(begin(make()), 7)])
    same = tf.data.Dataset.from_tensor_slices({"x": rows.astype(np.float32)}).batch(4)

    def trained(data, *targets, model_dir=None):
        for target in targets:
            trainer = Scaled(
                precision="mixed_float16",
                strategy=strategy,
                model_dir=model_dir,
                monitoring=Monitoring(check_gradients=False),
                verbose=False,
            )
            trainer.train(data(), steps=target)
        return trainer.weight

    expected = trained(lambda: same, 7)
    assert expected != 1.0
    assert trained(make, 7) == expected
    assert trained(make, 3, 7, model_dir=folder) == expected
