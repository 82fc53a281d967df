"""Reading the reports of steps: metrics, stuck and diverged runs, and the log."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from access import untuned
from helpers import Linear, slopes

from trainer import Checkpoints, Divergence, Skips, TrainingStuckError
from trainer.callbacks.divergence import LossWatch
from trainer.checkpoint import CheckpointError
from trainer.log.run_log import RunLog
from trainer.run.reporting import Reporter
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
