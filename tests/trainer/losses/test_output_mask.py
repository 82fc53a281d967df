"""The Keras mask of a model's outputs is known before the forward pass."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import attempt

from trainer import Trainer
from trainer.losses.output_mask import check_mask_values, mask_of_outputs

LAYERS = keras.layers
IDS = np.int32([[3, 1, 0, 0], [2, 0, 0, 0], [1, 2, 3, 1], [0, 0, 0, 0], [1, 0, 2, 0]])


class Marking(LAYERS.Layer):
    """Masks what is negative, and counts its calls."""

    def build(self, shape):
        """Creates the count."""
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros")

    def call(self, inputs):
        """Returns its inputs."""
        self.calls.assign(self.calls + 1)
        return inputs

    def compute_mask(self, inputs, mask=None):
        """Where the first number of an element is not negative."""
        return inputs[:, :, 0] >= 0


def tagger():
    """Logits for each token, with a recurrent layer; token 0 is masked."""
    seeds = iter(range(3, 9))
    make = lambda: keras.initializers.GlorotUniform(next(seeds))  # noqa: E731
    return keras.Sequential(
        [
            keras.Input([None], dtype="int32"),
            LAYERS.Embedding(4, 3, mask_zero=True, embeddings_initializer=make()),
            LAYERS.SimpleRNN(
                4,
                return_sequences=True,
                kernel_initializer=make(),
                recurrent_initializer=make(),
            ),
            LAYERS.Dense(3, kernel_initializer=make()),
        ]
    )


def test_the_mask_is_computed_from_the_inputs_alone():
    """The mask is the model's; its graph reads no variable and multiplies nothing."""
    model = tagger()
    traced = tf.function(lambda ids: mask_of_outputs(model, ids), autograph=False)
    graph = traced.get_concrete_function(tf.constant(IDS)).graph.as_graph_def()
    kinds = {node.op for body in graph.library.function for node in body.node_def}
    called = [node for node in graph.node if "Call" in node.op]

    assert mask_of_outputs(model, tf.constant(IDS)).numpy().tolist() == (IDS != 0).tolist()
    assert traced(tf.constant(IDS)).numpy().tolist() == (IDS != 0).tolist()
    assert [node.op for node in called] == ["PartitionedCall"]  # not a stateful one
    assert "NotEqual" in kinds


def test_a_layer_s_own_mask_is_found_and_nothing_is_assigned():
    """A layer that overrides `compute_mask` makes masks; calling it to find them changes nothing."""
    layer = Marking()
    model = keras.Sequential([keras.Input([None, 1]), layer])
    found = mask_of_outputs(model, tf.constant([[[1.0], [-1.0]]]))

    assert found.numpy().tolist() == [[True, False]]
    assert int(layer.calls) == 0


def test_models_without_masks_cost_nothing():
    """A model whose layers only pass masks on is not even traced."""

    class Untraceable(keras.Model):
        def call(self, inputs):
            raise AssertionError

    assert mask_of_outputs(Untraceable(), tf.ones([2, 3])) is None
    assert mask_of_outputs(tf.Module(), tf.ones([2, 3])) is None


HIDDEN = LAYERS.Masking()


def test_a_mask_that_no_layer_announces_is_refused():
    """A mask that appears only in the forward pass would not be in the weights."""

    class Hiding(keras.Model):
        def call(self, inputs):
            return HIDDEN(inputs)  # no layer of the model

    x = np.ones([2, 3, 1], np.float32)
    with pytest.raises(ValueError, match="`model`"):
        Trainer(model=Hiding, loss_fn="mse", verbose=False).evaluate((x, x), global_batch=2)


@pytest.mark.parametrize(("value", "dtype"), [(-999.0, "bfloat16"), (-99.9, "float16")])
def test_a_mask_value_that_half_precision_lacks_is_refused(value, dtype):
    """Keras rounds the inputs but not the value, so nothing would be masked."""
    check_mask_values(keras.Sequential([LAYERS.Masking(-1.0, dtype=dtype)]))
    check_mask_values(keras.Sequential([LAYERS.Masking(value, dtype="float32")]))
    with pytest.raises(ValueError, match="`mask_value`"):
        check_mask_values(keras.Sequential([LAYERS.Masking(value, dtype=dtype)]))


def words(*layers):
    """Embedded words with a mask, joined with what some layers make of them, into three classes."""
    tokens = keras.Input([None], dtype="int32")
    embedded = LAYERS.Embedding(3, 4, mask_zero=True, embeddings_initializer=uniform(0))(tokens)
    found = embedded
    for layer in layers:
        found = layer(found)
    joined = LAYERS.Concatenate()([found, embedded])
    return keras.Model(tokens, LAYERS.Dense(3, kernel_initializer=uniform(1))(joined))


