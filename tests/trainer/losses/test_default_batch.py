"""What the default methods ask of a batch, of the weights of classes and of a model's last layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import linear_model

from trainer import Losses, Monitoring, Trainer
from trainer.base.warn_once import warn_once
from trainer.losses.default_batch import (
    check_class_weight,
    class_factors,
    warn_of_half_probabilities,
)
from trainer.losses.outputs import OutputLosses

ONE = np.ones([4, 1], np.float32)


def made(**arguments):
    """A trainer of a model with one input."""
    arguments = {"model": linear_model, "optimizer": "sgd", "loss_fn": "mse"} | arguments
    return Trainer(
        verbose=False, monitoring=Monitoring(check_gradients=False), jit_compile=False, **arguments
    )


def test_evaluation_data_without_labels_is_refused_before_training():
    """Not at the end of the run."""
    trainer = made()
    with pytest.raises(ValueError, match="`compute_loss` must be overridden"):
        trainer.train((ONE, ONE), 1, global_batch=4, eval_data=ONE)


@pytest.mark.parametrize("count", [2, 3])
def test_predict_takes_the_inputs_of_a_model(count):
    """An array for each of several inputs, in a tuple or a list, is what the model is called with,
    as in Keras; so are a dict, and a tuple of inputs with labels.
    """

    def model():
        inputs = [keras.Input([1], name=f"x{at}") for at in range(count)]
        weighted = [10.0**at * each for at, each in enumerate(inputs)]
        return keras.Model(inputs, keras.layers.add(weighted))

    arrays = [np.full([4, 1], at + 1.0, np.float32) for at in range(count)]
    expected = sum(10.0**at * (at + 1) for at in range(count))
    named = {f"x{at}": each for at, each in enumerate(arrays)}
    for data in (tuple(arrays), arrays, (tuple(arrays),), named, (tuple(arrays), ONE)):
        found = made(model=model, optimizer=None).predict(data, global_batch=2)
        np.testing.assert_array_equal(found, np.full([4, 1], expected))


def test_an_own_predict_batch_gets_the_data_as_it_is():
    """Two arrays for a model of two inputs reach a method of the user's as they are."""

    class Own(Trainer):
        def predict_batch(self, batch):
            first, second = batch
            return self.model([first, 2 * second])

    def model():
        inputs = [keras.Input([1]), keras.Input([1])]
        return keras.Model(inputs, keras.layers.add(inputs))

    found = Own(model=model, verbose=False).predict((ONE, ONE), global_batch=2)
    np.testing.assert_array_equal(found, 3 * ONE)


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


def test_classes_may_be_negative():
    """As the labels of a hinge loss are; classes that are not named weigh 1."""
    found = class_factors(tf.constant([[-1.0], [0.0], [1.0], [3.0]]), {-1: 5.0, 1: 2.0}, None)

    assert found.numpy().tolist() == [5.0, 1.0, 2.0, 1.0]


def test_the_denominator_of_another_reduction_is_refused():
    """`fit` divides by the sum of the weights of the batch's classes."""
    loss_fn = keras.losses.BinaryCrossentropy(reduction="mean_with_sample_weight")
    with pytest.raises(ValueError, match="`class_weight`"):
        check_class_weight({0: 1.0, 1: 5.0}, loss_fn, "mean", overridden=False)


@pytest.mark.parametrize("shape", [[2, 5], [2, 3, 3]])
def test_several_labels_of_an_example_are_refused(shape):
    """Tokens or pixels have no single class."""
    with pytest.raises(ValueError, match="`class_weight`"):
        class_factors(tf.zeros(shape, tf.int32), WEIGHTS, keras.losses.get("mse"))


def sequential(activation, dtype="mixed_float16"):
    """Returns a model whose last layer has an activation and a dtype policy."""
    last = keras.layers.Dense(4, activation, dtype=dtype, name="last")
    return keras.Sequential([keras.Input([2]), last])


def functional(activation):
    """Returns a functional model of two outputs, the second of which has the activation."""
    inputs = keras.Input([2])
    first = keras.layers.Dense(1, dtype="mixed_float16", name="first")(inputs)
    hidden = keras.layers.Dense(3, "sigmoid", dtype="mixed_float16", name="hidden")(inputs)
    second = keras.layers.Dense(4, dtype="mixed_float16", name="second")(hidden)
    return keras.Model(
        inputs, [first, keras.layers.Activation(activation, dtype="float16")(second)]
    )


LOGITS = keras.losses.BinaryCrossentropy(from_logits=True)
BOTH = OutputLosses(
    {0: keras.losses.get("mse"), 1: keras.losses.get("categorical_crossentropy")}, {0: 1.0, 1: 1.0}
)


@pytest.mark.parametrize(
    ("model", "loss_fn", "warned"),
    [
        (sequential("sigmoid"), keras.losses.binary_crossentropy, True),
        (sequential("softmax", "mixed_bfloat16"), keras.losses.CategoricalCrossentropy(), True),
        (functional("softmax"), BOTH, True),
        (sequential("sigmoid", "float32"), keras.losses.binary_crossentropy, False),
        (sequential("sigmoid"), LOGITS, False),
        (sequential("sigmoid"), lambda y, p: y - p, False),
        (functional(None), BOTH, False),
    ],
)
def test_probabilities_in_half_precision_are_warned_of(model, loss_fn, warned, caplog):
    """Logits, float32 and other losses give no warning."""
    warn_once.cache_clear()
    warn_of_half_probabilities(model, loss_fn)

    assert [model.layers[-1].name in each for each in caplog.messages] == [True] * warned
