"""Weights of classes mean what they mean in `fit`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Losses, Trainer
from trainer.losses.class_weights import check_class_weight, class_factors

RNG = np.random.default_rng(5)
X = RNG.normal(size=[12, 3]).astype(np.float32)
LABELS = RNG.integers(0, 3, 12)
WEIGHTS = {0: 4.0, 2: -0.5}
LABELED = {
    "classes": (3, keras.losses.SparseCategoricalCrossentropy(from_logits=True), LABELS),
    "a column": (3, keras.losses.SparseCategoricalCrossentropy(from_logits=True), LABELS[:, None]),
    "one-hot": (
        3,
        keras.losses.CategoricalCrossentropy(from_logits=True),
        np.eye(3, dtype=np.float32)[LABELS],
    ),
    "binary": (
        1,
        keras.losses.BinaryCrossentropy(from_logits=True),
        (LABELS > 1).astype(np.float32)[:, None],
    ),
}


def dense(units):
    """One layer; the same weights every time."""
    kernel = keras.initializers.GlorotUniform(1)
    return keras.Sequential(
        [keras.Input([3]), keras.layers.Dense(units, kernel_initializer=kernel)]
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "replicas"), [*((kind, 1) for kind in LABELED), ("classes", 3)])
def test_weights_of_classes_are_keras_s(mirrored, kind, replicas):
    """L21: the SGD step is that of Keras's `fit` on one device, and evaluations are not weighted."""
    units, loss, y = LABELED[kind]
    model = dense(units)
    model.compile(keras.optimizers.SGD(0.5), loss)
    model.fit(X, y, batch_size=12, class_weight=WEIGHTS | {1: 1.0}, verbose=0)
    trainer = Trainer(
        model=lambda: dense(units),
        optimizer=lambda: keras.optimizers.SGD(0.5),
        loss_fn=loss,
        losses=Losses(class_weight=WEIGHTS),
        strategy=mirrored(replicas) if replicas > 1 else "default",
        verbose=False,
    )
    trainer.train((X, y), steps=1, global_batch=12)

    for mine, theirs in zip(trainer.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
    expected = model.evaluate(X, y, batch_size=12, verbose=0)
    assert trainer.evaluate((X, y), global_batch=12)["loss"] == pytest.approx(expected, rel=1e-6)


def test_labels_are_one_tensor():
    """Of a dict, it is not known which labels are classes."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        class_factors({"a": tf.zeros([2])}, WEIGHTS, keras.losses.get("mse"))
    assert str(error.value) == (
        "`class_weight` must be used with one tensor of labels; got a dict. It is not known which "
        "labels are classes. Multiply the losses by the weights in compute_loss."
    )


def test_the_denominator_of_another_reduction_is_refused():
    """`fit` divides by the sum of the weights of the batch's classes."""
    loss_fn = keras.losses.BinaryCrossentropy(reduction="mean_with_sample_weight")
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        check_class_weight({0: 1.0, 1: 5.0}, loss_fn, "mean", overridden=False)
    assert str(error.value) == (
        "`class_weight` must be None if the reduction of loss_fn is 'mean_with_sample_weight'; got "
        "{0: 1.0, 1: 5.0}. `fit` divides by the sum of the weights then, which the step must know "
        "before the forward pass. Leave reduction= out, or yield the weight of each example's "
        "class as the third element of the data."
    )


@pytest.mark.parametrize("shape", [[2, 5], [2, 3, 3]])
def test_several_labels_of_an_example_are_refused(shape):
    """Tokens or pixels have no single class."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        class_factors(tf.zeros(shape, tf.int32), WEIGHTS, keras.losses.get("mse"))
    assert str(error.value) == (
        f"`class_weight` must be used with one label per example; got labels of shape "
        f"{tuple(shape)} and mean_squared_error. The loss of an example has the weight of its "
        "class. Weight single labels by weights of the labels' shape as the third element of the "
        "data, with a loss_fn that returns one loss for each label."
    )
