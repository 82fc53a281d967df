"""Building what a trainer works with, and restoring it from a checkpoint."""

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes

from trainer import Checkpoints, Losses, Trainer
from trainer.run.build import recorded_settings
from trainer.run.slots import optimizers_by_item


class Late(keras.Model):
    """Creates its variables when it is first called, and remembers the sizes of the batches."""

    def __init__(self):
        """Has a layer whose statistics a training pass would assign."""
        super().__init__()
        self.norm = keras.layers.BatchNormalization()
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        self.sizes = []

    def call(self, x, training=False):
        """Normalizes and predicts."""
        self.sizes.append(x.shape[0])
        return self.dense(self.norm(x, training=training))


class OfLate(Linear):
    """A trainer of a `Late` model."""

    def build_model(self):
        """Returns a model without variables."""
        return Late()


def started(trainer):
    """The trainer after it has seen its first batch."""
    access.start(trainer, tf.nest.map_structure(tf.constant, slopes(1.0, 2.0, 3.0, 4.0)))
    return trainer


def test_a_model_that_is_built_when_called_sees_one_example():
    """The call creates the variables, assigns none of them, and costs one example."""
    trainer = started(OfLate(verbose=False))
    mean, variance = trainer.model.norm.moving_mean, trainer.model.norm.moving_variance

    assert trainer.model.sizes[0] == 1
    assert len(trainer.model.trainable_variables) == 3
    assert (float(mean.numpy()[0]), float(variance.numpy()[0])) == (0.0, 1.0)


def test_evaluations_have_metrics_of_their_own():
    """An evaluation during training does not reset the metrics of the training."""

    class Measured(Linear):
        def build_metrics(self):
            return {"mean": keras.metrics.Mean()}

        def update_metrics(self, batch, aux):
            self.metrics["mean"].update_state(batch["slope"])

    parts = started(Measured(verbose=False))._parts

    assert list(parts.metrics.train) == list(parts.metrics.eval) == ["mean"]
    assert parts.metrics.train["mean"] is not parts.metrics.eval["mean"]


def test_metrics_must_be_a_dict():
    """The error says why they need names."""

    class Listed(Linear):
        def build_metrics(self):
            return [keras.metrics.Mean()]

    with pytest.raises(TypeError, match="`metrics`"):
        started(Listed(verbose=False))


def test_the_settings_of_a_record_are_json_types():
    """A rule is recorded by its description."""
    trainer = Linear(loss_scale=1024, seed=1, num_microbatches=2, verbose=False)

    assert recorded_settings(trainer) == {
        "precision": "float32",
        "jit_compile": False,
        "num_microbatches": 2,
        "alternate_optimizers": False,
        "updates_per_step": {},
        "reduce_dtype": None,
        "reduce_bucket_bytes": None,
        "rule": "FixedLossScale(loss_scale=1024.0)",
        "num_replicas": 1,
    }


def test_several_optimizers_have_items_of_their_own():
    """A checkpoint holds each optimizer under its name."""
    one, other = keras.optimizers.SGD(), keras.optimizers.SGD()

    assert optimizers_by_item(one) == {"optimizer": one}
    assert optimizers_by_item({"a": one, "b": other}) == {"optimizer_a": one, "optimizer_b": other}


@pytest.mark.parametrize("name", ["model", "optimizer", "state", "trainer"])
def test_items_of_a_checkpoint_have_names_of_their_own(name):
    """Names that every checkpoint uses are refused."""
    trainer = Linear(verbose=False)
    trainer.checkpoint_items = lambda: {name: tf.Variable(1.0)}
    with pytest.raises(ValueError, match="`checkpoint_items`"):
        started(trainer)


