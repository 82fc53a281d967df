"""Batches of ragged and sparse tensors, strings and numbers that are not floats."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Trainer

pytestmark = pytest.mark.sampled

LENGTHS = [1, 3, 2, 4, 0, 2, 1]
Y = np.linspace(0.0, 1.0, 7, dtype=np.float32)[:, None]
WORDS = tf.RaggedTensor.from_row_lengths(tf.range(13) % 5, LENGTHS)
DENSE = np.eye(7, 4, dtype=np.float32) + np.eye(7, 4, -2, dtype=np.float32)
IMAGES = np.arange(7 * 3 * 3 * 2).reshape(7, 3, 3, 2) % 7


def bag_of_words(model, batch):
    """The sum of the words' vectors, of a ragged batch."""
    vectors = tf.cast(model(batch["x"].flat_values), tf.float32)
    rows = tf.cast(batch["x"].nrows(), tf.int32)
    return tf.math.unsorted_segment_sum(vectors, batch["x"].value_rowids(), rows) - batch["y"]


def sparse_inputs(model, batch):
    """The outputs for a sparse batch, made dense."""
    x = tf.sparse.to_dense(batch["x"])
    x.set_shape([None, 4])
    return tf.cast(model(x), tf.float32) - batch["y"]


def dense_inputs(model, batch):
    """The outputs for a dense batch."""
    return tf.cast(model(batch["x"]), tf.float32) - batch["y"]


def embedding():
    """A vector of 1 number for each of 5 words."""
    layer = keras.layers.Embedding(5, 1, embeddings_initializer="ones")
    return keras.Sequential([keras.Input([], dtype="int32"), layer])


def dense():
    """A linear model of 4 inputs."""
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    return keras.Sequential([keras.Input([4]), layer])


# What a batch holds, the model and its errors.
CASES = {
    "ragged": ({"x": WORDS}, embedding, bag_of_words),
    "sparse": ({"x": tf.sparse.from_dense(DENSE)}, dense, sparse_inputs),
    "strings": ({"x": DENSE, "name": np.array(list("abcdefg"))}, dense, dense_inputs),
    "flags": ({"x": DENSE, "flag": Y > 0, "small": Y.astype(np.uint8)}, dense, dense_inputs),
}


def data_of(what):
    """Batches of all rows, without end."""
    return tf.data.Dataset.from_tensor_slices(CASES[what][0] | {"y": Y}).batch(7).repeat()


def made(what, **settings):
    """A trainer."""
    _, build, errors = CASES[what]

    class Task(Trainer):
        def build_model(self):
            return build()

        def build_optimizer(self):
            return keras.optimizers.SGD(0.1)

        def compute_loss(self, batch, training):
            del training
            return errors(self.model, batch)[:, 0] ** 2

    return Task(verbose=False, **({"jit_compile": False} | settings))


def trained(what, replicas, microbatches, mirrored, **settings):
    """A trainer after two steps."""
    strategy = mirrored(replicas) if replicas > 1 else "default"
    trainer = made(what, strategy=strategy, num_microbatches=microbatches, **settings)
    trainer.train(data_of(what), steps=2)
    return trainer


