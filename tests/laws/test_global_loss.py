"""L8: a loss that compares the examples of a batch is the same on any number of replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import attempt, example

from trainer import Losses, Skips, Trainer

nt_xent = example("simclr").nt_xent

# Batches that divide evenly by 3, with a ragged last share, and with an empty last share.
SIZES = [6, 7, 2]


class Encoder(keras.Model):
    """Two dense layers with a kernel and an activity regularizer, and a learned temperature."""

    def __init__(self):
        """Creates the layers; the same weights every time."""
        super().__init__()
        seeds = [keras.initializers.GlorotUniform(seed) for seed in (1, 2)]
        self.hidden = keras.layers.Dense(
            5, "tanh", kernel_initializer=seeds[0], activity_regularizer="l2"
        )
        self.head = keras.layers.Dense(3, kernel_initializer=seeds[1], kernel_regularizer="l2")
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")

    def call(self, inputs):
        """Returns embeddings, shape (examples, 3)."""
        return self.head(self.hidden(inputs))


def batch_hard(rows, labels):
    """The batch-hard triplet loss (Hermans et al., arXiv:1703.07737), with a soft margin."""
    squares = tf.reduce_sum((rows[:, None] - rows[None]) ** 2, axis=-1)
    distances = tf.sqrt(squares + 1e-6)
    same = labels[:, None] == labels[None]
    hardest = tf.reduce_max(tf.where(same, distances, 0.0), axis=1)
    nearest = tf.reduce_min(tf.where(same, 1e6, distances), axis=1)
    return tf.reduce_mean(tf.where(nearest < 1e6, tf.nn.softplus(hardest - nearest), 0.0))


class SimCLR(Trainer):
    """Compares the views of all examples."""

    def build_model(self):
        """The encoder."""
        model = Encoder()
        model(tf.zeros([1, 4]))
        return model

    def build_optimizer(self):
        """SGD, because Adam would hide a factor."""
        return keras.optimizers.SGD(0.1)

    def compute_loss(self, batch, training):
        """NT-Xent of the global batch."""
        views = [tf.cast(self.model(batch[name], training=training), tf.float32) for name in "ab"]
        one, other = self.all_gather(views)
        return nt_xent(one, other, self.model.temperature), {"rows": views[0]}


class Triplets(SimCLR):
    """Compares every example with all others; ids of its classes are gathered as well."""

    def compute_loss(self, batch, training):
        """The batch-hard triplet loss of the global batch."""
        rows = self.all_gather(self.model(batch["a"], training=training))
        labels = self.all_gather(batch["label"])
        return batch_hard(tf.cast(rows, tf.float32), labels) * self.model.temperature


class OwnAnchors(SimCLR):
    """Each replica compares its own examples with all others, which needs less memory."""

    def compute_loss(self, batch, training):
        """The mean over the replica's examples of their distance from the batch's mean."""
        rows = tf.cast(self.model(batch["a"], training=training), tf.float32)
        center = tf.reduce_mean(self.all_gather(rows), axis=0)
        return tf.reduce_mean((rows - center) ** 2) * self.model.temperature


def batches(sizes=SIZES):
    """Random views of examples, and their classes."""
    random = np.random.default_rng(1)
    return [
        {
            "a": random.standard_normal([size, 4]).astype(np.float32),
            "b": random.standard_normal([size, 4]).astype(np.float32),
            "label": (np.arange(size) % 2).astype(np.int64),
        }
        for size in sizes
    ]


def plain_loss(kind, model, batch):
    """The same loss without a trainer, on the whole batch, with the losses of the layers."""
    rows = model(batch["a"])
    added = tf.add_n([tf.reduce_sum(loss) for loss in model.losses])
    if kind is SimCLR:
        other = model(batch["b"])
        added = tf.add_n([tf.reduce_sum(loss) for loss in model.losses])
        return nt_xent(rows, other, model.temperature), added
    if kind is OwnAnchors:
        spread = tf.reduce_mean((rows - tf.reduce_mean(rows, axis=0)) ** 2)
        return spread * model.temperature, added
    return batch_hard(rows, batch["label"]) * model.temperature, added


def plain_loop(kind):
    """Losses and weights after each step of a loop with a tape and `assign_sub`."""
    model = Encoder()
    model(tf.zeros([1, 4]))
    results = []
    for batch in batches():
        with tf.GradientTape() as tape:
            loss, added = plain_loss(kind, model, batch)
            total = loss + added
        weights = model.trainable_variables
        for weight, gradient in zip(weights, tape.gradient(total, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        results.append((float(loss), float(added), [weight.numpy() for weight in weights]))
    return results


def trained(kind, **arguments):
    """Reports and weights after each step of a trainer."""
    trainer = kind(losses=Losses(reduction="global"), verbose=False, **arguments)
    return [
        (report, [weight.numpy() for weight in trainer.model.trainable_variables])
        for report in attempt(trainer, batches())
    ]


def flat(weights):
    """All weights in one array."""
    return np.concatenate([weight.ravel() for weight in weights])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "replicas"),
    [
        (SimCLR, 3),
        *[
            pytest.param(kind, replicas, marks=pytest.mark.slow)
            for kind, replicas in [(SimCLR, 1), (Triplets, 1), (Triplets, 3), (OwnAnchors, 3)]
        ],
    ],
)
def test_a_global_loss_is_a_plain_loop_s(mirrored, kind, replicas):
    """L8: on 1 and 3 replicas, with uneven and empty shares, a contrastive and a triplet loss take the
    SGD steps of a plain loop on one device, to 1e-6, with a temperature, kernel L2 and an activity
    regularizer.
    """
    strategy = mirrored(replicas) if replicas > 1 else "default"
    for (loss, added, weights), (report, ours) in zip(
        plain_loop(kind), trained(kind, strategy=strategy), strict=True
    ):
        assert report.grads_finite
        assert report.loss == pytest.approx(loss, rel=1e-6)
        assert report.regularization_loss == pytest.approx(added, rel=1e-6)
        tolerance = 1e-6 * np.abs(flat(weights)).max()
        np.testing.assert_allclose(flat(ours), flat(weights), rtol=0, atol=tolerance)


@pytest.mark.slow
def test_in_half_precision_replicas_differ_by_rounding(mirrored):
    """L8: in float16 with a loss scale, three replicas take the steps of one device to 8 times the
    machine epsilon of float16: rounding of activations, and of the two gradients of a row's views.
    """
    settings = {"precision": "mixed_float16", "loss_scale": 2.0**12, "jit_compile": False}
    one = trained(SimCLR, **settings)
    three = trained(SimCLR, strategy=mirrored(3), **settings)
    epsilon = 2.0**-10
    for (expected, weights), (report, ours) in zip(one, three, strict=True):
        assert expected.grads_finite
        assert report.grads_finite
        assert report.loss == pytest.approx(expected.loss, rel=8 * epsilon)
        assert report.gradient_norm == pytest.approx(expected.gradient_norm, rel=8 * epsilon)
        norm = np.linalg.norm(flat(weights))
        assert np.linalg.norm(flat(ours) - flat(weights)) <= 8 * epsilon * norm


class Overflowing(SimCLR):
    """Overflows in float16 for one example of the last replica."""

    def compute_loss(self, batch, training):
        """The gathered rows, steep for one example."""
        outputs = self.model(batch["a"], training=training)
        rows = self.all_gather(outputs * tf.cast(batch["b"][:, :1], outputs.dtype))
        return tf.reduce_mean(tf.cast(rows, tf.float32) ** 2)


@pytest.mark.thorough
def test_a_skip_on_one_replica_skips_all(mirrored):
    """L5, L6: gathered rows that overflow in the backward pass skip the step on every replica, and a
    retry at a smaller scale applies it; no replica waits for another.
    """
    settings = {"precision": "mixed_float16", "strategy": mirrored(3), "verbose": False}
    trainer = Overflowing(
        losses=Losses(reduction="global"),
        loss_scale="dynamic",
        skips=Skips(on_overflow="retry"),
        **settings,
    )
    [batch, *_] = batches()
    batch["b"][-1] = 500.0
    [report] = attempt(trainer, [batch])
    copies = [weight.value.values for weight in trainer.model.trainable_variables]

    assert report.retries > 0
    assert report.grads_finite
    for first, *others in copies:
        assert all(np.array_equal(first, other) for other in others)


def circle_model():
    """Unit vectors of three numbers."""
    kernel = keras.initializers.GlorotUniform(seed=5)
    dense = keras.layers.Dense(3, kernel_initializer=kernel)
    return keras.Sequential([keras.Input([4]), dense, keras.layers.UnitNormalization()])


@pytest.mark.slow
def test_a_loss_fn_of_the_whole_batch_is_keras_s(mirrored):
    """L8, L21: Keras's Circle loss, which compares all examples, gives on three replicas the SGD step
    and the evaluation of Keras on one device.
    """
    [batch] = batches([8])
    x, y, loss = batch["a"], batch["label"], keras.losses.Circle(gamma=2.0)
    model = circle_model()
    model.compile(keras.optimizers.SGD(0.1), loss)
    model.train_on_batch(x, y)
    trainer = Trainer(
        model=circle_model,
        optimizer=lambda: keras.optimizers.SGD(0.1),
        loss_fn=loss,
        losses=Losses(reduction="global"),
        strategy=mirrored(3),
        verbose=False,
    )
    trainer.train((x, y), steps=1, global_batch=8)
    for mine, theirs in zip(trainer.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())
    expected = model.evaluate(x, y, batch_size=8, verbose=0)
    assert trainer.evaluate((x, y), global_batch=8)["loss"] == pytest.approx(expected, rel=1e-6)


class Ranked(Triplets):
    """Measures how often an example's nearest neighbour in the batch has its class."""

    def compute_loss(self, batch, training):
        """The triplet loss, and for each example whether its nearest neighbour is of its class."""
        rows = self.all_gather(tf.cast(self.model(batch["a"], training=training), tf.float32))
        labels = self.all_gather(batch["label"])
        squares = tf.reduce_sum((rows[:, None] - rows[None]) ** 2, axis=-1)
        nearest = tf.argmin(squares + 1e6 * tf.eye(tf.shape(rows)[0]), axis=1)
        hits = tf.cast(tf.gather(labels, nearest) == labels, tf.float32)
        return batch_hard(rows, labels) * self.model.temperature, self.kept(hits)

    def kept(self, hits):
        """This replica's own rows."""
        return self.own_rows(hits)

    def build_metrics(self):
        """The share of hits, and their number."""
        return {"hits": keras.metrics.Mean(), "rows": keras.metrics.Sum()}

    def update_metrics(self, batch, aux):
        """Counts each example once."""
        self.metrics["hits"].update_state(aux)
        self.metrics["rows"].update_state(tf.ones_like(aux))


