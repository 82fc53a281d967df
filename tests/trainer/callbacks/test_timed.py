"""Functions that a run calls every so many steps or seconds, and the end of a run."""

import types

import numpy as np
import pytest
from helpers import Linear, slopes

from trainer import Action, Skips, TrainingStuckError
from trainer.callbacks import Timer


class Counter:
    """A callable whose state is kept in checkpoints, with numbers and arrays of NumPy."""

    def __init__(self):
        """Starts at 0."""
        self.calls = np.zeros([], np.int64)

    def __call__(self, trainer):
        """Counts."""
        self.calls = self.calls + 1

    def state_dict(self):
        """Returns the count."""
        return {"calls": self.calls, "last": np.int64(self.calls)}

    def load_state_dict(self, state):
        """Restores the count."""
        self.calls = state["calls"]


def test_actions_are_due_by_steps():
    """An inner loop ends at every multiple of the period, where the action runs; nothing else in
    the run changes.
    """
    seen = []
    action = Action(lambda trainer: seen.append(trainer.totals.attempted), every_steps=7)
    trainer = Linear(steps_per_loop=5, callbacks=[action], verbose=False)
    trainer.train(slopes(1.0, 2.0), steps=20, global_batch=2)

    assert seen == [7, 14]
    assert trainer.totals.applied == 20


def test_actions_are_due_by_seconds(monkeypatch):
    """Periods in seconds are checked after every inner loop, counting from when the action was
    created.
    """
    now = [100.0]
    monkeypatch.setattr("trainer.callbacks.timed.time.monotonic", lambda: now[0])
    seen = []

    def passing(trainer):
        now[0] += 4.0
        seen.append(("passed", trainer.totals.attempted))

    by_steps = Action(passing, every_steps=1)
    by_time = Action(lambda trainer: seen.append(("due", trainer.totals.attempted)), every_secs=10)
    trainer = Linear(callbacks=[by_steps, by_time], verbose=False)
    trainer.train(slopes(1.0, 2.0), steps=8, global_batch=2)

    assert [step for kind, step in seen if kind == "due"] == [4, 8]


@pytest.mark.parametrize("periods", [{}, {"every_steps": 3, "every_secs": 1.0}])
def test_an_action_has_one_period(periods):
    """Of two, one would be ignored."""
    with pytest.raises(ValueError, match="`every_steps`"):
        Action(print, **periods)


@pytest.mark.thorough
def test_a_run_that_ends_in_an_error_calls_no_action():
    """A run that must end raises before the next action runs, even if the next log line is due much
    later.
    """
    seen = []
    action = Action(lambda trainer: seen.append(trainer.totals.attempted), every_steps=2)
    trainer = Linear(
        skips=Skips(on_nonfinite_loss="raise"), callbacks=[action], log_interval=100, verbose=False
    )
    with pytest.raises(TrainingStuckError, match="the loss was not finite at step 1"):
        trainer.train(slopes(np.nan), steps=50, global_batch=1)

    assert seen == []
    assert trainer.totals.attempted == 1


def test_an_action_keeps_its_clock_and_its_state(monkeypatch):
    """A restored action continues its period and its count."""
    now = [100.0]
    monkeypatch.setattr("trainer.callbacks.timed.time.monotonic", lambda: now[0])
    saved, restored = Action(Counter(), every_secs=10), Action(Counter(), every_secs=10)
    line = Linear(callbacks=[saved], verbose=False)
    saved.after(1)
    now[0] += 4.0
    state = saved.state_dict()
    del line
    now[0] += 1000.0
    restored.load_state_dict(state)

    assert state == {"elapsed_secs": 4.0, "call": {"calls": 1, "last": 1}}
    assert restored.call.calls == 1
    now[0] += 5.5
    assert not restored.is_due(0, 1)
    now[0] += 0.5
    assert restored.is_due(0, 1)


@pytest.mark.thorough
def test_time_counts_over_resumes(monkeypatch, tmp_path):
    """The run ends after the loop in which its time is over; the time of the process before
    counts, and that between the two does not.
    """
    now = [100.0]

    def passing():
        now[0] += 4.0
        return now[0]

    clock = types.SimpleNamespace(monotonic=passing)
    monkeypatch.setattr("trainer.callbacks.timed.time", clock)

    def run(steps):
        now[0] += 1000.0
        timer = Timer(15)
        line = Linear(callbacks=[timer], model_dir=tmp_path, steps_per_loop=1, verbose=False)
        return line.train(slopes(1.0), steps, global_batch=1).step, timer.elapsed

    assert run(1) == (1, 8.0)  # two looks, of 4 seconds each
    assert run(9) == (2, 16.0)


def test_a_rollback_brings_no_time_back():
    """A state from before a rollback has less time; a new process has none of its own."""
    timer = Timer(15)
    timer.elapsed = 12.0
    timer.load_state_dict({"elapsed": 4.0})
    assert timer.elapsed == 12.0
    new = Timer(15)
    new.load_state_dict({"elapsed": 4.0})
    assert new.elapsed == 4.0
