"""Labels and outputs of other shapes are not broadcast without a word."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import linear_model

from trainer import Monitoring, Trainer
from trainer.losses.loss_fn import example_losses
from trainer.losses.loss_shapes import CLASSES, is_elementwise

MSE = keras.losses.MeanSquaredError()


@pytest.mark.parametrize("loss_class", CLASSES)
@pytest.mark.parametrize(("labels", "outputs"), [([4, 3], [4, 1]), ([4, 1], [4, 3])])
def test_keras_would_broadcast(loss_class, labels, outputs):
    """Every loss that compares element by element refuses labels that it would repeat."""
    overlap = loss_class in (keras.losses.Dice, keras.losses.Tversky)
    loss = loss_class(axis=1) if overlap else loss_class()
    with pytest.raises(ValueError, match="`loss_fn` must compare labels with outputs of the same"):
        example_losses(loss, tf.ones(labels), tf.fill(outputs, 0.5))


@pytest.mark.parametrize("labels", [[4, 1], [4, 3]])
def test_the_classes_of_all_examples_are_not_compared(labels):
    """This loss of Keras would make a table of all pairs, whatever its docstring says."""
    loss_fn, outputs = keras.losses.CategoricalGeneralizedCrossEntropy(), tf.fill([4, 3], 1 / 3)
    assert example_losses(loss_fn, tf.ones([4]), outputs).shape == [4]
    with pytest.raises(ValueError, match="number of a class") as error:
        example_losses(loss_fn, tf.ones(labels), outputs)

    assert str(error.value) == (
        "`loss_fn` must compare the number of a class with its outputs; got labels float32 "
        f"{tuple(labels)} and outputs float32 (4, 3) for CategoricalGeneralizedCrossEntropy. Keras "
        "would compare the label of each example with the outputs of all. Give the labels one dimension less than the "
        "outputs: y[:, 0], or y.argmax(-1) of one-hot labels."
    )


@pytest.mark.parametrize("loss_fn", [MSE, keras.losses.mean_squared_error])
def test_the_error_says_both_shapes(loss_fn):
    """As a class and as a function."""
    with pytest.raises(ValueError, match="must compare") as error:
        example_losses(loss_fn, tf.ones([4, 1, 2]), tf.ones([4, 1]))

    name = "MeanSquaredError" if loss_fn is MSE else "mean_squared_error"
    assert str(error.value) == (
        "`loss_fn` must compare labels with outputs of the same shape; got labels float32 "
        f"(4, 1, 2) and outputs float32 (4, 1) for {name}. Keras would repeat the smaller, and "
        "compare labels with outputs of other places. Give the model as many outputs as there "
        "are labels, or pass a function that repeats them."
    )


@pytest.mark.parametrize(
    ("labels", "outputs"), [([4], [4, 1]), ([4, 1], [4]), ([4, 3], [4, 3]), ([4, 3, 1], [4, 3])]
)
def test_a_last_dimension_of_one_does_not_count(labels, outputs):
    """As in Keras, it may be there or not."""
    losses = example_losses(MSE, tf.ones(labels), tf.zeros(outputs))

    np.testing.assert_array_equal(losses, np.ones(4))
    assert is_elementwise(keras.losses.mean_absolute_error)
    assert not is_elementwise(keras.losses.SparseCategoricalCrossentropy())


def test_what_a_loss_cannot_take_is_told_with_the_shapes():
    """Keras's own error about shapes becomes one about labels and outputs."""
    with pytest.raises(ValueError, match="`loss_fn` must fit the labels and the outputs") as error:
        example_losses(keras.losses.CategoricalCrossentropy(), tf.ones([4, 2]), tf.ones([4, 3]))

    assert "got labels float32 (4, 2) and outputs float32 (4, 3). CategoricalCross" in str(
        error.value
    )


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
