"""Seeding of the global random generators for a block of code."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Trainer
from trainer.base.scoped_seed import ScopedSeed, random_state

X = np.linspace(0, 1, 8, dtype="float32")[:, None]


def draws():
    """Numbers from generators that are restored; Keras's initializers draw from Python's."""
    return [
        random.random(),  # noqa: S311  # the global generator is meant
        float(np.random.rand()),  # noqa: NPY002  # the global generator is meant
        float(tf.random.uniform([])),
        float(keras.initializers.RandomUniform()([1])[0]),
    ]


def same(one, other):
    """Whether two states are the same."""
    numpy = one.numpy["state"], other.numpy["state"]
    return (
        one.python == other.python
        and numpy[0]["pos"] == numpy[1]["pos"]
        and np.array_equal(numpy[0]["key"], numpy[1]["key"])
        and one.tensorflow == other.tensorflow
    )


@pytest.fixture(params=[None, 5], ids=["unseeded program", "seeded program"])
def program(request):
    """A program that has seeded the global generators, or TensorFlow's not."""
    keras.utils.set_random_seed(5)
    tf.random.set_seed(request.param)
    yield request.param
    keras.utils.set_random_seed(0)


def line(seed=3, **arguments):
    """A small trainer with dropout and a shuffled dataset."""

    def model():
        hidden = [keras.layers.Dense(2), keras.layers.Dropout(0.5)]
        return keras.Sequential([keras.Input([1]), *hidden, keras.layers.Dense(1)])

    def optimizer():
        return keras.optimizers.SGD(0.1 * random.random())  # noqa: S311  # any number

    return Trainer(
        model=model,
        optimizer=optimizer,
        loss_fn="mse",
        seed=seed,
        verbose=False,
        **arguments,
    )


@pytest.mark.usefixtures("program")
def test_blocks_continue():
    """The blocks draw what one seeded program draws, whatever is drawn between them. Only the
    generator of `keras.random` is not restored.
    """

    def all_draws():
        return [*draws(), float(keras.random.uniform([]))]

    keras.utils.set_random_seed(3)
    expected = [*all_draws(), *all_draws()]
    seeded = ScopedSeed(3)
    with seeded.in_use():
        first = all_draws()
        with seeded.in_use():  # the same generators, not a block of its own
            pass
    draws()
    with seeded.in_use():
        second = all_draws()
    assert [*first, *second] == expected
    with seeded.in_use(from_start=True):
        assert draws() == first[:-1]


@pytest.mark.usefixtures("program")
def test_a_block_that_raises_puts_everything_back():
    """The generators are restored, and the next block begins where the failed one began."""
    seeded, before = ScopedSeed(3), random_state()
    failed = []

    def draw_and_fail():
        with seeded.in_use():
            failed.extend(draws())
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011  # any error
        draw_and_fail()
    assert same(before, random_state())
    with seeded.in_use():
        assert draws() == failed


@pytest.mark.thorough
@pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept:DeprecationWarning"  # of Keras, in `save`
)
@pytest.mark.usefixtures("program")
def test_a_trainer_leaves_the_global_generators_as_it_found_them(tmp_path):
    """To build, train, evaluate, predict, save and export moves none of them, so that a program draws
    between trainers what it draws without trainers; and a trainer draws the same in any program.
    """
    keras.utils.set_random_seed(8)
    expected = [draws(), draws()]
    keras.utils.set_random_seed(8)
    found, losses = [], []
    for folder in ("a", "b"):
        before = random_state()
        trainer = line(model_dir=tmp_path / folder)
        trainer.train((X, 3 * X), steps=2, global_batch=8, eval_data=(X, 3 * X))
        trainer.predict(X, global_batch=8)
        losses.append(trainer.evaluate((X, 3 * X), global_batch=8)["loss"])
        trainer.export(tmp_path / folder / "float32.keras", precision="float32")
        assert same(before, random_state())
        found.append(draws())
    assert found == expected
    assert losses[0] == losses[1]


def test_without_a_seed_a_model_draws_like_any_keras_model():
    """With seed=None two models differ, and follow `keras.utils.set_random_seed`."""
    keras.utils.set_random_seed(4)
    expected = line().build_model().get_weights()[0]
    keras.utils.set_random_seed(4)
    one, other = line(None).model, line(None).model
    assert np.array_equal(one.get_weights()[0], expected)
    assert not np.array_equal(one.get_weights()[0], other.get_weights()[0])
