"""Labels that Keras's metrics would broadcast are refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import linear_model

from trainer import Trainer
from trainer.losses.metric_shapes import CLASSES, check_metric_shapes, weights_for

SMALL = np.ones([4, 1], np.float32)
WRONG = [([4, 3], [4, 1]), ([4, 1], [4, 3]), ([4], [4, 3])]


@pytest.mark.parametrize("metric_class", CLASSES)
@pytest.mark.parametrize(("labels", "outputs"), WRONG)
def test_keras_would_broadcast(metric_class, labels, outputs):
    """Every metric that compares element by element refuses labels that it would repeat, and takes
    those of the same shape; a last dimension of size 1 does not count.
    """
    with pytest.raises(ValueError, match="`metrics` must compare labels with outputs of the same"):
        check_metric_shapes(metric_class(), tf.ones(labels), tf.ones(outputs))

    check_metric_shapes(metric_class(), tf.ones([4, 3]), tf.ones([4, 3]))
    check_metric_shapes(metric_class(), tf.ones([4]), tf.ones([4, 1]))


@pytest.mark.parametrize("kind", ["Categorical", "TopKCategorical"])
@pytest.mark.parametrize("labels", [[8], [8, 1]])
def test_class_numbers_have_metrics_of_their_own(kind, labels):
    """The metric that is refused for class numbers is not the accuracy; the one that is named is."""
    y = np.arange(8) % 3
    outputs = tf.one_hot(y, 3)
    wrong = getattr(keras.metrics, f"{kind}Accuracy")()
    name = f"Sparse{kind}Accuracy"
    with pytest.raises(ValueError, match=rf"keras\.metrics\.{name}\(\) for labels that are"):
        check_metric_shapes(wrong, tf.reshape(y, labels), outputs)

    right = getattr(keras.metrics, name)()
    check_metric_shapes(right, tf.reshape(y, labels), outputs)
    right.update_state(tf.reshape(y, labels), outputs)
    assert float(right.result()) == 1.0


def test_a_run_with_such_a_metric_is_refused():
    """In training, with one output; the error has both shapes."""
    trainer = Trainer(
        model=linear_model,
        optimizer="sgd",
        loss_fn=lambda y, p: tf.reduce_mean(tf.abs(y - p), axis=1),
        metrics=["mae"],
        verbose=False,
    )
    with pytest.raises(ValueError, match="`metrics` must compare") as error:
        trainer.train((SMALL, np.ones([4, 3], np.float32)), 1, global_batch=4)

    assert str(error.value) == (
        "`metrics` must compare labels with outputs of the same shape; got labels float32 "
        "(None, 3) and outputs float32 (None, 1) for MeanAbsoluteError. Keras would repeat the "
        "smaller, and compare labels with outputs of other places. Give them the same shape, or "
        "override update_metrics(batch, outputs)."
    )


def test_a_metric_of_one_of_several_outputs_is_refused():
    """In an evaluation, too."""

    def model():
        x = keras.Input([1])
        return keras.Model(x, {"a": keras.layers.Dense(1)(x), "b": keras.layers.Dense(3)(x)})

    trainer = Trainer(
        model=model,
        loss_fn={"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        metrics={"b": keras.metrics.CategoricalAccuracy()},
        verbose=False,
    )
    data = SMALL, {"a": SMALL, "b": np.arange(4) % 3}
    with pytest.raises(ValueError, match=r"keras\.metrics\.SparseCategoricalAccuracy\(\)"):
        trainer.evaluate(data, global_batch=4)


def test_a_metric_of_the_users_may_broadcast():
    """Its author has chosen to."""

    class Own(keras.metrics.MeanAbsoluteError):
        """A class of one's own."""

    check_metric_shapes(Own(), tf.ones([4, 3]), tf.ones([4, 1]))


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
        model=linear_model, optimizer="sgd", loss_fn="mse", metrics=["mae"], verbose=False
    )
    with pytest.raises(ValueError, match="must return") as caught:
        trainer.train((SMALL, SMALL), steps=1, global_batch=4)
    assert str(caught.value) == (
        "`compute_loss` must return (losses, outputs) if there are metrics; got losses alone, and "
        "metrics mae. They compare outputs with labels. Return the outputs as well, override "
        "update_metrics(batch, aux), or leave the metrics out."
    )


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
    metric = keras.metrics.F1Score()
    with pytest.raises(ValueError, match="one for each example") as error:
        weights_for(metric, tf.ones([2, 3]), tf.ones([2, 3]))
    assert str(error.value) == (
        "`metrics` must take the weights that the data have; got weights float32 (2, 3) for "
        "F1Score, which takes one for each example. Leave the metric out, or override "
        "update_metrics(batch, outputs)."
    )


def test_weights_of_intersections_are_not_truncated():
    """Keras makes integers of them by default."""
    metric = keras.metrics.BinaryIoU(name="iou")
    with pytest.raises(ValueError, match="integers") as error:
        weights_for(metric, tf.constant([0, 1]), tf.constant([0.9, 0.9]))
    assert str(error.value) == (
        "`metrics` must keep the weights of the examples; got BinaryIoU 'iou', which counts in "
        "integers and makes 0 of a weight of 0.9. Pass keras.metrics.BinaryIoU(..., "
        'dtype="float32").'
    )
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
