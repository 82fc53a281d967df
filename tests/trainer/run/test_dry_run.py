"""Dry runs and overfitting one batch: what they find, and that they leave nothing behind."""

import contextlib
import math

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes

import scaling
from trainer import Checkpoints, Skips, Trainer, TrainingStuckError, find_batch_size
from trainer.base.tracking import read_copies, tracked_variables

X = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]


def classifier(**arguments):
    """A small network with statistics, dropout, slots and a metric."""

    def model():
        layers = [
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
        ]
        return keras.Sequential([keras.Input([1]), *layers, keras.layers.Dense(2)])

    return Trainer(
        model=model,
        optimizer=lambda: keras.optimizers.Adam(0.05),
        loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
        seed=3,
        **{"verbose": False} | arguments,
    )


DATA = (X, (X[:, 0] > 0).astype(np.int32))


def bits(trainer):
    """The bytes of every copy of a trainer's variables."""
    roots = [trainer.model, trainer.optimizer, access.state(trainer)]
    roots += [metric.variables for each in access.metrics(trainer) for metric in each.values()]
    variables = tracked_variables(roots)
    copies = tf.nest.flatten(read_copies(variables, trainer.strategy))
    return [copy.numpy().tobytes() for copy in copies]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_dry_run_reports_and_leaves_nothing(mirrored, tmp_path, replicas):
    """A dry run reports on a step, an evaluation, a checkpoint, the number of traces and the
    replicas. Afterwards every bit is as before, `model_dir` is empty, and a run has the bits of one
    without a dry run.
    """
    arguments = {
        "precision": "mixed_float16",
        "loss_scale": "dynamic:initial_scale=2^24",
        "strategy": mirrored(replicas) if replicas > 1 else "default",
    }
    trainer = classifier(model_dir=tmp_path, **arguments)
    trainer.overfit_one_batch(DATA, steps=1, global_batch=8)  # builds the model
    before = bits(trainer)
    found = trainer.dry_run(DATA, global_batch=8, eval_data=DATA)

    assert found.ok
    assert found.step.startswith("skipped, loss ")
    assert "at loss_scale 2^24: backward" in found.step
    assert set(found.evaluation) == {"loss", "accuracy"}
    assert (found.traces, found.replicas) == (1, replicas)
    assert found.checkpoint_bytes > 0
    assert bits(trainer) == before
    assert list(tmp_path.iterdir()) == []

    without_dry_run = classifier(**arguments)
    trainer.train(DATA, steps=12, global_batch=8)
    without_dry_run.train(DATA, steps=12, global_batch=8)
    assert bits(trainer) == bits(without_dry_run)


@pytest.mark.thorough
def test_problems_are_reported():
    """A bad loss, repeated tracing, unequal replicas and lost bits make a dry run fail, and its
    text names them.
    """

    class Restless(Linear):
        def train_step(self, batch):
            self.calls = getattr(self, "calls", 0) + 1
            return super().train_step(batch)

    trainer = Restless(verbose=False)
    good = trainer.dry_run(slopes(1.0, 2.0), global_batch=2)
    assert good.ok
    assert "restored bit for bit" in str(good)

    bad = Linear(verbose=False).dry_run(slopes(np.inf, 2.0), global_batch=2)
    assert not bad.ok
    assert "forward" in bad.step
    broken = good._replace(traces=2, replicas_equal=False, restored=False)
    assert not any(
        good._replace(**{name: value}).ok
        for name, value in [
            ("traces", 2),
            ("replicas_equal", False),
            ("restored", False),
            ("loss", np.nan),
        ]
    )
    assert [word in str(broken) for word in ("TRACED AGAIN", "NOT EQUAL", "BITS LOST")] == [
        True
    ] * 3


