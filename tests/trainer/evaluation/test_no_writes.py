"""Evaluations and predictions change no variable, and draw random numbers of their own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, all_copies, assert_same_bits, linear_model, slopes

from trainer import DataError, Trainer
from trainer.step.rollback import read_copies, variables_in_reach

pytestmark = pytest.mark.sampled


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
def test_an_evaluation_does_not_advance_seed_generators(mirrored, replicas):
    """Evaluations and predictions during training do not change what training draws from the model's
    seed generators, because they write to no variable.
    """

    class Noisy(Linear):
        def build_model(self):
            model = linear_model()
            model.noise = keras.random.SeedGenerator(5)
            return model

        def compute_loss(self, batch, training):
            noise = keras.random.normal([], seed=self.model.noise)
            return super().compute_loss(batch, training) * noise

        def predict_batch(self, batch):
            return super().predict_batch(batch) * keras.random.normal([], seed=self.model.noise)

    strategy = mirrored(replicas) if replicas > 1 else "default"
    data = slopes(*[1.0] * replicas)
    undisturbed = Noisy(strategy=strategy, seed=0, verbose=False)
    undisturbed.train(data, steps=4, global_batch=replicas)
    disturbed = Noisy(strategy=strategy, seed=0, verbose=False)
    for steps in (2, 4):
        disturbed.train(data, steps=steps, global_batch=replicas)
        disturbed.evaluate(data, global_batch=replicas)
        disturbed.predict(data["x"], global_batch=replicas)

    assert undisturbed.weight == disturbed.weight != 1.0
    assert_same_bits(all_copies(undisturbed), all_copies(disturbed))


class Centred(tf.Module):
    """Counts its calls and keeps a running mean in `tf.Variable`s, whatever it is called for."""

    def __init__(self):
        """A weight, the mean and a generator."""
        super().__init__()
        self.factor = tf.Variable(2.0)
        self.mean = tf.Variable(0.0, trainable=False)
        self.generator = tf.random.Generator.from_seed(1)

    def __call__(self, x):
        """Moves the mean, and draws."""
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x))
        return self.factor * (x - self.mean) + 0.01 * self.generator.normal([])


class CentredInKeras(keras.Model):
    """The same inside a Keras model."""

    def __init__(self):
        """Holds the module."""
        super().__init__()
        self.module, self.dense = Centred(), keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        """Calls the module and a layer."""
        return self.dense(self.module(inputs))


@pytest.mark.parametrize("make", [Centred, CentredInKeras])
@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_evaluation_leaves_variables_that_the_model_assigns(mirrored, make, replicas):
    """L12: evaluations and predictions between steps, also one that fails, change no bit of a run."""
    x = np.random.default_rng(0).normal(size=(24, 1)).astype(np.float32)

    def failing():
        yield x[:6], x[:6]
        raise OSError("gone")

    def weights_after(**arguments):
        trainer = Trainer(
            model=make,
            optimizer="sgd",
            loss_fn="mse",
            strategy=mirrored(replicas) if replicas > 1 else "default",
            seed=0,
            verbose=False,
        )
        for steps in (2, 4):
            trainer.train((x, x), steps=steps, global_batch=6, **arguments)
            if arguments:
                trainer.predict(x, global_batch=6)
                with pytest.raises(DataError):
                    trainer.evaluate(failing)
        found = variables_in_reach([trainer.model], held_back=())
        copies = tf.nest.flatten(read_copies(found, trainer.strategy))
        return [copy.numpy().tobytes() for copy in copies]

    assert weights_after() == weights_after(eval_data=(x, x), eval_interval=1)


def test_calls_draw_other_numbers_and_a_restart_the_same():
    """A generator of TensorFlow's inside the model is put back, and still no two calls are alike."""
    x = np.ones([4, 1], np.float32)

    def calls():
        trainer = Trainer(model=Centred, loss_fn="mse", seed=0, verbose=False)
        return [trainer.predict(x, global_batch=4).tobytes() for _ in range(3)]

    first = calls()
    assert len({*first}) == 3
    assert calls() == first
