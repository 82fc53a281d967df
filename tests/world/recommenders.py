"""Recommenders, written from the layers and losses of keras-rs as its examples do."""

import importlib

import keras
import tensorflow as tf
from world.entry import EXAMPLES, Entry, squares

ITEMS = 23


def rs(name, *arguments, room="layers", **named):
    """An object of keras-rs."""
    module = importlib.import_module("keras_rs")
    return getattr(getattr(module, room), name)(*arguments, **named)


def entry(name, model, batch, **fields):
    """An entry of keras-rs."""
    return Entry(name, "keras-rs", model, batch, needs=("keras_rs",), **fields)


def embedded(ids, size=8):
    """Embeddings of three features, each of shape [examples, size]."""
    return [keras.layers.Embedding(ITEMS, size)(ids[:, place]) for place in range(3)]


def features(random):
    """Three ids in each example, and whether it was clicked."""
    ids = random.integers(ITEMS, size=[EXAMPLES, 3]).astype("int32")
    return ids, random.integers(2, size=[EXAMPLES, 1]).astype("float32")


def cross_network():
    """DCN V2: products of features."""
    ids = keras.Input([3], dtype="int32")
    joined = keras.layers.Concatenate()(embedded(ids))
    crossed = rs("FeatureCross", projection_dim=4)(joined, rs("FeatureCross")(joined))
    return keras.Model(ids, keras.layers.Dense(1)(crossed))


def dlrm():
    """DLRM: inner products of features."""
    ids = keras.Input([3], dtype="int32")
    products = rs("DotInteraction")(embedded(ids))
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Dense(8, "relu")(products)))


def bags():
    """Features that are bags of ids, each reduced to a mean."""
    ids = keras.Input([3], dtype="int32")
    bag = rs("EmbedReduce", ITEMS, 8, combiner="mean")(ids)
    return keras.Model(ids, keras.layers.Dense(1)(bag))


def clicks():
    """The loss of clicks."""
    return keras.losses.BinaryCrossentropy(from_logits=True)


class Ranking(keras.Model):
    """keras-rs's model of lists: a user's score for each item of a list."""

    def __init__(self):
        """Makes the layers."""
        super().__init__()
        self.users = keras.layers.Embedding(ITEMS, 8)
        self.items = keras.layers.Embedding(ITEMS, 8)
        self.score = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])

    def call(self, inputs):
        """Scores of shape [examples, length]."""
        items = self.items(inputs["items"])
        users = keras.ops.broadcast_to(self.users(inputs["user"]), keras.ops.shape(items))
        return keras.ops.squeeze(self.score(keras.ops.concatenate([users, items], -1)), -1)


def ranking():
    """The same, built."""
    model = Ranking()
    model({"user": tf.zeros([1, 1], tf.int32), "items": tf.zeros([1, 5], tf.int32)})
    return model


def lists(random):
    """A user, five items, and the user's ratings of them."""
    user = random.integers(ITEMS, size=[EXAMPLES, 1]).astype("int32")
    items = random.integers(ITEMS, size=[EXAMPLES, 5]).astype("int32")
    return {"user": user, "items": items}, random.permuted(
        [[1.0, 2.0, 3.0, 4.0, 5.0]] * EXAMPLES, axis=1
    ).astype("float32")


class Towers(keras.Model):
    """Two towers; the other items of a batch are the negatives."""

    def __init__(self, query):
        """Makes the layers."""
        super().__init__()
        self.query = query
        self.candidate = keras.Sequential([keras.layers.Embedding(ITEMS, 8)])
        self.correct = rs("SamplingProbabilityCorrection", dtype="float32")
        self.remove = rs("RemoveAccidentalHits", dtype="float32")

    def call(self, inputs):
        """The queries' and the candidates' embeddings."""
        return self.query(inputs["query"]), self.candidate(inputs["candidate"])


def towers():
    """Users and items."""
    model = Towers(keras.Sequential([keras.layers.Embedding(ITEMS, 8), keras.layers.Flatten()]))
    model({"query": tf.zeros([1, 1], tf.int32), "candidate": tf.zeros([1], tf.int32)})
    return model