@pytest.mark.slow
def test_weights_of_another_run_are_taken_once(tmp_path):
    """`init_from` gives a new run its weights, and a resumed run ignores it."""
    Linear(model_dir=tmp_path / "old", verbose=False).train(slopes(1.0), steps=2, global_batch=1)
    settings = {
        "checkpoints": Checkpoints(init_from=tmp_path / "old"),
        "model_dir": tmp_path / "new",
        "verbose": False,
    }
    first = started(Linear(**settings))
    assert (first.weight, first.totals.attempted) == (-1.0, 0)
    first.train(slopes(1.0), steps=3, global_batch=1)

    assert started(Linear(**settings)).weight == -4.0


def test_a_built_model_is_not_called():
    """A model that has its variables is not called before the first step."""
    model = Late()
    model(tf.ones([2, 1]))
    model.sizes.clear()

    class Built(OfLate):
        def build_model(self):
            return model

    started(Built(verbose=False))

    assert model.sizes == []


class Counting(keras.Model):
    """Counts its calls in a `tf.Variable`, which no scope of Keras holds back."""

    def __init__(self):
        """A layer without a shape, and the counter."""
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.calls = tf.Variable(0, trainable=False)

    def call(self, inputs):
        """Counts."""
        self.calls.assign_add(1)
        return self.dense(inputs)


def test_building_a_model_is_no_step():
    """The call that creates a model's variables leaves those that exist as they were."""
    trainer = Trainer(model=Counting, optimizer="sgd", loss_fn="mse", verbose=False)
    trainer.train(
        (np.ones([8, 2], np.float32), np.ones([8, 3], np.float32)), steps=3, global_batch=4
    )
    assert int(trainer.model.calls.numpy()) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("late", [False, True])
def test_a_loss_of_groups_of_examples_builds_its_model(late):
    """Without an Input a model is built by its first call, and some metrics by their first update. A
    loss that needs pairs of examples cannot be computed from one.
    """

    class Pairs(Trainer):
        def compute_loss(self, batch, training):
            first, second = tf.split(self.model(batch[0], training=training), 2)
            return tf.reduce_mean((first - second) ** 2), self.model(batch[0])

    layers = [keras.Input([2])] if late else []
    trainer = Pairs(
        model=lambda: keras.Sequential([*layers, keras.layers.Dense(3, "sigmoid")]),
        optimizer="sgd",
        loss_fn="mse",
        losses=Losses(reduction="global"),
        metrics=[keras.metrics.F1Score("macro", threshold=0.5)] if late else [],
        verbose=False,
    )
    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    totals = trainer.train((x, np.ones([8, 3], np.float32)), steps=2, global_batch=4).totals
    assert totals.applied == 2


@pytest.mark.sampled
@pytest.mark.parametrize("place", ["loss", "metrics", "train_step"])
@pytest.mark.parametrize("online", [False, True])
def test_a_variable_that_no_checkpoint_holds_is_refused(tmp_path, place, online):
    """L12: with a `model_dir`, a variable that a step writes is refused by name before the first step,
    unless it is tracked; without one, it is the program's own matter.
    """
    hidden = tf.Variable(0.0, name="hidden")

    def trainer_of(**arguments):
        class Own(Linear):
            def compute_loss(self, batch, training):
                if place == "loss":
                    hidden.assign_add(1.0)
                return super().compute_loss(batch, training)

            def update_metrics(self, batch, aux):
                if place == "metrics":
                    hidden.assign_add(1.0)

            def train_step(self, batch):
                if place == "train_step":
                    hidden.assign_add(1.0)
                return super().train_step(batch)

        return Own(verbose=False, **arguments)

    def take_steps(trainer):
        if online:
            trainer.train_on_batch(slopes(1.0))
        else:
            trainer.train(slopes(1.0), steps=1, global_batch=1)

    with pytest.raises(ValueError, match=r"`model_dir` .* 'hidden:0'"):
        take_steps(trainer_of(model_dir=tmp_path / "refused"))
    assert float(hidden) == 0.0
    take_steps(trainer_of())
    assert float(hidden) == 1.0
    kept = trainer_of(model_dir=tmp_path / "kept")
    kept.hidden = hidden
    take_steps(kept)
    assert float(hidden) == 2.0