def shuffled():
    """A pipeline with another order in every process, whose position cannot be saved."""
    return tf.data.Dataset.from_tensor_slices(slopes(1.0, 2.0)).shuffle(2).batch(2)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("make", "data", "message"),
    [
        (lambda _: Linear(num_microbatches=3), slopes(1.0, 2.0), "must be at least"),
        (lambda folder: Linear(model_dir=folder), shuffled(), "seed"),
        (
            lambda _: Linear(checkpoints=Checkpoints(best_metric="auc")),
            slopes(1.0, 2.0),
            "`best_metric` must be one of",
        ),
    ],
)
def test_what_train_refuses_at_once_a_dry_run_refuses(tmp_path, make, data, message):
    """A dry run raises the error that `train` raises before its first step."""
    arrays = not isinstance(data, tf.data.Dataset)
    arguments = {"global_batch": 2 if arrays else None, "eval_data": slopes(1.0, 2.0)}
    errors = []
    for call in (
        lambda: make(tmp_path).train(data, steps=1, **arguments),
        lambda: make(tmp_path).dry_run(data, **arguments),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.slow
def test_replicas_that_differ_are_found(mirrored):
    """One different weight on one replica is reported."""
    trainer = classifier(strategy=mirrored(2))
    trainer.overfit_one_batch(DATA, steps=1, global_batch=8)
    copy = trainer.strategy.experimental_local_results(trainer.model.weights[0].value)[1]
    copy.assign(copy + 2.0**-20)

    assert not trainer.dry_run(DATA, global_batch=8).replicas_equal


@pytest.mark.thorough
@pytest.mark.parametrize("ended", ["stopped", "stuck"])
def test_a_run_that_has_ended_is_tried(ended):
    """After `stop`, or an error about skips, both take their steps; then nothing is changed."""
    trainer = Linear(verbose=False, skips=Skips(on_nonfinite_loss="raise"))
    trainer.train(slopes(1.0, 2.0), steps=1, global_batch=2)
    if ended == "stopped":
        trainer.stop()
    else:
        with pytest.raises(TrainingStuckError):
            trainer.train(slopes(np.inf, 2.0), steps=3, global_batch=2)
    assert trainer.dry_run(slopes(1.0, 2.0), global_batch=2).ok
    trainer.stop()
    found = trainer.overfit_one_batch(slopes(1.0, 2.0), steps=3, global_batch=2)
    assert len(found.losses) == 3


@pytest.mark.slow
def test_one_batch_is_overfitted():
    """The loss on one batch falls, and the trainer is restored afterwards."""
    trainer = classifier(precision="mixed_float16", loss_scale="dynamic")
    trainer.overfit_one_batch(DATA, steps=1, global_batch=8)
    before = bits(trainer)
    found = trainer.overfit_one_batch(DATA, steps=120, global_batch=8)

    assert found.losses.shape == (120,)
    assert found.losses[-1] < found.losses[0] / 5
    assert bits(trainer) == before
    assert str(found).startswith(f"one batch, 120 steps: loss {found.losses[0]:.4f} -> ")


class Hungry(Linear):
    """Its loss needs more memory than any machine has for more than two examples at once."""

    def compute_loss(self, batch, training):
        """Allocates the memory."""
        losses = super().compute_loss(batch, training)
        rows = tf.shape(losses)[0]
        # 2^46 bytes for more than two examples, 4 bytes for fewer.
        wanted = tf.where(rows > 2, tf.constant(2**44, tf.int64), tf.constant(1, tf.int64))
        return losses + 0.0 * tf.fill([wanted], tf.cast(rows, tf.float32))[0]


@pytest.mark.slow
def test_the_batch_is_halved_until_it_fits():
    """When TensorFlow runs out of memory, the microbatches are halved; the global batch stays."""
    made = []

    def make(num_microbatches):
        made.append(num_microbatches)
        return Hungry(num_microbatches=num_microbatches, verbose=False)

    assert find_batch_size(make, slopes(*range(8)), global_batch=8) == 4
    assert made == [1, 2, 4]


@pytest.mark.slow
def test_an_example_that_never_fits_is_an_error():
    """An error says that not even one example at a time fits into memory."""

    class Starving(Linear):
        def compute_loss(self, batch, training):
            losses = super().compute_loss(batch, training)
            # Not a constant, which TensorFlow would fold.
            wanted = 2**44 * tf.size(losses, tf.int64)
            return losses + tf.fill([wanted], 1.0)[0]

    with pytest.raises(
        ValueError,
        match="out of memory with 2 microbatches",
    ):
        find_batch_size(
            lambda parts: Starving(num_microbatches=parts, verbose=False),
            slopes(1.0, 2.0),
            global_batch=2,
        )


@pytest.mark.thorough
def test_the_loss_scale_is_restored():
    """The loss scale moves in a trial and is restored afterwards."""
    trainer = Linear(loss_scale=scaling.DynamicLossScale(growth_interval=1), verbose=False)
    trainer.overfit_one_batch(slopes(1.0), steps=5, global_batch=1)

    assert trainer.loss_scale == 2.0**15
    assert trainer.totals.attempted == 0


@pytest.mark.thorough
def test_an_evaluation_that_is_nan_is_not_ok():
    """A long run would begin, and every evaluation would be NaN."""
    found = Linear(verbose=False).dry_run(slopes(1.0), global_batch=1, eval_data=slopes(math.nan))

    assert math.isfinite(found.loss)
    assert not found.ok


@pytest.mark.thorough
def test_gradients_that_were_not_compared_are_said_to_be(caplog):
    """A loss that needs more examples than are compared: the reason stands in the findings."""

    class Largest(Trainer):
        def compute_loss(self, batch, training):
            errors = tf.square(self.model(batch[0], training=training)[:, 0] - batch[1])
            return errors + tf.math.top_k(errors, 12).values[0]

    trainer = Largest(
        model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        optimizer="sgd",
        verbose=False,
    )
    x = np.linspace(-1, 1, 16, dtype=np.float32)
    found = trainer.dry_run((x[:, None], x), global_batch=16)
    assert "must have last dimension >= k = 12" in found.gradients
    assert found.gradients.startswith("not compared: ")
    assert f"gradients   {found.gradients}" in str(found)
    assert "were not compared" in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("raises", [False, True])
def test_variables_of_the_users_own_are_restored(raises):
    """Those of the trainer and of its metrics have their values again, even after an error."""

    class Counting(Linear):
        def __init__(self):
            super().__init__(verbose=False, jit_compile=False)
            self.counter, self.own_metric = tf.Variable(0.0), keras.metrics.Sum()

        def update_metrics(self, batch, aux):
            self.counter.assign_add(1.0)
            self.own_metric.update_state(batch["slope"])
            tf.debugging.assert_less(batch["slope"], 9.0)

    trainer = Counting()
    trainer.train(slopes(1.0), steps=1, global_batch=1)
    expected = pytest.raises(tf.errors.InvalidArgumentError) if raises else contextlib.nullcontext()
    with expected:
        trainer.overfit_one_batch(slopes(10.0 if raises else 2.0), steps=3, global_batch=1)

    assert float(trainer.counter) == float(trainer.own_metric.result()) == 1.0
    assert (trainer.weight, trainer.totals.attempted) == (0.0, 1)


def test_the_memory_of_a_dense_layer():
    """Computed by hand: 4 bytes for each of 15 weights, gradients and slots."""
    trainer = Trainer(
        model=lambda: keras.Sequential([keras.Input([3]), keras.layers.Dense(5, use_bias=False)]),
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        loss_fn="mse",
        verbose=False,
    )
    found = trainer.dry_run((np.ones([8, 3]), np.ones([8, 5])), global_batch=8).memory

    assert (found.weights, found.gradients) == (4 * 15, 4 * 15)
    # The optimizer also has its step count (8 bytes at most) and its learning rate (4 bytes).
    assert 4 * 15 < found.slots <= 4 * 15 + 12
