"""What a run tells its trackers, and what it does when one of them fails."""

import json
import logging
import math
import sys

import pytest
from helpers import Linear, slopes

from trainer import Monitoring, TrackedRun, Tracker


class Notes:
    """A tracker that notes its calls."""

    def __init__(self, *, broken=()):
        """Raises an error at the steps in `broken`."""
        self.calls = []
        self.broken = broken

    def begin(self, run):
        """Notes the call; the id of a new run is its number of calls."""
        self.run = run
        self.calls.append(("begin", run.step, run.run_id))
        return run.run_id or "run 1"

    def write_scalars(self, split, step, scalars):
        """Notes the call, or raises an error."""
        if step in self.broken:
            raise ConnectionError("no route to host")
        self.calls.append((split, step, scalars["loss"]))

    def end(self, status):
        """Notes the call."""
        self.calls.append(("end", status))


def tracked(notes, folder=None, **arguments):
    """A trainer with a log line after every two steps."""
    settings = {"log_interval": 2, "verbose": False, "seed": 0} | arguments
    return Linear(model_dir=folder, monitoring=Monitoring(trackers=[notes]), **settings)


@pytest.mark.thorough
def test_trackers_get_the_numbers_of_the_log(tmp_path):
    """A tracker is told the settings, log lines and evaluations of each call of `train`, and how it
    ended; a process that resumes the run gives it the id of the earlier one.
    """
    first, second, other = Notes(), Notes(), Notes()
    arrays, folder = slopes(1.0), tmp_path / "digits"
    trainer = tracked(first, folder)
    trainer.train(arrays, steps=2, global_batch=1, eval_data=arrays)
    trainer.train(arrays, steps=4, global_batch=1)
    history = tracked(second, folder).train(arrays, steps=6, global_batch=1).history
    Linear(monitoring=Monitoring(trackers=[other]), log_interval=2, verbose=False).train(
        arrays, steps=2, global_batch=1
    )

    loss = history["loss"].tolist()
    assert first.calls == [
        *(("begin", 0, None), ("train", 2, loss[0])),
        *(("validation", 2, history["val_loss"][0]), ("end", "finished")),
        *(("begin", 2, "run 1"), ("train", 4, loss[1]), ("end", "finished")),
    ]
    assert second.calls == [("begin", 4, "run 1"), ("train", 6, loss[2]), ("end", "finished")]
    assert isinstance(first.run, TrackedRun)
    assert isinstance(first, Tracker)
    assert (first.run.name, first.run.model_dir, other.run.name) == ("digits", folder, "Linear")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert first.run.settings == next(line for line in lines if line["split"] == "run")["settings"]


def test_a_tracker_that_cannot_begin_leaves_none_open():
    """An error in `begin` ends the call of `train`, and the trackers that had begun are ended."""

    class Unreachable(Notes):
        def begin(self, run):
            raise ConnectionError("no route to host")

    notes, never = Notes(), Notes()
    trainer = Linear(monitoring=Monitoring(trackers=[notes, Unreachable(), never]), verbose=False)
    with pytest.raises(ConnectionError, match="no route to host"):
        trainer.train(slopes(1.0), steps=2, global_batch=1)
    assert notes.calls == [("begin", 0, None), ("end", "failed")]
    assert never.calls == []


def test_a_broken_tracker_does_not_end_the_run(tmp_path, caplog):
    """A tracker that fails is named once until it works again, and everything else goes on."""
    notes = Notes(broken=(4, 6, 10))
    with caplog.at_level(logging.WARNING):
        tracked(notes, tmp_path).train(slopes(1.0), steps=12, global_batch=1)
    warnings = [record.getMessage() for record in caplog.records if "Notes" in record.getMessage()]

    assert [step for split, step, *_ in notes.calls if split == "train"] == [2, 8, 12]
    assert [warning[:30] for warning in warnings] == [
        f"Notes could not record step {step}, "[:30] for step in (4, 10)
    ]


@pytest.mark.parametrize("stops", [True, False])
def test_a_tracker_is_told_how_a_run_ended(stops):
    """A run that was asked to stop has stopped; one that an error ended has failed."""

    class Ending(Linear):
        def on_loop_end(self, step):
            if stops:
                self.stop()
            else:
                raise RuntimeError("broken")

    notes = Notes()
    trainer = Ending(monitoring=Monitoring(trackers=[notes]), steps_per_loop=1, verbose=False)
    if stops:
        trainer.train(slopes(1.0), steps=3, global_batch=1)
    else:
        with pytest.raises(RuntimeError, match="broken"):
            trainer.train(slopes(1.0), steps=3, global_batch=1)

    assert notes.calls[-1] == ("end", "stopped" if stops else "failed")
    assert not any(math.isnan(call[2]) for call in notes.calls if call[0] == "train")


@pytest.mark.parametrize("trackers", ["mlflow", ["mlfow"], [print], [Notes]])
def test_trackers_are_checked(trackers):
    """Only a list of trackers and known names is accepted."""
    with pytest.raises((TypeError, ValueError), match="`trackers`"):
        Linear(monitoring=Monitoring(trackers=trackers), verbose=False)


def test_the_package_of_a_named_tracker_is_needed(monkeypatch):
    """The error comes before anything is trained."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="wandb"):
        Linear(monitoring=Monitoring(trackers=["wandb"]), verbose=False)
