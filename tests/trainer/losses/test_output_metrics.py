"""Metrics of single outputs, and each output's loss, as in `compile`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Losses, Trainer

RNG = np.random.default_rng(7)
X = RNG.normal(size=[8, 3]).astype(np.float32)
Y = {"a": RNG.normal(size=[8, 2]).astype(np.float32), "b": RNG.integers(0, 3, 8)}
LOSSES = {"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
WEIGHTS = {"a": 0.25, "b": 2.0}


def two_heads(kind=dict):
    """A model with two outputs, in a dict or in a list; the same weights every time."""
    x = keras.Input([3])
    outputs = {
        name: keras.layers.Dense(
            units,
            kernel_initializer=keras.initializers.GlorotUniform(units),
            name=f"head_{name}",
        )(x)
        for name, units in {"a": 2, "b": 3}.items()
    }
    return keras.Model(x, outputs if kind is dict else [*outputs.values()])


def trainer_of(kind, metrics, **arguments):
    """A trainer of `two_heads` with plain SGD."""
    return Trainer(
        model=lambda: two_heads(kind),
        optimizer=lambda: keras.optimizers.SGD(0.5),
        loss_fn=LOSSES if kind is dict else [*LOSSES.values()],
        losses=Losses(weights=WEIGHTS if kind is dict else [*WEIGHTS.values()]),
        metrics=metrics,
        verbose=False,
        **arguments,
    )


def test_weights_may_be_bools():
    """The examples that are True count, in each output's loss and metrics too."""
    keep = np.arange(8) % 2 == 0
    trainer = trainer_of(dict, {"a": "mae"})
    found = trainer.evaluate((X, Y, keep), global_batch=8)
    alone = X[keep], {name: each[keep] for name, each in Y.items()}
    assert found == pytest.approx(trainer_of(dict, {"a": "mae"}).evaluate(alone, global_batch=4))


@pytest.mark.parametrize(
    ("kind", "replicas"), [pytest.param(dict, 3, marks=pytest.mark.thorough), (list, 1)]
)
def test_each_output_has_its_loss_and_metrics_as_in_compile(mirrored, kind, replicas):
    """The numbers of training and of evaluation have the names and values of Keras's."""
    form = dict if kind is dict else (lambda each: [*each.values()])
    top = keras.metrics.SparseTopKCategoricalAccuracy(2, "top")
    metrics = form({"a": "mae", "b": ["accuracy", top]})
    model = two_heads(kind)
    model.compile("sgd", form(LOSSES), loss_weights=form(WEIGHTS), metrics=metrics)
    model.optimizer.learning_rate = 0.5
    trainer = trainer_of(kind, metrics, strategy=mirrored(replicas) if replicas > 1 else "default")
    data = X, (Y if kind is dict else tuple(Y.values()))
    after = model.train_on_batch(X, form(Y), return_dict=True)
    found = trainer.train_on_batch(data)

    assert found == pytest.approx(
        {name: np.float64(each) for name, each in after.items()}, rel=1e-5
    )
    after = model.evaluate(X, form(Y), batch_size=4, verbose=0, return_dict=True)
    assert trainer.evaluate(data, global_batch=4) == pytest.approx(after, rel=1e-5)


def test_losses_of_outputs_are_weighted_as_the_loss_is():
    """With weights of examples, the loss is still the weighted sum of the outputs' losses, also where
    an example that weighs nothing has a loss of NaN.
    """
    weight = np.arange(8, dtype=np.float32)
    labels = Y | {"a": np.where(weight[:, None] == 0, np.nan, Y["a"]).astype(np.float32)}
    found = trainer_of(dict, None).evaluate((X, labels, weight), global_batch=3)

    assert set(found) == {"loss", "a_loss", "b_loss"}
    assert found["loss"] == pytest.approx(0.25 * found["a_loss"] + 2.0 * found["b_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "metrics", "message"),
    [
        (
            dict,
            ["mae"],
            "`metrics` must have the structure of `loss_fn`, which is a dict; got list of 1. Each "
            'metric takes one output and its labels. Pass metrics={"a": ["mae"]} if loss_fn is a '
            "dict, or a list with a list of metrics for each output if it is a list; or override "
            "build_metrics and update_metrics(batch, outputs).",
        ),
        (
            dict,
            {"aa": "mae"},
            "`metrics` must have names of outputs as keys; got 'aa', and the model's outputs are "
            "'a', 'b'. Each metric takes one output and its labels. Did you mean 'a'?",
        ),
        (
            dict,
            {"a": ["mae", "mae"]},
            "`metrics` must have a name of its own for each metric; got 'a_mae' twice. A metric of "
            "one of several outputs is logged as OUTPUT_METRIC, and the output's loss as "
            "OUTPUT_loss. Pass an object with another name=.",
        ),
    ],
    ids=["structure", "name", "twice"],
)
def test_metrics_that_fit_no_output_are_refused(kind, metrics, message):
    """The error names the outputs, and what to pass."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        trainer_of(kind, metrics).evaluate((X, Y), global_batch=8)
    assert str(error.value) == message


def test_functions_are_metrics_of_outputs():
    """They are logged as OUTPUT_FUNCTION."""

    def near(labels, outputs):
        return tf.cast(tf.abs(labels - outputs) < 1.0, tf.float32)

    inputs = keras.Input([2])
    outputs = {name: keras.layers.Dense(1)(inputs) for name in ("a", "b")}
    trainer = Trainer(
        model=lambda: keras.Model(inputs, outputs),
        optimizer="sgd",
        loss_fn={"a": "mse", "b": "mae"},
        metrics={"a": near, "b": [near, "mse"]},
        verbose=False,
    )
    x, y = np.ones([4, 2], np.float32), np.zeros([4, 1], np.float32)
    data = (x, {"a": y, "b": y})
    trainer.train(data, steps=1, global_batch=4)
    found = trainer.evaluate(data, global_batch=4)
    predictions = trainer.predict(x, global_batch=4)
    assert {"a_near", "b_near", "b_mse"} < set(found)
    for name in ("a", "b"):
        assert found[f"{name}_near"] == np.mean(np.abs(predictions[name]) < 1.0)
