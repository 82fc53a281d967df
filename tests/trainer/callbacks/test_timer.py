"""Timer: ends a run after a given time."""

import types

import pytest
from helpers import Linear, slopes

from trainer.callbacks import Timer


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
    monkeypatch.setattr("trainer.callbacks.timer.time", clock)

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
