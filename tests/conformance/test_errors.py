"""Values that would give a wrong number without a word, each refused by an error that names it.

The words of an error stand where it is raised, and nowhere else. What else a class refuses is tested
beside it.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from helpers import linear_model

import scaling
import trainer
import trainer.flags
from trainer import Checkpoints, Divergence, Losses, Monitoring, Skips, Updates
from trainer.step import plan_step

ONES = np.ones([4, 1], np.float32)
DATA = ONES, ONES
FLAGS = [
    ("--checkpoints.keep_best=3", "keep_best"),
    ("--skips.max_records=5", "max_records"),
]


def make(**settings):
    """Returns a trainer of one weight."""
    usual = {"model": linear_model, "optimizer": "sgd", "loss_fn": "mse", "verbose": False}
    return trainer.Trainer(**usual | settings)


def train(*arguments, **settings):
    """Takes a step with the settings, on `DATA` or the given arguments of `train`."""
    make(**settings).train(*(arguments or (DATA, 1)), global_batch=4)


def predict(**arguments):
    """Predicts with a trainer that keeps no moving average."""
    make().predict(ONES, global_batch=4, **arguments)


def plan(**settings):
    """Plans a step of one weight."""
    model = linear_model()
    plan_step(
        strategy=tf.distribute.get_strategy(),
        model=model,
        compute_loss=lambda batch, training: model(batch, training=training)[:, 0],
        rule=scaling.NoLossScale(),
        **settings,
    )


def two_tokens():
    """Unscales gradients by the scale of another loss."""
    rule = scaling.DynamicLossScale()
    scaler, other = scaling.LossScaler(rule), scaling.LossScaler(rule)
    scaler.unscale([tf.ones([2])], other.scale(1.0)[1])


def batches_of(data, **settings):
    """Trains on one batch that is a dataset's own."""
    make().train(tf.data.Dataset.from_tensors(data), **settings)


SGD, BATCHWISE = keras.optimizers.SGD, keras.losses.Circle
IGNORING = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
CASES = [
    # A scale that is not a power of two rounds gradients.
    ("initial_scale", lambda: scaling.DynamicLossScale(initial_scale=1000.0)),
    ("growth_factor", lambda: scaling.DynamicLossScale(growth_factor=1.5)),
    ("loss_scale", lambda: scaling.FixedLossScale(1000)),
    ("loss_scale", lambda: make(loss_scale=1000)),
    ("token", two_tokens),
    # A loss that is no mean over examples, or a weight that has no effect.
    ("loss_fn", lambda: make(loss_fn=keras.losses.MeanSquaredError(reduction="sum"))),
    ("loss_fn", lambda: make(loss_fn=BATCHWISE())),
    ("loss_fn", lambda: make(loss_fn=keras.losses.Dice())),
    ("loss_fn", lambda: make(loss_fn={"a": IGNORING})),
    ("loss_fn", lambda: train((ONES, np.ones([4, 3], np.float32)), 1)),
    ("loss_fn", lambda: make(loss_fn=["mse", "mae"], losses=Losses(reduction="global"))),
    ("weights", lambda: make(losses=Losses(weights=[2.0]))),
    ("class_weight", lambda: make(loss_fn=["mse"], losses=Losses(class_weight={0: 2.0}))),
    ("metrics", lambda: train(metrics=["mae", keras.metrics.MeanSquaredError(name="mae")])),
    # Two settings that contradict each other, or one that would be ignored.
    ("num_microbatches", lambda: train(losses=Losses(reduction="global"), num_microbatches=2)),
    ("reduce_dtype", lambda: train(updates=Updates(reduce_dtype="float16"))),
    ("global_clipnorm", lambda: make(updates=Updates(global_clipnorm=1.0, clipnorm=1.0))),
    ("ema_momentum", lambda: train(optimizer=SGD(use_ema=True), updates=Updates(ema_momentum=0.9))),
    ("updates_per_step", lambda: make(updates=Updates(updates_per_step={"critic": 5}))),
    ("optimizer", lambda: plan(optimizer=SGD(loss_scale_factor=8.0))),
    ("keep_best", lambda: make(checkpoints=Checkpoints(keep_best=3))),
    ("divergence", lambda: make(monitoring=Monitoring(divergence=Divergence(loss_above=100.0)))),
    ("init_from_skip", lambda: make(checkpoints=Checkpoints(init_from_skip=["head/"]))),
    ("max_records", lambda: make(skips=Skips(max_records=5))),
    ("averaged", lambda: predict(averaged=True)),
    # Data that is not what it seems.
    ("train_data", lambda: train((ONES, ONES[:2]), 1)),
    ("train_data", lambda: train((np.ma.masked_array(ONES), ONES), 1)),
    ("global_batch", lambda: train(DATA, 1, num_microbatches=8)),
    ("global_batch", lambda: batches_of(DATA, steps=1, global_batch=4)),
    ("steps", lambda: batches_of(DATA, steps=1, epochs=1)),
]


@contextlib.contextmanager
def refused(name):
    """Asserts that an error begins with a name."""
    with pytest.raises((TypeError, ValueError, flags.Error)) as caught:
        yield
    assert str(caught.value).startswith((f"`{name}` ", f"flag --{name}="))


@pytest.mark.parametrize(
    ("name", "call"), CASES, ids=[f"{at}-{name}" for at, (name, _) in enumerate(CASES)]
)
def test_what_would_be_wrong_is_refused(name, call):
    """The error names the argument."""
    with refused(name):
        call()


@pytest.mark.parametrize(("line", "name"), FLAGS)
def test_a_flag_that_would_be_ignored_is_refused(line, name):
    """The error names the flag, or the argument that it sets."""
    values = flags.FlagValues()
    flags.DEFINE_integer("verbosity", 0, "absl's own", flag_values=values)
    trainer.flags.define_flags(values)
    with refused(name):
        values(["script.py", *line.split()])
        made = trainer.flags.make_trainer(make, values)
        trainer.flags.run_mode(made, DATA, DATA, values)


def test_strategies_that_are_too_small_for_a_batch(mirrored):
    """A replica without an example is refused."""
    with refused("global_batch"):
        make(strategy=mirrored(2)).train(DATA, 1, global_batch=1)
