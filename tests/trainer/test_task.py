"""The user-defined part of a trainer: its hooks, its metrics, and what a checkpoint holds of it."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes

from trainer import Checkpoints, Trainer


class Hooked(Linear):
    """Records the calls of its hooks."""

    def __init__(self, **arguments):
        """Creates a counter that is saved in checkpoints."""
        super().__init__(verbose=False, **arguments)
        self.calls = []
        self.halved = tf.Variable(0, dtype=tf.int64)
        self.batches_evaluated = 0

    def checkpoint_items(self):
        """Saves the counter."""
        return {"halved": self.halved}

    def on_train_begin(self):
        """Records the call."""
        self.calls.append(("train begins", self.totals.attempted))

    def on_loop_begin(self, step):
        """Records the call."""
        self.calls.append(("loop begins", step))

    def on_loop_end(self, step):
        """Records the call."""
        self.calls.append(("loop ends", step))

    def on_train_end(self, summary):
        """Records the call."""
        self.calls.append(("train ends", summary.step))

    def train_step(self, batch):
        """Halves the slopes and counts the updates."""
        report = super().train_step({**batch, "slope": batch["slope"] / 2})
        self.halved.assign_add(tf.cast(report.grads_finite, tf.int64))
        return report

    def eval_step(self, batch):
        """Doubles the losses and counts the traces."""
        self.batches_evaluated += 1
        total, weight = super().eval_step(batch)
        return 2 * total, weight


def test_hooks_are_called_in_order(tmp_path):
    """Hooks run at the beginning and end of training and of every inner loop; `train_step` and
    `eval_step` change the step; an extra checkpoint item is saved and restored.
    """
    trainer = Hooked(model_dir=tmp_path, steps_per_loop=2)
    trainer.train(slopes(2.0, 2.0), steps=3, global_batch=2)

    assert trainer.calls == [
        ("train begins", 0),
        ("loop begins", 0),
        ("loop ends", 2),
        ("loop begins", 2),
        ("loop ends", 3),
        ("train ends", 3),
    ]
    assert trainer.weight == 1.0 - 3 * 1.0
    assert trainer.evaluate(slopes(1.0, 3.0), global_batch=1)["loss"] == 2 * 2.0 * trainer.weight
    assert trainer.batches_evaluated == 1

    resumed = Hooked(model_dir=tmp_path, checkpoints=Checkpoints(data_resume="restart"))
    resumed.train(slopes(2.0, np.nan), steps=5, global_batch=2)

    assert resumed.calls[0] == ("train begins", 3)
    assert int(resumed.halved.numpy()) == 3


def test_metrics_without_an_update_are_refused():
    """Metrics beside a custom `compute_loss` need an `update_metrics`."""

    class Forgetful(Linear):
        def build_metrics(self):
            return {"mean": keras.metrics.Mean()}

    with pytest.raises(ValueError, match="`update_metrics`"):
        Forgetful(verbose=False).train(slopes(1.0), steps=1, global_batch=1)


class Reported(Linear):
    """Records what its hooks are told."""

    def __init__(self, **arguments):
        """Begins with an empty record."""
        super().__init__(verbose=False, **arguments)
        self.told = []

    def on_log(self, step, values):
        """Records the loss."""
        assert {type(value) for value in values.values()} <= {float, int}
        self.told.append(("log", step, values["loss"]))

    def on_evaluate_end(self, step, results):
        """Records the loss."""
        self.told.append(("evaluation", step, results["loss"]))

    def on_epoch_end(self, epoch):
        """Records the call."""
        self.told.append(("epoch", epoch))

    def on_loop_end(self, step):
        """Records the call."""
        self.told.append(("loop", step))


@pytest.mark.thorough
def test_hooks_get_the_numbers_of_the_log(tmp_path):
    """Log lines and evaluations are told to hooks as `metrics.jsonl` has them, and epochs end on
    time, in this order, in a resumed run too.
    """
    data = slopes(1.0, 2.0, 3.0)  # in epochs of three steps; each step lowers the weight

    def run(epochs):
        trainer = Reported(model_dir=tmp_path, log_interval=4, seed=0)
        arguments = {"global_batch": 1, "eval_data": slopes(1.0), "eval_interval": 6}
        trainer.train(data, epochs=epochs, **arguments)
        return trainer.told

    first, second = run(2), run(3)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    written = {(line["split"], line["step"]): line.get("loss") for line in lines}

    def log(step):
        return ("log", step, written["train", step])

    def evaluation(step):
        return ("evaluation", step, written["validation", step])

    assert first == [
        *(("epoch", 1), ("loop", 3), log(4), ("loop", 4)),
        *(log(6), evaluation(6), ("epoch", 2), ("loop", 6)),
    ]
    assert second == [log(8), ("loop", 8), log(9), evaluation(9), ("epoch", 3), ("loop", 9)]


def test_epochs_need_a_length():
    """`on_epoch_end` with data of unknown length is an error, because nothing would call it."""
    endless = tf.data.Dataset.from_tensors(slopes(1.0)).repeat()
    with pytest.raises(ValueError, match="`train_data` must"):
        Reported().train(endless, steps=2)


class Block(keras.layers.Layer):
    """A layer with statistics, random numbers, a regularizer and a loss of its own."""

    def __init__(self, **arguments):
        """Creates layers."""
        super().__init__(**arguments)
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.25, seed=3)
        ones = {"kernel_initializer": "ones", "kernel_regularizer": keras.regularizers.L2(0.5)}
        self.dense = keras.layers.Dense(1, **ones)

    def call(self, x, training=False):
        """Returns one number per example."""
        x = self.drop(self.norm(x, training=training), training=training)
        self.add_loss(0.25 * tf.reduce_mean(tf.cast(x, tf.float32) ** 2))
        return self.dense(x)


def as_model():
    """The same layer in a functional model."""
    inputs = keras.Input([2])
    return keras.Model(inputs, Block()(inputs))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        ("float32", 1),
        ("mixed_bfloat16", 2),
        pytest.param("float32", 2, marks=pytest.mark.slow),
        pytest.param("mixed_bfloat16", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_layer_is_a_model(tmp_path, mirrored, precision, replicas):
    """Its run, resumed half-way, has the bits of one whose model holds nothing but this layer."""
    x = np.float32([[1, 2], [3, -1], [0.5, 4], [-2, 1]] * 2)
    data = (x, x[:, :1])
    found = []
    for make in (as_model, Block):
        for steps in (2, 4):
            trainer = Trainer(
                model=make,
                optimizer=lambda: keras.optimizers.SGD(0.125),
                loss_fn="mse",
                precision=precision,
                strategy=mirrored(2) if replicas == 2 else "default",
                checkpoints=Checkpoints(keep_best=1),
                model_dir=tmp_path / make.__name__,
                seed=0,
                verbose=False,
            )
            summary = trainer.train(data, steps=steps, global_batch=8, eval_data=data)
            assert (summary.steps_run, summary.step) == (2, steps)
        predicted = trainer.predict(x, global_batch=8)
        loss = trainer.evaluate(data, global_batch=8)["loss"]
        found.append([loss, predicted, *(weight.numpy() for weight in trainer.model.weights)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_built_layer_is_a_model():
    """An instance, as any model may be; a few steps bring its weight where it belongs."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    x = np.ones([4, 1], np.float32)
    trainer = Trainer(
        model=layer, optimizer=lambda: keras.optimizers.SGD(0.5), loss_fn="mse", verbose=False
    )
    trainer.train((x, 3 * x), steps=1, global_batch=4)
    assert layer.get_weights()[0] == trainer.predict(x, global_batch=4)[0] == 3.0
