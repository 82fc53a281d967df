"""Saving and resuming a run: when it is due, and what a checkpoint says of the run."""

import json
import time

import access
import pytest
import tensorflow as tf
from helpers import Linear, slopes

import scaling
from trainer import Action, Checkpoints
from trainer.checkpoint import folder


def steps_saved(model_dir):
    """The steps of the checkpoints in a folder."""
    return list(folder.committed(model_dir, "ckpt"))


def trained(model_dir, steps=3, **arguments):
    """A trainer that has taken some steps."""
    trainer = Linear(model_dir=model_dir, verbose=False, **arguments)
    trainer.train(slopes(1.0), steps=steps, global_batch=1)
    return trainer


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch):
        """Replaces `time.monotonic`."""
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.mark.thorough
def test_checkpoints_come_after_some_seconds(tmp_path, monkeypatch):
    """After the inner loop in which `interval_secs` have passed since the last checkpoint."""
    clock = Clock(monkeypatch)
    trainer = Linear(
        model_dir=tmp_path,
        steps_per_loop=1,
        checkpoints=Checkpoints(interval_secs=10.0, interval=7, max_to_keep=20),
        verbose=False,
    )

    def on_loop_begin(step):
        del step
        clock.now += 4.0

    trainer.on_loop_begin = on_loop_begin
    trainer.train(slopes(1.0), steps=12, global_batch=1)

    # 12 s after the start; 12 s later; the interval of 7 steps; 12 s later; the end.
    assert steps_saved(tmp_path) == [3, 6, 7, 10, 12]


class OnlyDown:
    """A rule of one's own, without a `__repr__`: the scale never rises."""

    needs_magnitude = False

    def __init__(self, start):
        """Stores the first scale."""
        self.start = start

    def initial_state(self):
        """The first scale."""
        return scaling.FixedLossScaleState(tf.constant(self.start))

    def advance(self, state, verdict):
        """Halves the scale after an overflow."""
        factor = tf.where(scaling.as_verdict(verdict).overflowed, 0.5, 1.0)
        return state._replace(loss_scale=state.loss_scale * factor)


def test_a_run_with_a_rule_of_one_s_own_is_resumed(tmp_path):
    """L12: another object of the class with the same attributes is the same rule."""
    trained(tmp_path, loss_scale=OnlyDown(8.0))
    trainer = trained(tmp_path, steps=4, loss_scale=OnlyDown(8.0))
    assert trainer.totals.attempted == 4
    with pytest.raises(ValueError, match=r"`loss_scale` .*OnlyDown\(start=4\.0\)"):
        trained(tmp_path, steps=5, loss_scale=OnlyDown(4.0))


@pytest.mark.thorough
@pytest.mark.parametrize(("seed", "expected"), [(5, 5), (None, 1)])
def test_an_allowed_seed_takes_effect(tmp_path, seed, expected):
    """With "seed" allowed to change, a new seed is used; without one, the saved seed is kept."""
    trained(tmp_path, seed=1)
    trainer = trained(tmp_path, steps=4, seed=seed, checkpoints=Checkpoints(allow_changes=["seed"]))

    assert int(access.state(trainer).random_seed.numpy()) == expected


@pytest.mark.thorough
def test_a_resumed_run_says_which_states_it_has_not(tmp_path, capsys):
    """A callback that the checkpoint does not know begins anew, with a line that says so."""
    for count, steps in ((1, 1), (2, 2)):
        actions = [Action(lambda trainer: None, every_steps=5) for _ in range(count)]  # noqa: ARG005
        trainer = Linear(
            model_dir=tmp_path, callbacks=actions, checkpoints=Checkpoints(data_resume="restart")
        )
        trainer.train(slopes(0.5, 0.5), steps=steps, global_batch=2)

    [line] = [line for line in capsys.readouterr().out.splitlines() if "saved state" in line]
    assert line.endswith("_2")


@pytest.mark.thorough
def test_another_seed_leaves_the_count_of_epochs(tmp_path):
    """A pipeline that a run began with another seed counts the epochs that the run has had."""

    def train(seed, **length):
        trainer = Linear(
            model_dir=tmp_path,
            seed=seed,
            checkpoints=Checkpoints(allow_changes=("seed",)),
            log_interval=1,
            verbose=False,
        )
        dataset = tf.data.Dataset.from_tensor_slices(slopes(*[1.0] * 8)).batch(2)
        return trainer.train(dataset, **length)

    train(1, steps=6)
    reached = train(2, epochs=3).step

    assert train(2, epochs=3).steps_run == 0
    assert reached % 4 == 0


@pytest.mark.thorough
def test_a_run_that_was_stopped_before_its_first_step(tmp_path, caplog):
    """Its log is continued: the evaluation before the first step is not repeated."""

    class Stopping(Linear):
        def on_evaluate_end(self, step, results):
            if step == 0:
                self.stop()

    for _ in range(2):
        trainer = Stopping(model_dir=tmp_path, verbose=False)
        trainer.train(slopes(1.0), 2, global_batch=1, eval_data=slopes(1.0), evaluate_at_start=True)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())

    assert [line["step"] for line in lines if line["split"] == "validation"] == [0, 2]
    assert "holds no checkpoint" not in caplog.text
