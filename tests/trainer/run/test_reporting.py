"""Reading the reports of steps: metrics, stuck and diverged runs, the log and its rates."""

import json
import math
import re

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from access import untuned
from helpers import STEEP, Linear, overflowing, slopes
from plans import Pair, plan_of

from trainer import Checkpoints, Skips, TrainingStuckError
from trainer.checkpoint import CheckpointError
from trainer.log.run_log import RunLog
from trainer.run.reporting import learning_rates


def train_lines(folder):
    """The lines of `metrics.jsonl` about training."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == "train"]


class Measured(Linear):
    """Has the mean slope as a metric, and records it after every inner loop."""

    def __init__(self, **arguments):
        """Has seen nothing yet."""
        super().__init__(verbose=False, steps_per_loop=1, **arguments)
        self.seen = []

    def build_metrics(self):
        """The mean slope."""
        return {"mean": keras.metrics.Mean()}

    def compute_loss(self, batch, training):
        """The slopes are the aux value."""
        return super().compute_loss(batch, training), batch["slope"]

    def update_metrics(self, batch, aux):
        """Takes the slopes of a batch."""
        del batch
        self.metrics["mean"].update_state(aux)

    def on_loop_end(self, step):
        """Records the metric."""
        self.seen.append((step, float(self.metrics["mean"].result())))


def train_measured(trainer, steps):
    """Trains on slopes 1, inf and 3, again and again."""
    batches = [slopes(1.0), slopes(np.inf), slopes(3.0)]
    specs = {"x": tf.TensorSpec([None, 1]), "slope": tf.TensorSpec([None])}
    data = untuned(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs))
    trainer.train(data, steps=steps)


def test_metrics_are_those_of_applied_steps():
    """A skipped step does not count in training metrics."""
    trainer = Measured(log_interval=100)
    train_measured(trainer, steps=4)

    assert trainer.seen[:3] == [(1, 1.0), (2, 1.0), (3, 2.0)]


@pytest.mark.thorough
def test_metrics_start_over_at_every_log_line(tmp_path):
    """The metrics of a log line are those of the steps since the previous one; null if all of them
    were skipped.
    """
    train_measured(
        Measured(
            model_dir=tmp_path, log_interval=1, checkpoints=Checkpoints(data_resume="restart")
        ),
        steps=3,
    )

    assert [line["mean"] for line in train_lines(tmp_path)] == [1.0, None, 3.0]


@pytest.mark.thorough
def test_a_stuck_run_writes_its_log_first(tmp_path):
    """The steps that led to the error have a log line, although none was due yet."""
    trainer = Linear(model_dir=tmp_path, skips=Skips(max_consecutive=2), verbose=False)
    with pytest.raises(TrainingStuckError):
        trainer.train(slopes(math.inf), steps=8, global_batch=1)
    [line] = train_lines(tmp_path)

    assert (line["step"], line["skipped"], line["loss"]) == (2, 2, None)


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), tf.errors.ResourceExhaustedError(None, None, "full")],
)
def test_an_error_of_the_file_system_names_the_folder(tmp_path, monkeypatch, error):
    """Errors of the file system, TensorFlow's included, say which folder could not be written."""

    def fail(*_):
        raise error

    monkeypatch.setattr(RunLog, "flush", fail)
    trainer = Linear(model_dir=tmp_path, verbose=False)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))) as caught:
        trainer.train(slopes(1.0), steps=1, global_batch=1)

    assert caught.value.__cause__ is error


def falling():
    """A schedule that falls by 0.1 with every update."""
    return keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_the_logged_rate_is_that_of_the_last_update(mirrored, replicas):
    """With plain SGD and a gradient of 1, the weight falls by the logged rates; a rate that a hook
    assigns is logged with the steps that used it.
    """

    class Scheduled(Linear):
        def build_optimizer(self):
            return keras.optimizers.SGD(falling() if replicas == 1 else 0.5)

        def on_loop_end(self, step):
            if replicas == 3 and step == 2:
                self.optimizer.learning_rate = 0.25

    strategy = "default" if replicas == 1 else mirrored(replicas)
    trainer = Scheduled(strategy=strategy, log_interval=1, verbose=False)
    history = trainer.train(slopes(1.0, 1.0, 1.0), steps=3, global_batch=3).history
    rates = [1.0, 0.9, 0.8] if replicas == 1 else [0.5, 0.5, 0.25]

    np.testing.assert_allclose(history["learning_rate"], rates, rtol=1e-6)
    assert trainer.weight == pytest.approx(1 - sum(rates), abs=1e-6)


@pytest.mark.thorough
def test_a_skipped_step_does_not_move_the_schedule():
    """A schedule counts updates: after three skipped steps the rate is still the first one."""
    trainer = overflowing(log_interval=1, optimizer=None, verbose=False)
    trainer.build_optimizer = lambda: keras.optimizers.SGD(falling())
    history = trainer.train(STEEP, steps=6, global_batch=4).history

    np.testing.assert_allclose(history["learning_rate"], [1, 1, 1, 1, 0.9, 0.8], rtol=1e-6)


def test_several_optimizers_have_a_rate_each():
    """Each optimizer's rate has its name; the parts of a `MultiOptimizer` have their positions."""
    optimizers = {"first": keras.optimizers.SGD(0.5), "second": keras.optimizers.Adam(falling())}
    plan = plan_of(Pair(), optimizer=optimizers)
    assert learning_rates(plan) == {"learning_rate/first": 0.5, "learning_rate/second": 1.0}

    rate = tf.Variable(0.125)
    plan = plan_of(Pair(), optimizer=keras.optimizers.SGD(lambda: rate))
    assert learning_rates(plan) == {"learning_rate": 0.125}


class Harmonic(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule as people write it: it computes with floats, and cannot be saved."""

    def __call__(self, step):
        """Returns 1, 1/2, 1/3 ..."""
        return 1.0 / (step + 1.0)


@pytest.mark.thorough
def test_a_schedule_may_compute_with_floats():
    """It gets the variable that counts updates, as in an update, and needs no `get_config`."""
    trainer = Linear(log_interval=1, verbose=False)
    trainer.build_optimizer = lambda: keras.optimizers.SGD(Harmonic())
    summary = trainer.train(slopes(1.0), steps=3, global_batch=1)

    np.testing.assert_allclose(summary.history["learning_rate"], [1.0, 1 / 2, 1 / 3], rtol=1e-6)
    assert access.plan(trainer).has_schedule
