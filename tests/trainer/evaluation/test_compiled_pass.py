"""An evaluation in the training precision is compiled as the step is, if XLA can compile it."""

import dataclasses

import access
import keras
import numpy as np
import pytest
import tensorflow as tf

import strategies
from trainer import Trainer
from trainer.evaluation.compiled_pass import compiled_pass

X = np.arange(12, dtype=np.float32).reshape(6, 2)
DATA = (X, X[:, :1])


class Noisy(keras.layers.Layer):
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
    trainer = trainer_in(mode, Noisy)
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


def test_a_prediction_that_xla_cannot_compile_goes_on_without(caplog):
    """The training step is compiled; the prediction is not, and says why."""
    trainer = Spelled(
        model=lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        jit_compile=True,
        verbose=False,
    )
    trainer.train(DATA, steps=1, global_batch=2)
    texts = trainer.predict(X, global_batch=6, precision="train")
    assert [float(text) for [text] in texts] == pytest.approx(
        trainer.model.predict(X, verbose=0)[:, 0].tolist(), abs=0.06
    )
    assert "runs without XLA, as it cannot compile 'AsString'" in caplog.text


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
    assert ("behind 'boolean_mask/Where', sized by values" in caplog.text) == bool(mode)


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


def result_in_graph(run, strategy):
    """What `compiled_pass` returns in a traced function, and whether it was compiled."""

    @tf.function(autograph=False)
    def outer():
        return compiled_pass(run, strategy)

    library = outer.get_concrete_function().graph.as_graph_def().library
    compiled = any(each.attr["_XlaMustCompile"].b for each in library.function)
    return outer(), compiled


def test_strings_from_outside_cannot_be_read(caplog):
    """An operation that has a kernel of XLA's for numbers may take strings from around the pass."""
    words = tf.constant(["a", "b"])
    strategy = tf.distribute.get_strategy()
    result, compiled = result_in_graph(lambda: tf.identity(words), strategy)
    assert (result.numpy().tolist(), compiled) == ([b"a", b"b"], False)
    assert "'an input of strings'" in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_int32_variable_on_a_gpu_cannot_be_read(monkeypatch, caplog, on_gpu):
    """TensorFlow keeps it in the host's memory."""
    capabilities = strategies.capabilities
    monkeypatch.setattr(
        strategies,
        "capabilities",
        lambda strategy: dataclasses.replace(capabilities(strategy), on_cpu=not on_gpu),
    )
    variable = tf.Variable(3)
    result, compiled = result_in_graph(lambda: variable + 1, tf.distribute.get_strategy())
    assert (int(result), compiled) == (4, not on_gpu)
    assert ("'ReadVariableOp'" in caplog.text) == on_gpu
