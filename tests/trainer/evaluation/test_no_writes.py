"""Evaluations and predictions change no variable, and draw random numbers of their own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, all_copies, assert_same_bits, linear_model, slopes

from trainer import Trainer
from trainer.base.tracking import read_copies, tracked_variables

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


@pytest.mark.thorough
@pytest.mark.parametrize("make", [Centred, CentredInKeras])
@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_evaluation_leaves_variables_that_the_model_assigns(mirrored, make, replicas):
    """L12: evaluations and predictions between steps, also one that fails, change no bit of a run."""
    x = np.random.default_rng(0).normal(size=(24, 1)).astype(np.float32)

    def failing():
        yield from [(x[:6], x[:6])] * 3
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
                with pytest.raises(tf.errors.OpError, match="gone"):
                    trainer.evaluate(failing)
        found = tracked_variables([trainer.model])
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


class Noisy(Trainer):
    """A loss with noise, from a generator of the kind and place that are given."""

    def __init__(self, kind, place, **arguments):
        """Makes the generator, if it is the trainer's own."""
        super().__init__(
            model=linear_model,
            optimizer=lambda: keras.optimizers.SGD(0.1),
            verbose=False,
            **arguments,
        )
        makes = {
            "keras": lambda: keras.random.SeedGenerator(5),
            "tensorflow": lambda: tf.random.Generator.from_seed(5),
        }
        self.kind, self.make = kind, makes[kind]
        with self.strategy.scope():
            self.own = self.make() if place == "trainer" else None

    def build_model(self):
        """The model, with the generator if it is the model's."""
        model = super().build_model()
        if self.own is None:
            model.noise = self.make()
        return model

    def compute_loss(self, batch, training):
        """The noise of each example, and the error."""
        source, shape = self.own or self.model.noise, tf.shape(batch[1])
        of_tensorflow = self.kind == "tensorflow"
        noise = source.normal(shape) if of_tensorflow else keras.random.normal(shape, seed=source)
        return (self.model(batch[0], training=training)[:, 0] - batch[1]) ** 2 + noise


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["model", "trainer"])
@pytest.mark.parametrize("kind", ["keras", "tensorflow"])
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_the_same_weights_have_the_same_result(mirrored, replicas, kind, place):
    """What an evaluation draws depends on the seed and the batch's number alone: not on the step, on
    other evaluations, or on the data sets before it; and training draws as without evaluations.
    """
    x = np.ones([8, 1], np.float32)
    data = x, x[:, 0]
    strategy = mirrored(replicas) if replicas > 1 else "default"

    def make(**arguments):
        return Noisy(kind, place, **{"strategy": strategy, "seed": 0} | arguments)

    trainer, other = make(), make()
    for each in (trainer, other):
        each.train(data, steps=1, global_batch=4)
    first = trainer.evaluate(data, global_batch=4)
    trainer.predict(x, global_batch=4)
    named = trainer.evaluate({"short": (x[:4], x[:4, 0]), "long": data}, global_batch=4)

    assert trainer.evaluate(data, global_batch=4) == first == other.evaluate(data, global_batch=4)
    assert named["long/loss"] == first["loss"] != named["short/loss"]  # each batch has its own
    before = trainer.model.get_weights()
    during = []
    for each in (trainer, other):
        each.optimizer.learning_rate = 0.0
        watched = {"eval_data": data, "eval_interval": 1} if each is trainer else {}
        summary = each.train(data, steps=4, global_batch=4, **watched)
        during += [summary.history["loss"].tolist()]
        each.optimizer.learning_rate = 0.1
        each.train(data, steps=6, global_batch=4)
    assert during[0] == during[1]
    np.testing.assert_array_equal(trainer.model.get_weights(), other.model.get_weights())
    evaluated = make()
    evaluated.model.set_weights(before)
    assert evaluated.evaluate(data, global_batch=4) == first
    if kind == "keras":  # a generator of TensorFlow has a seed of its own
        assert make(seed=1).evaluate(data, global_batch=4) != make().evaluate(data, global_batch=4)
