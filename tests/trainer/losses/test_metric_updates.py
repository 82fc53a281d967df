"""Metrics get a replica's share of a batch, and the weights that they take."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from trainer import Trainer
from trainer.losses.metric_updates import weights_for

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=[13, 4]).astype("float32"), RNG.normal(size=[13, 1]).astype("float32")


def model():
    """A sum."""
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(1, kernel_initializer="ones")])


def share_error(y, p):
    """The mean error of each example, divided by something that is 0 if there are no examples."""
    return ops.abs(y - p)[:, 0] / ops.max(ops.ones_like(p))


class Deviation(keras.metrics.Metric):
    """Adds up errors; creates its variables in its first update, and fails for no examples."""

    total = None

    def update_state(self, y, p, sample_weight=None):
        """Adds the errors of a batch."""
        if self.total is None:
            self.total, self.count = (self.add_variable((), "zeros", name=name) for name in "tc")
        tf.debugging.assert_positive(tf.shape(p)[0])
        self.total.assign_add(ops.sum(ops.abs(y - p)))
        self.count.assign_add(ops.cast(ops.shape(y)[0], "float32"))

    def result(self):
        """The mean."""
        return self.total / self.count


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("metric", [share_error, Deviation], ids=["function", "object"])
def test_an_empty_share_is_left_out(mirrored, replicas, metric):
    """The last batch has one example, so some shares have none; the result is that of one device."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    found = []
    for strategy in ("default", mirrored(replicas)):
        trainer = Trainer(
            model=model,
            optimizer=lambda: keras.optimizers.SGD(0.0),
            loss_fn="mse",
            metrics=[metric] if metric is share_error else lambda: {"m": Deviation(name="m")},
            strategy=strategy,
            verbose=False,
        )
        summary = trainer.train(data, steps=4)
        [name] = set(trainer.evaluate(data)) - {"loss"}
        found.append((trainer.evaluate(data)[name], summary.history[name][-1]))

    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    assert found[0][0] == pytest.approx(np.mean(np.abs(X.sum(1) - Y[:, 0])), rel=1e-6)


def rmse(y, p):
    """One number for a batch."""
    return ops.sqrt(ops.mean(ops.square(y - p)))


@pytest.mark.parametrize("in_dict", [False, True])
def test_one_number_for_a_batch_is_refused_on_replicas(mirrored, in_dict):
    """On one device it is the mean over batches, as in Keras."""
    data = (X[:12], {"out": Y[:12]} if in_dict else Y[:12])
    x = keras.Input([4])
    settings = {"model": model, "loss_fn": "mse", "metrics": [rmse], "verbose": False}
    if in_dict:
        settings["model"] = lambda: keras.Model(x, {"out": model()(x)})
        settings["loss_fn"], settings["metrics"] = {"out": "mse"}, {"out": [rmse]}
    one = Trainer(**settings).evaluate(data, global_batch=4)
    batches = (X[:12].sum(1) - Y[:12, 0]).reshape(3, 4)
    with pytest.raises(ValueError, match="`metrics` must return one number per example"):
        Trainer(**settings, strategy=mirrored(2)).evaluate(data, global_batch=4)

    name = "out_rmse" if in_dict else "rmse"
    assert one[name] == pytest.approx(np.mean(np.sqrt(np.mean(batches**2, axis=1))), rel=1e-6)


class Largest(Deviation):
    """The largest error: no sum."""


@pytest.mark.parametrize("replicas", [1, 2])
def test_added_states_are_warned_of(mirrored, caplog, replicas):
    """Nothing tells whether a user's metric keeps sums; Keras adds what the replicas keep."""
    Trainer(
        model=model,
        loss_fn="mse",
        metrics=lambda: {"m": Largest(name="largest")},
        strategy=mirrored(replicas),
        verbose=False,
    ).evaluate((X, Y), global_batch=12)

    warned = "The variables of the metric 'largest' are added up over replicas"
    assert (warned in caplog.text) == (replicas > 1)


def test_weights_of_intersections_may_have_a_last_dimension_of_one():
    """As Keras takes them where labels have one dimension."""
    metric, weights = keras.metrics.MeanIoU(3, dtype="float32"), tf.constant([[1.0], [0.0]])
    assert weights_for(metric, tf.constant([0, 2]), weights).numpy().tolist() == [1.0, 0.0]
    found = weights_for(metric, tf.zeros([2, 3]), weights).numpy().tolist()
    assert found == [[1.0] * 3, [0.0] * 3]


