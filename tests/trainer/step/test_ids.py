"""Integers that Keras would round to half precision are refused in every pass."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Losses, Trainer

IDS = np.arange(300, 308, dtype=np.int32)[:, None]
DATA = (IDS, np.ones([8, 1], np.float32))


def tower():
    """A lookup for each example."""
    layers = [keras.layers.Embedding(400, 3, name="table"), keras.layers.Flatten()]
    return keras.Sequential(layers, name="blind")


def called():
    """A `Sequential` without an input inside a functional model."""
    inputs = keras.Input([1], dtype="int32")
    return keras.Model(inputs, keras.layers.Dense(1)(tower()(inputs)))


def built():
    """A `Sequential` that was built by hand."""
    model = tower()
    model.add(keras.layers.Dense(1))
    model.build([None, 1])
    return model


class Subclassed(keras.Model):
    """Casts floats to its compute dtype, as every subclass does."""

    def __init__(self):
        """A lookup."""
        super().__init__()
        self.table = keras.layers.Embedding(400, 3, name="table")
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        """Looks up."""
        return self.dense(self.table(x)[:, 0])


def trainer_of(make, **arguments):
    """A trainer in bfloat16."""
    return Trainer(
        model=make,
        optimizer=lambda: keras.optimizers.SGD(0.1),
        loss_fn="mse",
        precision="mixed_bfloat16",
        verbose=False,
        seed=0,
        **arguments,
    )


def functional():
    """An `Input` without a dtype holds floats, which a layer around the lookup casts to its own."""

    class Tokens(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.Embedding(400, 3, name="table")

        def build(self, shape):
            self.table.build(shape)

        def call(self, ids):
            return self.table(ids)[:, 0]

    inputs = keras.Input([1])
    return keras.Model(inputs, keras.layers.Dense(1)(Tokens()(inputs)))


@pytest.mark.parametrize("make", [called, built, functional])
def test_ids_that_a_model_would_round_are_refused(make):
    """In training and in evaluations of the same precision; one in float32 rounds nothing."""
    with pytest.raises(ValueError, match=r"`model`.*Embedding 'table'"):
        trainer_of(make).train(DATA, steps=1, global_batch=8)
    with pytest.raises(ValueError, match=r"`model`.*Embedding 'table'"):
        trainer_of(make).predict(IDS, global_batch=8, precision="train")

    trainer = trainer_of(make)
    rows = trainer.model.get_weights()[0][IDS[:, 0]]
    kernel, bias = trainer.model.get_weights()[1:]
    found = trainer.predict(IDS, global_batch=8)
    np.testing.assert_allclose(found, rows @ kernel + bias, rtol=1e-5)


def test_ids_that_arrive_as_half_floats_are_refused():
    """Integers pass a subclassed model as they are; it rounds ids that a file holds as floats."""
    trainer = trainer_of(Subclassed)
    floats = (IDS.astype(np.float32), DATA[1])
    with pytest.raises(ValueError, match=r"`model`.*Embedding 'table'"):
        trainer.train(floats, steps=1, global_batch=8)

    trainer = trainer_of(Subclassed)
    before = trainer.model(IDS) is None or trainer.model.get_weights()[0]
    trainer.train(DATA, steps=1, global_batch=8)
    moved = np.flatnonzero((trainer.model.get_weights()[0] != before).any(1))
    np.testing.assert_array_equal(moved, IDS[:, 0])


def test_integers_that_are_no_ids_are_rounded_as_floats_are():
    """Pixels, for a `Sequential` without an `Input`."""

    def make():
        model = keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.Dense(1)])
        model.build([None, 1])
        return model

    trainer = trainer_of(make)
    assert trainer.train((IDS - 300, DATA[1]), steps=1, global_batch=8).totals.applied == 1


def test_a_small_embedding_takes_half_floats():
    """All ids up to 256 are exact in bfloat16."""

    class Small(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.Embedding(257, 1)

        def call(self, x):
            return self.table(x)[:, 0]

    data = (IDS.astype(np.float32) - 100, DATA[1])
    assert trainer_of(Small).train(data, steps=1, global_batch=8).totals.applied == 1


def test_a_reversed_embedding_takes_hidden_states():
    """Its floats are no ids."""

    def make():
        inputs = keras.Input([1], dtype="int32")
        table = keras.layers.ReversibleEmbedding(400, 3)
        hidden = keras.layers.Dense(3)(table(inputs))
        return keras.Model(inputs, keras.layers.Flatten()(table(hidden, reverse=True))[:, :1])

    assert trainer_of(make).train(DATA, steps=1, global_batch=8).totals.applied == 1


def test_a_subclass_of_embedding_may_take_other_arguments():
    """Positional tensors, or the ids by another name."""

    class Shifted(keras.layers.Embedding):
        def call(self, ids, offset):
            return super().call(ids + offset)

    class Named(keras.layers.Embedding):
        def call(self, ids):
            return super().call(ids)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.shifted, self.named = Shifted(400, 1), Named(400, 1)

        def call(self, x):
            return self.shifted(x, keras.ops.ones_like(x))[:, 0] + self.named(ids=x)[:, 0]

    assert trainer_of(Model).train(DATA, steps=1, global_batch=8).totals.applied == 1


def test_replicas_share_a_lookup(mirrored):
    """Each waits for the rows of the other one between its own two: the table of one device."""

    class Pairs(Trainer):
        def build_model(self):
            inputs = keras.Input([], dtype="int32")
            return keras.Model(inputs, keras.layers.Embedding(5, 3)(inputs))

        def compute_loss(self, batch, training):
            first = self.all_gather(self.model(batch[:, 0], training=training))
            second = self.all_gather(self.model(batch[:, 1], training=training))
            scores = tf.cast(tf.matmul(first, second, transpose_b=True), tf.float32)
            labels = tf.range(tf.shape(scores)[0])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
            return tf.reduce_mean(losses)

    ids = np.arange(24, dtype=np.int32).reshape(12, 2) % 5
    found = []
    for strategy in ("default", mirrored(2), mirrored(3)):
        trainer = Pairs(
            optimizer=lambda: keras.optimizers.SGD(0.5),
            losses=Losses(reduction="global"),
            strategy=strategy,
            seed=0,
            verbose=False,
        )
        trainer.train(ids, steps=3, global_batch=12)
        loss = trainer.evaluate(ids, global_batch=12)["loss"]
        found.append([loss, *trainer.model.get_weights()[0].ravel()])
        assert "call" not in vars(trainer.model.layers[1])
    np.testing.assert_allclose(found[1:], found[:1] * 2, rtol=1e-5)