class Unranked(Ranked):
    """Hands out the rows of the whole batch on every replica."""

    def kept(self, hits):
        """All rows, which would be cut to the first ones."""
        return hits


def measured(kind, strategy, size):
    """Results of the metrics over batches, the last of which may be smaller."""
    trainer = kind(losses=Losses(reduction="global"), verbose=False, strategy=strategy)
    whole = {name: np.concatenate([b[name] for b in batches([7, 7, 6])]) for name in ("a", "label")}
    return trainer.evaluate(whole, global_batch=size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [7, pytest.param(10, marks=pytest.mark.slow)])
def test_metrics_of_gathered_rows_are_those_of_one_device(mirrored, size):
    """Each replica's metrics see its own rows, also where the last batch is smaller."""
    wanted, found = (measured(Ranked, strategy, size) for strategy in ("default", mirrored(3)))
    assert wanted["rows"] == found["rows"] == 20
    assert found["hits"] == pytest.approx(wanted["hits"], abs=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [7, pytest.param(9, marks=pytest.mark.thorough)])
def test_gathered_rows_are_refused_as_aux(mirrored, size):
    """They would be cut to the first rows on every replica: a wrong metric without a word."""
    message = "`compute_loss`"
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=message):
        measured(Unranked, mirrored(3), size)
    trainer = Unranked(losses=Losses(reduction="global"), verbose=False, strategy=mirrored(3))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=message):
        trainer.train(tf.data.Dataset.from_tensors(batches([size])[0]), steps=1)
