"""`metrics` as in Keras's compile: names and objects, and what "accuracy" stands for."""

import keras
import numpy as np
import pytest

from trainer import Trainer

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=[16, 3]).astype("float32")
CLASSES = RANDOM.integers(0, 4, size=[16])
LOSSES = keras.losses
CASES = {
    "binary": ("sigmoid", 1, LOSSES.BinaryCrossentropy(), CLASSES[:, None] % 2),
    "sparse": ("softmax", 4, LOSSES.SparseCategoricalCrossentropy(), CLASSES),
    "sparse logits": (None, 4, LOSSES.SparseCategoricalCrossentropy(from_logits=True), CLASSES),
    "one-hot": ("softmax", 4, "categorical_crossentropy", np.eye(4, dtype="float32")[CLASSES]),
}


def model_of(activation, units):
    """A dense layer whose weights are the same in every model."""
    initializer = keras.initializers.RandomNormal(seed=1)
    dense = keras.layers.Dense(units, activation=activation, kernel_initializer=initializer)
    return keras.Sequential([keras.Input([3]), dense])


def trainer_of(activation, units, loss, metrics):
    """A trainer that only evaluates."""
    return Trainer(
        model=lambda: model_of(activation, units), loss_fn=loss, metrics=metrics, verbose=False
    )


@pytest.mark.parametrize("case", CASES)
def test_metrics_mean_what_they_mean_in_compile(case):
    """Names and objects give the names and values that Keras's `evaluate` gives."""
    activation, units, loss, labels = CASES[case]
    metrics = ["accuracy", "mse", keras.metrics.AUC(name="area")] if units == 1 else ["accuracy"]
    model = model_of(activation, units)
    model.compile(loss=loss, metrics=metrics)
    expected = model.evaluate(X, labels, batch_size=4, verbose=0, return_dict=True)
    trainer = trainer_of(activation, units, loss, metrics)
    results = trainer.evaluate((X, labels), global_batch=4)

    assert results == pytest.approx(expected, abs=1e-6)


def test_accuracy_of_logits_counts_logits():
    """A logit above 0 counts as 1; Keras compares logits with 0.5, which is a probability."""
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    metrics = {"right": "accuracy", "entropy": "crossentropy"}
    trainer = trainer_of(None, 1, loss, metrics)
    labels = CLASSES[:, None] % 2
    results = trainer.evaluate((X, labels), global_batch=8)
    logits = trainer.predict(X, global_batch=8)

    assert results["right"] == np.mean((logits > 0) == labels)
    assert results["entropy"] == pytest.approx(results["loss"])


@pytest.mark.parametrize(
    ("metrics", "loss", "message"),
    [
        (
            ["accuracy"],
            "mse",
            "`metrics` must name a class instead of 'accuracy' unless loss_fn is a cross entropy of "
            "Keras; got loss_fn=mean_squared_error. Which class fits depends on the labels, and a "
            "cross entropy tells what they are. Pass [keras.metrics.BinaryAccuracy()] for labels of "
            "0 or 1, [keras.metrics.CategoricalAccuracy()] for one-hot labels, or "
            "[keras.metrics.SparseCategoricalAccuracy()] for class numbers.",
        ),
        (
            ["acuracy"],
            "mse",
            "`metrics` must hold names of classes of keras.metrics that need no arguments; got "
            "'acuracy'. keras.metrics makes no such metric. Did you mean 'accuracy'?",
        ),
        (
            [keras.metrics.AUC],
            "mse",
            "`metrics` must hold names and objects of keras.metrics; got AUC. Anything else cannot "
            "be made anew for training and for evaluation. Pass names and metrics as in Keras's "
            'compile, such as ["accuracy"], or a function that returns a dict, such as lambda: '
            '{"accuracy": keras.metrics.SparseCategoricalAccuracy()}.',
        ),
        (
            "accuracy",
            "mse",
            "`metrics` must be a list or a dict of metrics, or a function that returns a dict; got "
            "str. Training and evaluation each make their own metrics from it. Pass names and "
            'metrics as in Keras\'s compile, such as ["accuracy"], or a function that returns a '
            'dict, such as lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()}.',
        ),
        (
            ["mae", keras.metrics.MeanSquaredError(name="mae")],
            "mse",
            "`metrics` must have a name of its own for each metric; got 'mae' twice. The log has one "
            "number for each name. Pass an object with another name=.",
        ),
    ],
)
def test_what_cannot_be_a_metric_is_refused_at_once(metrics, loss, message):
    """The constructor raises, and what the error suggests is accepted."""
    with pytest.raises((TypeError, ValueError)) as error:
        Trainer(metrics=metrics, loss_fn=loss)

    assert str(error.value) == message


def test_what_the_error_suggests_works():
    """A class for the labels is accepted with any loss."""
    trainer = trainer_of("sigmoid", 1, "mse", [keras.metrics.BinaryAccuracy()])

    assert set(trainer.evaluate((X, CLASSES[:, None] % 2), global_batch=8)) == {
        "loss",
        "binary_accuracy",
    }


def test_an_output_that_does_not_fit_the_loss_is_refused():
    """Several outputs with a binary cross entropy are classes of their own; Keras would compare the
    largest.
    """
    trainer = trainer_of("sigmoid", 4, "binary_crossentropy", ["accuracy"])
    with pytest.raises(ValueError, match="BinaryAccuracy") as error:
        trainer.evaluate((X, np.eye(4, dtype="float32")[CLASSES]), global_batch=8)

    assert str(error.value) == (
        "`metrics` must name a class instead of 'accuracy' for this model; got an output of shape "
        "(None, 4) with a loss for BinaryAccuracy. Keras would choose another class by the shape. "
        "Pass an object, such as [keras.metrics.BinaryAccuracy()]."
    )