def test_losses_without_outputs_have_no_metrics():
    """Metrics of `compute_loss` that returns losses alone are refused before the first step."""

    class LossesAlone(Trainer):
        def compute_loss(self, batch, training):
            return super().compute_loss(batch, training)[0]

    trainer = LossesAlone(
        model=model, optimizer="sgd", loss_fn="mse", metrics=["mae"], verbose=False
    )
    with pytest.raises(ValueError, match="`compute_loss` must return"):
        trainer.train((X, Y), steps=1, global_batch=13)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("metric", "one_hot"),
    [
        (lambda: keras.metrics.MeanIoU(3, name="iou", dtype="float32", sparse_y_pred=False), False),
        (lambda: keras.metrics.OneHotIoU(3, [0, 2], name="iou", dtype="float32"), True),
        (lambda: keras.metrics.BinaryIoU([0, 1], name="iou", dtype="float32"), True),
    ],
    ids=["mean", "one-hot", "binary"],
)
def test_weights_of_examples_weight_intersections(metric, one_hot):
    """Keras's IoU metrics take a weight for each label; examples of weight 0 do not count."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4, 2)).astype(np.float32)
    labels = rng.integers(0, 3, size=(8, 4))
    y = np.eye(3, dtype=np.float32)[labels] if one_hot else labels
    keep = np.arange(8) % 2 == 0

    def result(*batch):
        trainer = Trainer(
            model=lambda: keras.Sequential(
                [
                    keras.Input([4, 2]),
                    keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(1)),
                ]
            ),
            loss_fn="mse" if one_hot else keras.losses.SparseCategoricalCrossentropy(True),
            metrics=[metric()],
            verbose=False,
        )
        return trainer.evaluate(batch, global_batch=4)

    found = result(x, y, keep.astype(np.float32))
    assert found == pytest.approx(result(x[keep], y[keep]), rel=1e-5)


@pytest.mark.parametrize("average", [None, "micro", "macro"])
def test_weights_of_f_scores_may_have_a_last_dimension_of_one(average):
    """Keras would compare each example with the weights of all others."""
    labels, outputs = tf.eye(3)[:2], tf.constant([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    weights = tf.constant([[0.25], [1.0]])
    metric, expected = keras.metrics.F1Score(average), keras.metrics.F1Score(average)
    metric.update_state(labels, outputs, sample_weight=weights_for(metric, labels, weights))
    expected.update_state(labels, outputs, sample_weight=weights[:, 0])
    np.testing.assert_array_equal(metric.result(), expected.result())
    if average == "micro":
        assert float(metric.result()) == pytest.approx(0.2)  # one fifth of the weight is right


def test_weights_of_f_scores_belong_to_examples():
    """Two dimensions would be summed with those of the outputs."""
    with pytest.raises(ValueError, match="`metrics` must take the weights"):
        weights_for(keras.metrics.F1Score(), tf.zeros([2, 3]), tf.ones([2, 3]))


def test_weights_of_intersections_are_not_truncated():
    """Keras makes integers of them by default."""
    metric = keras.metrics.BinaryIoU(name="iou")
    with pytest.raises(ValueError, match="`metrics` must keep weights"):
        weights_for(metric, tf.constant([0, 1]), tf.constant([0.9, 0.9]))
    assert weights_for(metric, tf.constant([0, 1]), tf.constant([2, 0])).dtype == tf.int32


def test_a_mask_becomes_weights_as_the_metric_takes_them():
    """Floats, but for intersections, which count in integers; a mean reads the mask itself."""
    mask, y = tf.constant([[True, False]]), tf.zeros([1, 2])
    precision = weights_for(keras.metrics.Precision(), y, None, mask)
    assert (precision.dtype, precision.numpy().tolist()) == (tf.float32, [[1.0, 0.0]])
    iou = weights_for(keras.metrics.BinaryIoU(), y, None, mask)
    assert (iou.dtype, iou.numpy().tolist()) == (tf.int32, [[1, 0]])
    assert weights_for(keras.metrics.BinaryAccuracy(), y, None, mask) is None
    both = weights_for(keras.metrics.Precision(), y, tf.constant([2.0]), mask)
    assert both.numpy().tolist() == [[2.0, 0.0]]


PADDED = {
    "precision": keras.metrics.Precision,
    "recall": keras.metrics.Recall,
    "auc": keras.metrics.AUC,
    "missed": keras.metrics.FalseNegatives,
    "iou": keras.metrics.BinaryIoU,
    "accuracy": keras.metrics.BinaryAccuracy,
}


@pytest.mark.thorough
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_padding_that_keras_masks_counts_in_no_metric(mirrored, replicas, weighted):
    """Keras's own metrics that are no means leave the mask out, and count padding."""
    random = np.random.default_rng(0)
    x = random.integers(1, 9, [10, 6])
    x[:, 3:] = 0
    y = random.integers(0, 2, [10, 6, 1])
    weights = random.integers(1, 3, 10) if weighted else np.ones(10, int)

    def model():
        return keras.Sequential(
            [
                keras.Input([6], dtype="int32"),
                keras.layers.Embedding(9, 4, mask_zero=True),
                keras.layers.Dense(1, "sigmoid"),
            ]
        )

    dtype = {"iou": {"dtype": "float32"}} if weighted else {}
    trainer = Trainer(
        model=model,
        loss_fn="binary_crossentropy",
        metrics=lambda: {name: kind(**dtype.get(name, {})) for name, kind in PADDED.items()},
        strategy=mirrored(replicas) if replicas > 1 else "default",
        seed=0,
        verbose=False,
    )
    found = trainer.evaluate((x, y, weights) if weighted else (x, y), global_batch=4)
    outputs = trainer.predict(x, global_batch=4)[:, :3]
    for name, kind in PADDED.items():
        metric = kind(dtype="float32")
        of_each = np.repeat(weights[:, None], 3, axis=1)
        metric.update_state(y[:, :3].ravel(), outputs.ravel(), sample_weight=of_each.ravel())
        assert found[name] == pytest.approx(float(metric.result()), rel=1e-5), name
