"""What a run tells its trackers, and what it does when one of them fails.

MLflow, Weights & Biases and Aim record runs for real, without a network. Each of these tests is
skipped where the package, of the extra with its name, is not installed.
"""

import importlib
import json
import logging
import math
import sys

import pytest
from helpers import Linear, slopes

from trainer import AimTracker, MLflowTracker, Monitoring, TrackedRun, Tracker, WandbTracker


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


def test_the_package_of_a_named_tracker_is_needed(monkeypatch):
    """The error comes before anything is trained, as for an unknown name."""
    with pytest.raises(ValueError, match="`trackers`"):
        Linear(monitoring=Monitoring(trackers=["mlfow"]), verbose=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="wandb"):
        Linear(monitoring=Monitoring(trackers=["wandb"]), verbose=False)


# Services.


def train_twice(tracker_of, folder, between=id):
    """Trains two steps, resumes in a new trainer for two more; returns the last summary."""
    for steps in (2, 4):
        settings = {
            "log_interval": 2,
            "verbose": False,
            "seed": 0,
            "monitoring": Monitoring(trackers=[tracker_of()]),
        }
        trainer = Linear(model_dir=folder / "digits", **settings)
        summary = trainer.train(slopes(1.0), steps=steps, global_batch=1, eval_data=slopes(1.0))
        between(trainer.trackers[0])
    return summary


def expected(summary, name):
    """The steps and values of a number in a history."""
    steps = summary.history["val_step" if name.startswith("val_") else "step"]
    return list(zip(steps.tolist(), summary.history[name].tolist(), strict=True))


@pytest.mark.slow
def test_mlflow_records_a_run(tmp_path, monkeypatch):
    """One MLflow run holds the numbers of both halves, the settings, and the status; a run that is
    active is used and stays open.
    """
    mlflow = pytest.importorskip("mlflow", reason="MLflow is in the extra mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    summary = train_twice(lambda: MLflowTracker("lines", tracking_uri=uri), tmp_path)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("lines").experiment_id
    [run] = client.search_runs([experiment])

    for name in ("loss", "learning_rate", "val_loss"):
        found = client.get_metric_history(run.info.run_id, name)
        assert [(each.step, each.value) for each in found] == expected(summary, name)
    assert (run.info.run_name, run.info.status) == ("digits", "FINISHED")
    assert (run.data.params["precision"], run.data.params["seed"]) == ("float32", "0")
    assert (
        run.info.run_id in json.loads((tmp_path / "digits" / "trackers.json").read_text()).values()
    )

    mlflow.set_tracking_uri(uri)
    with mlflow.start_run() as active:
        train_twice(lambda: MLflowTracker("lines", tracking_uri=uri), tmp_path / "active")
        assert client.get_run(active.info.run_id).info.status == "RUNNING"
    assert client.get_run(active.info.run_id).data.metrics["loss"] == summary.history["loss"][-1]


def wandb_records(folder):
    """Yields the records of all W&B runs in a folder, in the order in which they were written."""
    wandb_internal_pb2 = importlib.import_module("wandb.proto.wandb_internal_pb2")
    for path in sorted(folder.glob("wandb/offline-*/*.wandb")):
        content, position, record = path.read_bytes(), 7, b""
        while position + 7 <= len(content):  # LevelDB's log format: blocks of 32 kB
            left = 32768 - position % 32768
            if left < 7:
                position += left
                continue
            size = int.from_bytes(content[position + 4 : position + 6], "little")
            kind = content[position + 6]
            record += content[position + 7 : position + 7 + size]
            position += 7 + size
            if kind in (1, 4):  # a whole record, or the last part of one
                found = wandb_internal_pb2.Record()
                found.ParseFromString(record)
                record = b""
                yield found


@pytest.mark.slow
def test_wandb_records_a_run_offline(tmp_path):
    """Both halves have one id and the axis `step`; a run that is active is used and stays open."""
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is in the extra wandb")

    def tracker():
        quiet = wandb.Settings(silent=True)
        return WandbTracker("lines", mode="offline", dir=str(tmp_path), settings=quiet)

    summary = train_twice(tracker, tmp_path, between=lambda tracker: tracker.finish())
    records = list(wandb_records(tmp_path))
    runs = [each.run for each in records if each.WhichOneof("record_type") == "run"]
    rows = [
        {item.nested_key[0]: json.loads(item.value_json) for item in each.history.item}
        for each in records
        if each.WhichOneof("record_type") == "history"
    ]

    assert {run.run_id for run in runs} == {runs[0].run_id}
    assert {(run.project, run.display_name) for run in runs} == {("lines", "digits")}
    for name in ("loss", "learning_rate", "val_loss"):
        found = [(row["step"], row[name]) for row in rows if name in row]
        assert found == expected(summary, name)

    quiet = wandb.Settings(silent=True)
    with wandb.init(project="lines", mode="offline", dir=str(tmp_path), settings=quiet) as active:
        train_twice(tracker, tmp_path / "active", between=lambda tracker: tracker.end("failed"))
        assert wandb.run is active
        assert active.summary["loss"] == summary.history["loss"][-1]


@pytest.mark.slow
def test_aim_records_a_run(tmp_path):
    """One Aim run holds the numbers of both halves by context, the settings and the status."""
    aim = pytest.importorskip("aim", reason="Aim is in the extra aim")
    summary = train_twice(lambda: AimTracker("lines", repo=str(tmp_path)), tmp_path)
    [run_hash] = json.loads((tmp_path / "digits" / "trackers.json").read_text()).values()
    quiet = {"capture_terminal_logs": False, "system_tracking_interval": None}
    run = aim.Run(run_hash, repo=str(tmp_path), **quiet)
    found = {
        (metric.name, metric.context.to_dict()["subset"]): metric.data.view(["val"]).items_list()
        for metric in run.metrics()
    }
    settings, status = run["settings"], run["status"]
    assert (run.experiment, run.name) == ("lines", "digits")
    run.close()

    assert (settings["precision"], settings["seed"], status) == ("float32", 0, "finished")
    for name, subset in (("loss", "train"), ("learning_rate", "train"), ("loss", "val")):
        steps, [values] = found[name, subset]
        key = f"val_{name}" if subset == "val" else name
        assert list(zip(steps, values, strict=True)) == expected(summary, key)