def plain(what):
    """The weights after two steps of a plain loop over the whole batch."""
    parts, build, errors = CASES[what]
    model = build()
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(errors(model, parts | {"y": Y}) ** 2)
        slopes = tape.gradient(loss, model.trainable_variables)
        for variable, slope in zip(model.trainable_variables, slopes, strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(slope))
    return model.get_weights()


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize(("replicas", "microbatches"), [(1, 1), (3, 2)])
def test_batches_of_other_kinds_are_divided_right(what, replicas, microbatches, mirrored):
    """L8: ragged, sparse and other components are divided by examples, as dense ones are."""
    found = trained(what, replicas, microbatches, mirrored).model.get_weights()

    for one, other in zip(found, plain(what), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_strings_are_refused_by_xla(mirrored):
    """If XLA is to compile the passes, TensorFlow refuses them, with a note that says what to pass."""
    with pytest.raises(tf.errors.OpError) as error:
        trained("strings", 1, 1, mirrored, jit_compile=True)
    assert any("jit_compile=False" in note for note in error.value.__notes__)


@pytest.mark.parametrize(
    "what", ["strings", *(pytest.param(each, marks=pytest.mark.thorough) for each in CASES)]
)
def test_auto_takes_a_step_that_runs(what, mirrored):
    """In half precision "auto" begins with XLA on some processors, but not with what XLA does not
    support.
    """
    trainer = trained(what, 1, 1, mirrored, jit_compile="auto", precision="mixed_float16")

    assert trainer.totals.applied == 2
    assert trainer.jit_compile is False or what not in {"ragged", "strings"}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["uint8", "int32", "bool"])
def test_whole_numbers_go_straight_into_batch_norm(dtype):
    """BatchNormalization converts images of whole numbers as Keras does, in every compile mode."""

    def build():
        norm, flatten = keras.layers.BatchNormalization(), keras.layers.Flatten()
        last = keras.layers.Dense(1, kernel_initializer="ones")
        return keras.Sequential([keras.Input([3, 3, 2], dtype=dtype), norm, flatten, last])

    found = []
    for mode in (False, True):
        trainer = Trainer(
            model=build,
            optimizer=lambda: keras.optimizers.SGD(0.1),
            loss_fn="mse",
            jit_compile=mode,
            verbose=False,
        )
        data = tf.data.Dataset.from_tensors((IMAGES.astype(dtype), Y)).repeat()
        trainer.train(data, steps=2)
        found.append(trainer.model.get_weights())

    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def recurrent(kind="LSTM"):
    """A layer that continues the rows of the last batch, in a model for seven rows."""
    layer = getattr(keras.layers, kind)(2, stateful=True, name="memory")
    return keras.Sequential([keras.Input(batch_shape=[7, 3, 2]), layer, keras.layers.Dense(1)])


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_stateful_layers_move_as_in_a_plain_loop(kind):
    """L6: a state goes on from batch to batch, is reset by its owner, and stays if a step is skipped."""
    random = np.random.default_rng(3)
    x = random.normal(size=[6, 7, 3, 2]).astype("float32")
    y = random.normal(size=[6, 7, 1]).astype("float32")
    y[2] = np.inf  # this step is skipped

    class Sequences(Trainer):
        def on_loop_begin(self, step):
            if step == 4:
                self.model.get_layer("memory").reset_state()

    keras.utils.set_random_seed(1)
    plain = recurrent(kind)
    for step in (0, 1, 3, 4, 5):
        if step == 4:
            plain.get_layer("memory").reset_state()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((plain(x[step], training=True) - y[step]) ** 2)
        gradients = tape.gradient(loss, plain.trainable_variables)
        for variable, gradient in zip(plain.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
    keras.utils.set_random_seed(1)
    trainer = Sequences(
        model=recurrent(kind),
        optimizer=keras.optimizers.SGD(0.1),
        loss_fn="mse",
        steps_per_loop=1,
        verbose=False,
    )
    trainer.train(list(zip(x, y, strict=True)), steps=6)

    assert (trainer.totals.applied, trainer.totals.skipped) == (5, 1)
    for one, other in zip(trainer.model.variables, plain.variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_stateful_layers_are_refused_where_batches_are_divided(mirrored, microbatches):
    """A row would continue where another row ended."""
    trainer = Trainer(
        model=recurrent,
        optimizer="sgd",
        loss_fn="mse",
        verbose=False,
        num_microbatches=microbatches,
        strategy=mirrored(2) if microbatches == 1 else "default",
    )
    with pytest.raises(ValueError, match=r"`model`.*'memory'"):
        trainer.train([(np.ones([7, 3, 2], np.float32), Y)], steps=1)