def sequences():
    """What a user has seen, and the next item."""
    model = Towers(keras.Sequential([keras.layers.Embedding(ITEMS, 8), keras.layers.GRU(8)]))
    model({"query": tf.zeros([1, 4], tf.int32), "candidate": tf.zeros([1], tf.int32)})
    return model


def seen(length):
    """Batches of queries of a length, and candidates."""

    def batch(random):
        return {
            "query": random.integers(ITEMS, size=[EXAMPLES, length]).astype("int32"),
            "candidate": random.integers(ITEMS, size=[EXAMPLES]).astype("int32"),
        }

    return batch


def retrieval(*, hard=None):
    """The loss of each query's own candidate among all."""

    def loss(model, batch, training, gather):
        outputs = [tf.cast(each, tf.float32) for each in model(batch, training=training)]
        queries, candidates, ids = gather((*outputs, batch["candidate"]))
        logits = tf.matmul(queries, candidates, transpose_b=True)
        labels = tf.eye(tf.shape(logits)[0])
        logits = model.correct(logits, tf.fill([tf.shape(ids)[0]], 0.1))
        logits = model.remove(logits, labels, ids)
        if hard is not None:
            logits, labels = rs("HardNegativeMining", hard, dtype="float32")(logits, labels)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, logits))

    return loss


def next_items():
    """SASRec: each item of a sequence is predicted by a transformer of KerasHub."""
    layers = importlib.import_module("keras_hub").layers
    ids = keras.Input([6], dtype="int32")
    embed = layers.TokenAndPositionEmbedding(ITEMS, 6, 8)
    hidden = layers.TransformerDecoder(16, 2)(embed(ids))
    return keras.Model(ids, embed.token_embedding(hidden, reverse=True))


def sequence_loss(model, batch, training, gather):
    """The cross entropy of the next items, without padding."""
    del gather
    logits = tf.cast(model(batch[:, :-1], training=training), tf.float32)
    labels = batch[:, 1:]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(losses * tf.cast(labels != 0, tf.float32), axis=1)


def two_tasks():
    """A model with two outputs: a rating, and a click."""
    ids = keras.Input([3], dtype="int32")
    hidden = keras.layers.Dense(8, "relu")(keras.layers.Concatenate()(embedded(ids)))
    return keras.Model(
        ids, {"rating": keras.layers.Dense(1)(hidden), "click": keras.layers.Dense(1)(hidden)}
    )


def two_losses(model, batch, training, gather):
    """The weighted sum of both tasks' losses."""
    del gather
    ids, clicked = batch
    outputs = model(ids, training=training)
    click = tf.nn.sigmoid_cross_entropy_with_logits(clicked, tf.cast(outputs["click"], tf.float32))
    return 0.5 * click[:, 0] + squares(outputs["rating"], 3.0 * clicked)


RECOMMENDERS = [
    entry("DCN V2", cross_network, features, loss_fn=clicks),
    entry("DLRM", dlrm, features, loss_fn=clicks),
    entry("bags of ids", bags, features, loss_fn=clicks),
    entry(
        "ranking of lists, hinge",
        ranking,
        lists,
        loss_fn=lambda: rs("PairwiseHingeLoss", room="losses"),
    ),
    entry(
        "ranking of lists, ListMLE",
        ranking,
        lists,
        loss_fn=lambda: rs("ListMLELoss", room="losses"),
    ),
    entry("two towers", towers, seen(1), loss=retrieval(), coupled=True, in_ci=True),
    entry("two towers, hard negatives", towers, seen(1), loss=retrieval(hard=3), coupled=True),
    entry("sequential retrieval", sequences, seen(4), loss=retrieval(), coupled=True),
    entry(
        "SASRec",
        next_items,
        lambda random: random.integers(ITEMS, size=[EXAMPLES, 7]).astype("int32"),
        loss=sequence_loss,
    )._replace(needs=("keras_rs", "keras_hub")),
    entry("two tasks", two_tasks, features, loss=two_losses),
]
