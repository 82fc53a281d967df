"""MLflow, Weights & Biases and Aim record runs, for real and without a network.

Each test is skipped where the package, of the extra with its name, is not installed. One run is
trained in two processes' worth of trainers, so the second goes on where the first ended.
"""

import importlib
import json
import math

import pytest
from helpers import Linear, slopes

from trainer import AimTracker, MLflowTracker, Monitoring, WandbTracker
from trainer.log.tracker_services import named

ARRAYS = slopes(1.0)


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
        summary = trainer.train(ARRAYS, steps=steps, global_batch=1, eval_data=ARRAYS)
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


def test_names_of_numbers_are_those_of_a_history():
    """Evaluations have a prefix."""
    assert named("train", {"loss": 1.0}) == {"loss": 1.0}
    assert named("validation", {"loss": math.inf}) == {"val_loss": math.inf}