def strings():
    """Words as text: the lookup does not tell the rank of its mask."""
    text = keras.Input([None], dtype="string")
    lookup = LAYERS.StringLookup(vocabulary=["a", "b"], mask_token="")
    embedding = LAYERS.Embedding(4, 4, mask_zero=True, embeddings_initializer=uniform(0))
    found = LAYERS.GRU(
        4, return_sequences=True, kernel_initializer=uniform(2), recurrent_initializer=uniform(3)
    )
    return keras.Model(
        text, LAYERS.Dense(3, kernel_initializer=uniform(1))(found(embedding(lookup(text))))
    )


def uniform(seed):
    """An initializer."""
    return keras.initializers.RandomUniform(-0.5, 0.5, seed=seed)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make",
    [
        lambda: words(LAYERS.Dropout(1e-9)),
        lambda: words(LAYERS.BatchNormalization()),
        pytest.param(
            lambda: words(
                LAYERS.LSTM(
                    4,
                    dropout=1e-9,
                    return_sequences=True,
                    kernel_initializer=uniform(2),
                    recurrent_initializer=uniform(3),
                )
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(strings, marks=pytest.mark.thorough),
    ],
    ids=["dropout", "norm", "lstm", "strings"],
)
def test_a_mask_may_pass_a_concatenation_and_a_lookup(make):
    """A Concatenate makes a mask of the shape of an input alone, whatever layer that comes from."""
    ids = np.random.default_rng(0).integers(1, 3, size=(8, 5)).astype(np.int32)
    ids[::2, 3:] = 0
    labels = ids % 3
    x = np.array(["", "a", "b"])[ids] if make is strings else ids
    model = make()
    model.compile(keras.optimizers.SGD(0.5), LOSS)
    model.fit(
        tf.data.Dataset.from_tensor_slices((x, labels)).batch(4), epochs=2, shuffle=False, verbose=0
    )
    ours = Trainer(
        model=make, optimizer=lambda: keras.optimizers.SGD(0.5), loss_fn=LOSS, verbose=False
    )
    data = tf.data.Dataset.from_tensor_slices((x, labels)).batch(4)
    ours.train(data, steps=4)
    for mine, other in zip(ours.model.get_weights(), model.get_weights(), strict=True):
        if other.dtype.kind == "f":
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data(sizes=(5, 4)):
    """Batches of tokens and labels."""
    return [(IDS[:size], (IDS[:size] + 1) % 3) for size in sizes]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("replicas", "num_microbatches"),
    [
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
        (3, 1),
    ],
)
def test_masked_sequences_train_as_in_keras(mirrored, replicas, num_microbatches):
    """L8, L21: sequences with Embedding(mask_zero=True), a fully masked one included, take the SGD steps of
    Keras's `train_on_batch` on 1 and 3 replicas, and `evaluate` gives Keras's loss and accuracy.
    """
    model = tagger()
    model.compile(keras.optimizers.SGD(0.5), LOSS, metrics=["accuracy"])
    ours = Trainer(
        model=tagger,
        optimizer=lambda: keras.optimizers.SGD(0.5),
        loss_fn=LOSS,
        metrics=["accuracy"],
        strategy=mirrored(replicas) if replicas > 1 else "default",
        num_microbatches=num_microbatches,
        verbose=False,
    )
    for report, (ids, labels) in zip(attempt(ours, data()), data(), strict=True):
        assert report.loss == pytest.approx(float(model.train_on_batch(ids, labels)[0]), rel=1e-5)
        assert report.weight == (ids != 0).sum()
        for mine, theirs in zip(ours.model.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())
    expected = model.evaluate(*data()[0], batch_size=5, verbose=0, return_dict=True)
    assert ours.evaluate(data()[0], global_batch=5) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("steps", [4, 6])
def test_weights_of_examples_weight_their_metrics(steps):
    """With weights of shape (examples,) the metrics of masked sequences are those of the examples that
    have weight, also where there are as many examples as time steps.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 12, steps, 1)).astype(np.float32)
    x[:, steps - 2 :] = 0.0
    weights = np.tile(np.float32([1, 0, 0]), 4)

    def results(*batch):
        trainer = Trainer(
            model=lambda: keras.Sequential(
                [
                    keras.Input([steps, 1]),
                    keras.layers.Masking(0.0),
                    keras.layers.Dense(1, kernel_initializer="ones"),
                ]
            ),
            optimizer="sgd",
            loss_fn="mae",
            metrics=["mae", "mse"],
            verbose=False,
        )
        return trainer.evaluate(batch, global_batch=4)

    found = results(x, y, weights)
    assert found == pytest.approx(results(x[::3], y[::3]), rel=1e-6)
    assert found["mae"] == pytest.approx(found["loss"], rel=1e-6)
