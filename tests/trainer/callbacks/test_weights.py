"""Copies of weights in memory, and the callback that keeps the best ones."""

import math

import keras
import numpy as np
import pytest
from helpers import Linear, slopes

from trainer import Trainer
from trainer.callbacks import BestWeights
from trainer.callbacks.weights import optimizers_of
from trainer.keras_compat import averages_of


def test_best_weights_are_kept_in_memory():
    """The weights of the best value can be put back after the run."""
    best = BestWeights("loss", mode="max")
    line = Linear(callbacks=[best], log_interval=1, verbose=False)
    with pytest.raises(RuntimeError, match="'loss' had no value"):
        best.restore()
    line.train(slopes(1.0), 3, global_batch=1)  # losses 1, 0, -1, each before its update
    assert (best.best, best.best_step, line.weight) == (1.0, 1, -2.0)
    best.restore()
    assert line.weight == 0.0


@pytest.mark.thorough  # takes seconds
def test_layers_unfrozen_after_the_best_value():
    """The best average of a weight that was frozen then, and so had none, is the weight itself."""
    keras.utils.set_random_seed(0)
    frozen = keras.layers.Dense(1, trainable=False)
    best = BestWeights("loss", mode="max")
    model = keras.Sequential([keras.Input([1]), frozen, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    line = Trainer(
        model=model,
        optimizer=optimizer,
        loss_fn="mse",
        callbacks=[best],
        log_interval=1,
        verbose=False,
    )
    x = np.ones([8, 1], np.float32)
    line.train((x, x), 2, global_batch=8)
    kept = frozen.kernel.numpy().copy()
    best.best = math.inf  # nothing later is better
    frozen.trainable = True
    line.train((x, x), 5, global_batch=8)
    assert not np.array_equal(frozen.kernel, kept)

    best.restore()

    assert np.array_equal(frozen.kernel, kept)
    averages = {id(weight): average for weight, average in averages_of(line.optimizer)}
    assert np.array_equal(averages[id(frozen.kernel)], kept)


class Holder:
    """Stands for a trainer."""

    def __init__(self, optimizer):
        """Holds it."""
        self.optimizer = optimizer


def test_every_optimizer_counts_once():
    """Those of a dict, and those inside a MultiOptimizer."""
    one, two = keras.optimizers.SGD(), keras.optimizers.Adam()
    assert optimizers_of(Holder(one)) == [one]
    assert optimizers_of(Holder({"a": one, "b": two})) == [one, two]
