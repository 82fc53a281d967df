"""Labels and outputs of other shapes are not broadcast without a word, in losses and in metrics."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import linear_model

from trainer import Monitoring, Trainer
from trainer.losses.loss_fn import example_losses
from trainer.losses.metrics import update_metric
from trainer.losses.shapes import ELEMENTWISE_LOSSES, ELEMENTWISE_METRICS, is_elementwise

MSE = keras.losses.MeanSquaredError()
WRONG = [([4, 3], [4, 1]), ([4, 1], [4, 3]), ([4], [4, 3])]


@pytest.mark.parametrize("loss_class", ELEMENTWISE_LOSSES)
def test_keras_would_broadcast(loss_class):
    """Every loss that compares element by element refuses labels that it would repeat."""
    overlap = loss_class in (keras.losses.Dice, keras.losses.Tversky)
    loss = loss_class(axis=1) if overlap else loss_class()
    for labels, outputs in WRONG[:2]:
        with pytest.raises(ValueError, match="`loss_fn` must"):
            example_losses(loss, tf.ones(labels), tf.fill(outputs, 0.5))


@pytest.mark.parametrize("labels", [[4, 1], [4, 3]])
def test_the_classes_of_all_examples_are_not_compared(labels):
    """This loss of Keras would make a table of all pairs, whatever its docstring says."""
    loss_fn, outputs = keras.losses.CategoricalGeneralizedCrossEntropy(), tf.fill([4, 3], 1 / 3)
    assert example_losses(loss_fn, tf.ones([4]), outputs).shape == [4]
    with pytest.raises(ValueError, match="`loss_fn` must"):
        example_losses(loss_fn, tf.ones(labels), outputs)


@pytest.mark.parametrize(
    ("labels", "outputs"), [([4], [4, 1]), ([4, 1], [4]), ([4, 3], [4, 3]), ([4, 3, 1], [4, 3])]
)
def test_a_last_dimension_of_one_does_not_count(labels, outputs):
    """As in Keras, it may be there or not."""
    losses = example_losses(MSE, tf.ones(labels), tf.zeros(outputs))

    np.testing.assert_array_equal(losses, np.ones(4))
    assert is_elementwise(keras.losses.mean_absolute_error)
    assert not is_elementwise(keras.losses.SparseCategoricalCrossentropy())


def test_a_function_of_the_users_may_broadcast():
    """Its author has chosen to."""
    losses = example_losses(
        lambda y, p: tf.reduce_mean((y - p) ** 2, axis=1), tf.ones([4, 3]), tf.zeros([4, 1])
    )

    np.testing.assert_array_equal(losses, np.ones(4))


@pytest.mark.thorough
@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("width", "fits"), [(1, True), (3, False)])
def test_labels_whose_width_only_the_batch_shows(jit_compile, width, fits):
    """Where the pipeline does not say how wide labels are, no label is broadcast either."""
    labels = np.ones([4, width], np.float32)
    spec = (tf.TensorSpec([None, 1]), tf.TensorSpec([None, None]))
    data = tf.data.Dataset.from_generator(
        lambda: iter([(np.ones([4, 1], np.float32), labels)]), output_signature=spec
    )
    trainer = Trainer(
        model=linear_model,
        optimizer="sgd",
        loss_fn="mse",
        verbose=False,
        monitoring=Monitoring(check_gradients=False),
        jit_compile=jit_compile,
    )
    if fits:
        assert trainer.train(data, steps=1).totals.applied == 1
        return
    with pytest.raises(tf.errors.InvalidArgumentError):
        trainer.train(data, steps=1)


@pytest.mark.parametrize("metric_class", ELEMENTWISE_METRICS)
def test_metrics_of_keras_would_broadcast(metric_class):
    """Every metric that compares element by element refuses labels that it would repeat, and takes
    those of the same shape.
    """
    for labels, outputs in WRONG:
        with pytest.raises(ValueError, match="`metrics` must"):
            update_metric(metric_class(), tf.ones(labels), tf.ones(outputs), None)

    update_metric(metric_class(), tf.ones([4, 3]), tf.ones([4, 3]), None)


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
    data = np.ones([4, 1], np.float32), {"a": np.ones([4, 1], np.float32), "b": np.arange(4) % 3}
    with pytest.raises(ValueError, match="`metrics` must"):
        trainer.evaluate(data, global_batch=4)


def test_a_metric_of_the_users_may_broadcast():
    """Its author has chosen to."""

    class Own(keras.metrics.MeanAbsoluteError):
        """A class of one's own."""

    update_metric(Own(), tf.ones([4, 3]), tf.ones([4, 1]), None)
