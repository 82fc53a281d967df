"""What a run tells people and programs."""

import json
import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import STEEP, Linear, overflowing

import scaling
from trainer import StepReport, Totals
from trainer.log.run_log import RunLog
from trainer.step import TrainState

# A line of the log without what depends on the machine.
SPEED = r"(step .*?)  [\d,]+ examples/s  \d+% waiting for data(?:  \d:\d\d:\d\d left)?"


def run(tmp_path, **arguments):
    """Twelve steps, the first three of which overflow; a line after every four."""
    trainer = overflowing(model_dir=tmp_path, **arguments)
    return trainer, trainer.train(STEEP, steps=12, global_batch=4)


def split_lines(folder, split):
    """The lines of one split of a run's metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def test_the_progress_lines(tmp_path, capsys):
    """Step, loss, loss scale, skipped steps by cause and examples per second; the weight falls by 3
    with every update, so the mean loss of an interval is known.
    """
    _, summary = run(tmp_path)
    lines = capsys.readouterr().out.splitlines()

    steps = [re.fullmatch(SPEED, line)[1] for line in lines if line.startswith("step ")]
    assert steps == [
        "step  4/12  33%  loss 3.0000  loss_scale 2^14  3 skipped (3 backward)",
        "step  8/12  67%  loss -19.5000  loss_scale 2^14  3 skipped (3 backward)",
        "step 12/12 100%  loss -55.5000  loss_scale 2^14  3 skipped (3 backward)",
    ]
    assert lines[-1] == str(summary)
    assert lines[-1].startswith("at step 12 after 12 steps in ")
    assert ("9 applied, 3 skipped (3 backward), loss_scale 2^14; checkpoint") in lines[-1]


def test_the_files(tmp_path):
    """metrics.jsonl and TensorBoard hold the same numbers, under the same names and steps."""
    run(tmp_path, verbose=False)
    lines = split_lines(tmp_path, "train")
    [events] = (tmp_path / "train").glob("events.*")
    curves = {}
    for record in tf.data.TFRecordDataset(str(events)):
        event = tf.compat.v1.Event.FromString(record.numpy())
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name in ("scalars", "text", "")
            if value.tag == "run" or value.tag.startswith("skips/"):
                continue
            curves.setdefault(value.tag, {})[event.step] = float(tf.make_ndarray(value.tensor))

    assert [line["step"] for line in lines] == [4, 8, 12]
    assert [line["skipped"] for line in lines] == [3, 3, 3]
    assert [line["applied"] for line in lines] == [1, 5, 9]
    for name, curve in curves.items():
        assert curve == {line["step"]: pytest.approx(line[name], rel=1e-6) for line in lines}
    assert set(lines[0]) - set(curves) == {"step", "split"}


def test_the_clock_leaves_evaluations_out(monkeypatch, tmp_path):
    """Steps from before an evaluation have no part in the speed of those after it."""
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
            log.log_evaluation(3, {})
    log.read()
    log.flush(4, Totals(4, {}), {})
    [line] = split_lines(tmp_path, "train")

    assert line["examples_per_second"] == pytest.approx(1000)
    assert line["steps_per_second"] == pytest.approx(10)
    assert line["data_wait"] == pytest.approx(0.2)


def test_a_quiet_run_prints_nothing_and_without_a_directory_writes_nothing(
    tmp_path, capsys, monkeypatch
):
    """verbose=False is silent; model_dir=None leaves no file."""
    monkeypatch.chdir(tmp_path)
    trainer = Linear(verbose=False)
    arrays = {"x": np.ones([4, 1], np.float32), "slope": np.ones(4, np.float32)}
    summary = trainer.train(arrays, steps=2, global_batch=4)

    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
    assert summary.checkpoint is None


def test_skips_and_updates_read_one_at_a_time(tmp_path):
    """A step that was applied after skipped ones is no skip, however often the log is read."""
    rule = scaling.DynamicLossScale(initial_scale=2.0**17, max_scale=2.0**17)
    trainer = Linear(
        precision="mixed_float16",
        loss_scale=rule,
        jit_compile=False,
        model_dir=tmp_path / "a" / "b",
        steps_per_loop=1,
        log_interval=1,
        max_consecutive_skips=4,
        verbose=False,
    )
    arrays = {"x": np.ones([4, 1], np.float32), "slope": np.full(4, 3.0, np.float32)}
    trainer.train(arrays, steps=6, global_batch=4)

    assert [line["skipped"] for line in split_lines(tmp_path / "a" / "b", "train")] == [
        *[1, 2, 3],
        *[3, 3, 3],
    ]


def test_totals_add_up():
    """L10: attempted = applied + skipped, by construction."""
    state = TrainState(scaling.NoLossScale())
    state.outcomes.assign([5, 0, 1, 0, 2, 0, 0])
    totals = Totals.from_state(state)

    assert (totals.attempted, totals.applied, totals.skipped) == (8, 5, 3)
    assert str(totals) == "3 skipped (1 forward, 2 reduction)"
    assert math.isclose(totals.applied / totals.attempted, 0.625)


def test_a_schedule_that_lags_is_said_to(capsys):
    """It counts updates, so every skipped step puts it one step further behind."""

    class Scheduled(Linear):
        def build_optimizer(self):
            return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(1.0, 100))

    rule = scaling.DynamicLossScale(initial_scale=2.0**17, max_scale=2.0**17)
    trainer = Scheduled(precision="mixed_float16", loss_scale=rule, jit_compile=False)
    arrays = {"x": np.ones([4, 1], np.float32), "slope": np.full(4, 3.0, np.float32)}
    trainer.train(arrays, steps=1, global_batch=4)
    assert "; the schedule is 1 update behind the steps" in capsys.readouterr().out
    assert trainer.train(arrays, steps=6, global_batch=4).schedule_lag == 3
