"""The log of a run: what it prints, what it writes, and how it measures time."""

import json
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import STEEP, Linear, overflowing, slopes

import scaling
from scaling.telemetry.record import read_record
from scaling.telemetry.simulate_rules import best_fixed_scale
from trainer import Checkpoints, Monitoring, Skips, StepReport, Totals
from trainer.log.run_log import RunLog

# What a log line says of a step, among other numbers.
LINE = (
    r"step +(\d+)/12 .* loss (\S+) .*loss_scale (\S+) .*?(\d+) skipped \((.*?)\) .*"
    r"[\d,]+ examples/s  \d+% waiting for data(?:  \d:\d\d:\d\d left)?"
)


def run(tmp_path, **arguments):
    """Twelve steps, the first three of which overflow; a log line after every four."""
    trainer = overflowing(model_dir=tmp_path, **arguments)
    return trainer, trainer.train(STEEP, steps=12, global_batch=4)


def split_lines(folder, split):
    """The lines of one split of a run's metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def test_the_progress_lines(tmp_path, capsys):
    """A log line has the step, loss, loss scale, skipped steps by cause and speed. The weight falls
    by 3 with every update, so the mean loss of an interval is known.
    """
    _, summary = run(tmp_path)
    lines = capsys.readouterr().out.splitlines()

    steps = [re.fullmatch(LINE, line).groups() for line in lines if line.startswith("step ")]
    assert steps == [
        ("4", "3.0000", "2^14", "3", "3 backward"),
        ("8", "-19.5000", "2^14", "3", "3 backward"),
        ("12", "-55.5000", "2^14", "3", "3 backward"),
    ]
    assert lines[-1] == str(summary)
    assert lines[-1].startswith("at step 12 after 12 steps in ")
    assert ("9 applied, 3 skipped (3 backward), loss_scale 2^14; checkpoint") in lines[-1]


def test_the_time_before_the_clock_is_restarted_is_not_counted(monkeypatch, tmp_path):
    """The speed is measured over the steps since the clock was restarted only."""
    now = [0.0]
    monkeypatch.setattr("trainer.log.run_log.time.perf_counter", lambda: now[0])
    log = RunLog(tmp_path, "quiet")
    values = {"step": 1, "examples": 100, "grads_finite": True, "data_wait_secs": 0.02}
    for loop in range(1, 5):
        now[0] += 0.1
        report = StepReport(*(np.array([values.get(name, 1.0)]) for name in StepReport._fields))
        report = report._replace(magnitude_counts=np.zeros([1, 0]), underflow=np.zeros([1, 0]))
        log.add(StepReport(*map(tf.constant, report)), loop, compiling=False)
        if loop == 3:
            now[0] += 50.0
            log.restart_clock()
    log.read()
    log.flush(4, Totals(4, {}), {})
    [line] = split_lines(tmp_path, "train")

    assert line["examples_per_second"] == pytest.approx(1000)
    assert line["steps_per_second"] == pytest.approx(10)
    assert line["data_wait"] == pytest.approx(0.2)


def test_a_quiet_run_without_a_folder_leaves_no_trace(tmp_path, capsys, monkeypatch):
    """verbose=False prints nothing, and model_dir=None writes no file."""
    monkeypatch.chdir(tmp_path)
    trainer = Linear(verbose=False)
    arrays = {"x": np.ones([4, 1], np.float32), "slope": np.ones(4, np.float32)}
    summary = trainer.train(arrays, steps=2, global_batch=4)

    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
    assert summary.checkpoint is None


@pytest.mark.thorough
def test_retried_steps_leave_a_line(tmp_path):
    """And the record of the gradients knows what overflowed before the last attempt."""
    trainer = Linear(
        precision="mixed_float16",
        loss_scale=scaling.DynamicLossScale(initial_scale=2.0**17, max_scale=2.0**17),
        skips=Skips(on_overflow="retry"),
        monitoring=Monitoring(record_gradients=True),
        jit_compile=False,
        model_dir=tmp_path,
        verbose=False,
    )
    arrays = {"x": np.ones([4, 1], np.float32), "slope": np.full(4, 3.0, np.float32)}
    totals = trainer.train(arrays, steps=3, global_batch=4).totals

    assert (totals.applied, totals.retries) == (3, 3)
    assert split_lines(tmp_path, "retry") == [{"step": 1, "split": "retry", "retries": 3}]
    record = read_record(tmp_path / "metrics.jsonl")
    assert record.retries.tolist() == [3, 0, 0]
    assert record.loss_scale.tolist() == [2.0**14] * 3
    assert best_fixed_scale(record) == 2.0**14
    [start] = split_lines(tmp_path, "run")
    assert start["settings"]["on_overflow"] == "retry"


@pytest.mark.thorough
@pytest.mark.parametrize("online", [False, True])
def test_an_error_that_ends_training_is_logged(tmp_path, online):
    """The last line has it with the step, on one line of text; if nothing can be written, the error
    itself still reaches the caller.
    """
    trainer = Linear(model_dir=tmp_path, steps_per_loop=1, verbose=False)

    def fail(step):
        if step == 2:
            raise RuntimeError("the\n  cable")

    trainer.on_loop_end = fail

    def train():
        if not online:
            trainer.train(slopes(1.0), steps=3, global_batch=1)
        for _ in range(3):
            trainer.train_on_batch(slopes(1.0))

    with pytest.raises(RuntimeError, match="cable"):
        train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1] == {"step": 2, "split": "failure", "error": "RuntimeError: the cable"}

    log = RunLog(tmp_path / "other", "quiet")
    (tmp_path / "other").write_text("no folder")
    log.log_failure(2, RuntimeError("the cable"))
    assert (tmp_path / "other").read_text() == "no folder"


@pytest.mark.thorough
def test_the_logged_loss_is_a_mean_over_examples(tmp_path):
    """The training loss of an epoch of 80 and 20 examples is the mean over 100, as `evaluate` says."""

    class Still(Linear):
        def build_optimizer(self):
            return keras.optimizers.SGD(0.0)

    trainer = Still(model_dir=tmp_path, log_interval=2, verbose=False)
    data = slopes(*np.random.default_rng(0).exponential(size=100))
    trainer.train(data, epochs=1, global_batch=80)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    [logged] = [line["loss"] for line in lines if line["split"] == "train"]

    assert logged == pytest.approx(trainer.evaluate(data, global_batch=100)["loss"], rel=1e-6)


@pytest.mark.thorough
def test_the_time_spent_waiting_for_data_is_measured(capsys):
    """Slow data take most of the time, and data that are ready take little of it."""

    def slowly(x):
        return tf.numpy_function(lambda x: (time.sleep(0.05), x)[1], [x], tf.float32)

    class Working(Linear):
        def compute_loss(self, batch, training):
            work = tf.fill([400, 400], tf.reduce_sum(batch["x"]))  # takes a few milliseconds
            for _ in range(4):
                work = tf.tanh(work @ work)
            return super().compute_loss(batch, training) + 0.0 * work[0, 0]

    def share(dataset):
        trainer = Working(
            steps_per_loop=4, log_interval=8, checkpoints=Checkpoints(data_resume="restart")
        )
        trainer.train(dataset, steps=16)
        return int(re.findall(r"(\d+)% waiting for data", capsys.readouterr().out)[-1])

    ready = tf.data.Dataset.from_tensors(slopes(*range(8))).repeat()
    slow = ready.map(lambda batch: {**batch, "x": tf.ensure_shape(slowly(batch["x"]), [8, 1])})

    assert share(slow) > 60
    assert share(ready) < 40
