"""Evaluations and predictions change no variable, draw random numbers of their own, and are compiled
as the step is.
"""

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import linear_model

from trainer import Trainer
from trainer.base.tracking import read_copies, tracked_variables

pytestmark = pytest.mark.sampled


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
    """A generator of TensorFlow's inside the model is restored, and still no two calls are alike."""
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


X = np.arange(12, dtype=np.float32).reshape(6, 2)
DATA = (X, X[:, :1])


class NoisyLayer(keras.layers.Layer):
    """Adds noise, in evaluations too, and counts its calls."""

    def __init__(self):
        """Creates the generator."""
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def build(self, _):
        """Adds the counter."""
        self.count = self.add_weight(shape=[], trainable=False, initializer="zeros")

    def call(self, x):
        """The inputs, the noise, and the count after this call."""
        self.count.assign(self.count + 1.0)
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seed) + self.count


def trainer_in(mode, layer=keras.layers.Identity, **arguments):
    """A trainer that has started."""
    trainer = Trainer(
        model=lambda: keras.Sequential([keras.Input([2]), layer(), keras.layers.Dense(1)]),
        optimizer=lambda: keras.optimizers.SGD(0.0),
        loss_fn="mse",
        jit_compile=mode,
        verbose=False,
        **arguments,
    )
    keras.utils.set_random_seed(1)
    trainer.train(DATA, steps=1, global_batch=2)
    return trainer


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [True, "step"])
def test_a_model_that_draws_and_assigns(mode):
    """What it draws and assigns is held back in the program, and belongs to this call alone."""
    trainer = trainer_in(mode, NoisyLayer)
    count = trainer.model.layers[0].count
    before = count.numpy()
    loss = trainer.evaluate(DATA, global_batch=2, precision="train")["loss"]
    outputs = trainer.predict(np.zeros_like(X), global_batch=2, precision="train")

    kernel = trainer.model.layers[1].get_weights()[0]
    noise = outputs - (before + 1.0) * kernel.sum()
    assert np.isfinite(loss)
    assert count.numpy() == before
    assert np.unique(noise).size == len(X)  # each batch draws numbers of its own
    assert np.abs(noise).max() < 5 * np.abs(kernel).sum()


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [False, True, "step"])
def test_the_results_are_those_without_xla(mode):
    """Loss and outputs, within rounding, for batches of two sizes."""
    trainer = trainer_in(mode)
    kernel, bias = trainer.model.layers[1].get_weights()
    expected = X @ kernel + bias
    outputs = trainer.predict(X, global_batch=4, precision="train")
    loss = trainer.evaluate(DATA, global_batch=4, precision="train")["loss"]

    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, np.mean((expected - X[:, :1]) ** 2), rtol=1e-5)


class Spelled(Trainer):
    """Predicts strings."""

    def predict_batch(self, batch):
        """The outputs, as text."""
        return tf.strings.as_string(self.model(batch), precision=1)


def test_a_prediction_that_xla_cannot_compile_ends_with_the_way_out():
    """The training step is compiled; the prediction cannot be, and the error's note says what to pass."""
    trainer = Spelled(
        model=lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        jit_compile=True,
        verbose=False,
    )
    trainer.train(DATA, steps=1, global_batch=2)
    with pytest.raises(tf.errors.OpError, match="AsString") as error:
        trainer.predict(X, global_batch=6, precision="train")
    assert any("jit_compile=False" in note for note in error.value.__notes__)


class Selecting(Trainer):
    """Uses the last of the rows that begin with a multiple of 4, in evaluations alone."""

    def last_of(self, x):
        """That row's first number, for each row."""
        kept = tf.boolean_mask(x, tf.math.floormod(x[:, 0], 4.0) < 1.0)
        return tf.repeat(kept[-1:, :1], tf.shape(x)[0], axis=0)

    def compute_loss(self, batch, training):
        """The outputs, or the selected number."""
        outputs = self.model(batch, training=training)
        return (outputs if training else self.last_of(batch))[:, 0]

    def predict_batch(self, batch):
        """The selected number."""
        return self.last_of(batch)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [False, True, "step"])
def test_sizes_that_depend_on_values(mode, caplog):
    """XLA would take the last row of the memory that it reserves, which was not selected."""
    trainer = Selecting(
        model=lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]),
        optimizer="sgd",
        jit_compile=mode,
        verbose=False,
    )
    rows = tf.data.Dataset.from_tensor_slices(X).batch(3)
    trainer.train(rows.repeat(), steps=1)
    found = trainer.predict(rows, precision="train")
    loss = trainer.evaluate(rows, precision="train")["loss"]
    assert (found[:, 0].tolist(), loss) == ([4.0, 4.0, 4.0, 8.0, 8.0, 8.0], 6.0)
    assert ("'boolean_mask/Where'" in caplog.text) == bool(mode)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [False, True, "step"])
def test_what_is_compiled(mode):
    """Passes in the training precision, if those of the step are; never those in float32."""
    trainer = trainer_in(mode)
    evaluator = trainer._parts.evaluator
    for precision in ("train", "float32"):
        trainer.evaluate(DATA, global_batch=2, precision=precision)
        trainer.predict(X, global_batch=2, precision=precision)
        for function in (evaluator._evaluate[precision], evaluator._predict[precision]):
            compiled = [
                each.attr["_XlaMustCompile"].b
                for trace in access.traces(function)
                for each in trace.graph.as_graph_def().library.function
            ]
            assert any(compiled) == (precision == "train" and mode is not False)
