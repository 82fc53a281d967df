"""Finds a learning rate by a short run in which it grows."""

import functools

import keras
import numpy as np
import pytest
from helpers import linear_model

from trainer import Trainer
from trainer.callbacks import find_learning_rate

X = np.ones([4, 1], np.float32)


def make(**settings):
    """A trainer whose loss is (weight - 3) ** 2: SGD diverges at rates above 1."""
    return Trainer(
        model=linear_model, optimizer=lambda: keras.optimizers.SGD(0.1), loss_fn="mse", **settings
    )


@pytest.mark.parametrize(
    "precision", ["float32", pytest.param("mixed_float16", marks=pytest.mark.thorough)]
)
def test_the_suggestion_is_below_the_rate_that_diverges(precision):
    """The loss falls at the suggested rate, and the search ends soon after it has grown."""
    one = functools.partial(make, precision=precision, jit_compile=False)
    found = find_learning_rate(one, (X, 3 * X), global_batch=4, max_lr=100.0, steps=60)

    assert 0.01 < found.suggestion < 1.0
    assert 1.0 < found.rates[-1] < 100.0
    assert np.all(np.diff(found.rates) > 0)
    assert len(found.losses) == len(found.rates)


def test_what_cannot_be_searched_is_an_error(tmp_path):
    """Too few steps, settings that do not reach the trainer, and the folder of a run, which would go
    on from the weights and the last learning rate of the search.
    """
    with pytest.raises(ValueError, match="`steps`"):
        find_learning_rate(make, (X, X), global_batch=4, steps=3)
    with pytest.raises(ValueError, match="`make`"):
        find_learning_rate(lambda **_: make(), (X, X), global_batch=4)
    with pytest.raises(ValueError, match="`make`"):
        find_learning_rate(functools.partial(make, model_dir=tmp_path), (X, X), global_batch=4)


@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_noise_in_the_first_losses_does_not_decide(seed):
    """Losses of small batches jump while the rate is far too small to move the weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(512, 8)).astype(np.float32)
    y = (x @ rng.normal(size=8) + rng.normal(size=512) > 0).astype(np.int32)

    def one(**settings):
        return Trainer(
            model=lambda: keras.Sequential([keras.Input([8]), keras.layers.Dense(2)]),
            optimizer=lambda: keras.optimizers.SGD(0.1),
            loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            seed=seed,
            jit_compile=False,
            **settings,
        )

    assert 0.01 < find_learning_rate(one, (x, y), global_batch=16, max_lr=10.0).suggestion < 1.0
