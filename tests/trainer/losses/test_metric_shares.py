"""Metrics and functions of the user's get a replica's share of a batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from trainer import Trainer

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
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        Trainer(**settings, strategy=mirrored(2)).evaluate(data, global_batch=4)

    name = "out_rmse" if in_dict else "rmse"
    assert one[name] == pytest.approx(np.mean(np.sqrt(np.mean(batches**2, axis=1))), rel=1e-6)
    assert str(error.value) == (
        "`metrics` must hold functions that return one number per example on several replicas; got "
        f"{name!r}, which returns one number for a batch. Each replica sees only its share of a "
        "batch, and the mean over shares is another number than that of the batch. Return one "
        "number per example, or pass a metric that adds up what it needs, such as "
        "keras.metrics.RootMeanSquaredError()."
    )


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

    warned = "The metric 'largest' (Largest) is updated by each replica with its share"
    assert (warned in caplog.text) == (replicas > 1)


class Unweighted(Deviation):
    """Takes no weights."""

    def update_state(self, y, p):
        """Adds the errors of a batch."""
        super().update_state(y, p)


class AnyWeighted(Deviation):
    """Passes everything on."""

    def update_state(self, *arguments, **weights):
        """Adds the errors of a batch."""
        super().update_state(*arguments, **weights)


@pytest.mark.parametrize("when", ["train", "evaluate"])
def test_a_metric_without_weights_is_refused(when):
    """It would count examples that pad a batch."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    settings = {"model": model, "optimizer": "sgd", "loss_fn": "mse", "verbose": False}
    trainer = Trainer(metrics=[Unweighted()], **settings)
    with pytest.raises(TypeError) as error:
        trainer.train(data, steps=1) if when == "train" else trainer.evaluate(data)

    assert str(error.value) == (
        "`metrics` must hold metrics whose update_state takes sample_weight; got Unweighted, whose "
        "update_state does not. Examples that pad a batch have weight 0, and the metric would count "
        "them. Add a parameter sample_weight=None, and weight the examples by it."
    )
    found = Trainer(metrics=[AnyWeighted(name="error")], **settings).evaluate(data)
    assert found["error"] == pytest.approx(np.abs(Y[:, 0] - X.sum(axis=1)).mean(), rel=1e-5)
