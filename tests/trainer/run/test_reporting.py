"""Reading the reports of steps: metrics, stuck and diverged runs, the log and its rates."""

import json
import math

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from access import untuned
from helpers import STEEP, Linear, overflowing, slopes
from plans import Pair, plan_of

from trainer import Checkpoints, Divergence, Skips, TrainingStuckError
from trainer.callbacks.divergence import LossWatch
from trainer.checkpoint import CheckpointError
from trainer.log.run_log import RunLog
from trainer.run.reporting import Reporter, learning_rates
from trainer.step.report import StepReport


def report(steps, losses):
    """The report of an inner loop of applied steps, as tensors."""
    count = len(steps)
    fields = {name: tf.zeros([count]) for name in StepReport._fields}
    fields |= {
        "step": tf.constant(steps, tf.int64),
        "loss": tf.constant(losses),
        "loss_scale": tf.ones([count]),
        "weight": tf.ones([count]),
        "grads_finite": tf.fill([count], value=True),
        "consecutive_skips": tf.zeros([count], tf.int64),
        "magnitude_counts": tf.zeros([count, 0]),
        "underflow": tf.zeros([count, 0]),
    }
    return StepReport(**fields)


@pytest.fixture
def log(tmp_path):
    """A log that writes files and prints nothing."""
    return RunLog(tmp_path, "quiet")


@pytest.fixture
def reporter(tmp_path, log):
    """A reporter that looks for losses above 10."""
    trainer = Linear(model_dir=tmp_path, verbose=False)
    trainer.evaluate(slopes(1.0), global_batch=1)
    watch = LossWatch(Divergence(loss_above=10.0))
    return Reporter(trainer, trainer._parts, log, watch, 8, lambda function: function())


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


def test_without_new_steps_nothing_is_read_or_written(tmp_path, reporter):
    """Reading and writing twice is the same as once."""
    reporter.read()
    reporter.write()

    assert not reporter.diverged
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_log_line_is_written_once(tmp_path, log, reporter):
    """A line covers the steps since the line before it."""
    for steps, losses in [([1, 2], [1.0, 3.0]), ([3], [5.0])]:
        log.add(report(steps, losses), steps[-1], compiling=False)
        reporter.read()
        reporter.write()
        reporter.write()

    assert [(line["step"], line["loss"]) for line in train_lines(tmp_path)] == [(2, 2.0), (3, 5.0)]


def test_a_divergence_is_reported_once(log, reporter):
    """The first divergence is kept until it is taken, even if later steps diverge too."""
    for steps, losses in [([1, 2], [1.0, 50.0]), ([3], [90.0])]:
        log.add(report(steps, losses), steps[-1], compiling=False)
        reporter.read()

    assert reporter.diverged
    assert reporter.take_divergence().first == 2
    assert not reporter.diverged
    assert reporter.take_divergence() is None


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
def test_an_error_of_the_file_system_names_the_folder(tmp_path, log, reporter, monkeypatch, error):
    """Errors of the file system, TensorFlow's included, say which folder could not be written."""

    def fail(*_):
        raise error

    monkeypatch.setattr(log, "flush", fail)
    log.add(report([1], [1.0]), 1, compiling=False)
    reporter.read()
    with pytest.raises(CheckpointError) as caught:
        reporter.write()

    assert str(caught.value).startswith(f"the log in {tmp_path} could not be written: ")
    assert caught.value.__cause__ is error


def test_other_errors_are_not_translated(reporter):
    """An error that is not one of the file system is raised as it is."""
    with pytest.raises(ZeroDivisionError), reporter.writing():
        raise ZeroDivisionError


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
