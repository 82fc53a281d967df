"""Trackers for MLflow, Weights & Biases and Aim. Each imports its package when it is first used."""

import importlib
import time
from collections.abc import Mapping
from typing import Any

from trainer.log.history import PREFIXES
from trainer.log.model_table import flattened
from trainer.log.trackers import TrackedRun

MAX_PARAMETER = 500  # characters of a parameter that every MLflow server stores
MAX_PARAMETERS = 100  # parameters in one request


class MLflowTracker:
    """Records runs in MLflow: settings as parameters, numbers as metrics.

    The results of evaluations have the prefix `val_`. If an MLflow run is active, as inside
    `with mlflow.start_run():`, it gets the numbers and stays open. A resumed run goes on with its
    MLflow run; numbers of steps that it repeats are recorded twice.

    Args:
        experiment: the name of the experiment, which is created if there is none.
        tracking_uri: the server or folder; None uses MLflow's own setting.

    Raises:
        ModuleNotFoundError: if MLflow, in the extra `mlflow`, is not installed.
    """

    def __init__(self, experiment: str = "halfstep", *, tracking_uri: str | None = None) -> None:
        """Stores the arguments."""
        import mlflow

        self._client: Any = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._experiment = experiment
        self._run_id: str | None = None
        self._owned = True  # whether the MLflow run is this tracker's own

    def begin(self, run: TrackedRun) -> str:
        """Begins an MLflow run, or goes on with one."""
        import mlflow

        active = mlflow.active_run()
        self._owned = active is None
        if active is not None:
            self._run_id = active.info.run_id
        elif self._run_id or run.run_id:
            self._run_id = self._run_id or run.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            experiment = self._client.get_experiment_by_name(self._experiment)
            identifier = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(self._experiment)
            )
            self._run_id = self._client.create_run(identifier, run_name=run.name).info.run_id
        self._write_parameters(run)
        return str(self._run_id)

    def _write_parameters(self, run: TrackedRun) -> None:
        """Records the settings. MLflow never changes a parameter: a changed one becomes a tag."""
        from mlflow.entities import Param, RunTag

        ours = {key: str(value)[:MAX_PARAMETER] for key, value in flattened(run.settings).items()}
        known = self._client.get_run(self._run_id).data.params
        new = [Param(key, value) for key, value in ours.items() if key not in known]
        changed = [
            RunTag(f"{key} from step {run.step}", value)
            for key, value in ours.items()
            if known.get(key, value) != value
        ]
        for first in range(0, len(new), MAX_PARAMETERS):
            self._client.log_batch(self._run_id, params=new[first : first + MAX_PARAMETERS])
        if changed:
            self._client.log_batch(self._run_id, tags=changed[:MAX_PARAMETERS])

    def write_scalars(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Records numbers as metrics."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in named(split, scalars).items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def end(self, status: str) -> None:
        """Marks the MLflow run as finished, killed (stopped) or failed, unless it is the user's."""
        if self._owned:
            known = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
            self._client.set_terminated(self._run_id, known[status])


class WandbTracker:
    """Records runs in Weights & Biases: settings as the configuration, numbers as the history.

    The numbers have the axis `step`, and the results of evaluations the prefix `val_`. If a W&B run
    is active, as in a sweep, it gets the numbers. A run of the tracker's own stays open, also over
    several calls of `train`, until the process ends or `tracker.finish()` is called; a failed one
    is closed at once. A resumed run goes on with its W&B run; numbers of steps that it repeats are
    recorded twice. Without a network, pass `mode="offline"` and use `wandb sync` later; the file of
    a resumed offline run sometimes lacks a line, which `metrics.jsonl` has.

    Args:
        project: the name of the project.
        **arguments: further arguments for `wandb.init`, such as `entity`, `mode`, `dir` or `tags`.

    Raises:
        ModuleNotFoundError: if wandb, in the extra `wandb`, is not installed.
    """

    def __init__(self, project: str = "halfstep", **arguments: Any) -> None:
        """Stores the arguments."""
        importlib.import_module("wandb")  # fails now, and not when the run begins
        self._arguments = {"project": project, **arguments}
        self._run_id: str | None = None
        self._run: Any = None
        self._owned = True  # whether the W&B run is this tracker's own

    def begin(self, run: TrackedRun) -> str:
        """Begins a W&B run, or goes on with one."""
        import wandb

        if self._run is None:
            self._owned = wandb.run is None
            self._run = self._new_run(run) if self._owned else wandb.run
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")
        self._run.config.update(dict(run.settings), allow_val_change=True)
        self._run_id = self._run.id
        return str(self._run_id)

    def _new_run(self, run: TrackedRun) -> Any:
        import wandb

        known = self._run_id or run.run_id
        resumed = {"id": known, "resume": "allow"} if known else {}
        # Other runs in this process stay open: several trainers may have one each.
        defaults = {"name": run.name, "reinit": "create_new"} | resumed
        return wandb.init(**defaults | self._arguments)

    def write_scalars(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Records numbers in the history."""
        self._run.log({**named(split, scalars), "step": step})

    def end(self, status: str) -> None:
        """Closes the run if it has failed."""
        if status == "failed" and self._owned:
            self.finish(exit_code=1)

    def finish(self, exit_code: int = 0) -> None:
        """Closes the W&B run; another call of `train` opens it again.

        Args:
            exit_code: what W&B shows as the exit code; other than 0 for a failed run.
        """
        if self._run is not None:
            self._run.finish(exit_code=exit_code)
            self._run = None


class AimTracker:
    """Records runs in Aim: settings as parameters, numbers as metrics with the context `subset`.

    The context is `{"subset": "train"}` or `{"subset": "val"}`. A resumed run goes on with its Aim
    run; the numbers of steps that it repeats replace the earlier ones.

    Args:
        experiment: the name of the experiment.
        repo: the path or the address of the Aim repository; None uses Aim's default.

    Raises:
        ModuleNotFoundError: if Aim, in the extra `aim`, is not installed.
    """

    def __init__(self, experiment: str = "halfstep", *, repo: str | None = None) -> None:
        """Stores the arguments."""
        importlib.import_module("aim")  # fails now, and not when the run begins
        self._experiment = experiment
        self._repo = repo
        self._run_hash: str | None = None
        self._run: Any = None

    def begin(self, run: TrackedRun) -> str:
        """Opens an Aim run."""
        import aim

        known = self._run_hash or run.run_id
        quiet = {"capture_terminal_logs": False, "system_tracking_interval": None}
        self._run = aim.Run(run_hash=known, repo=self._repo, experiment=self._experiment, **quiet)
        if not known:
            self._run.name = run.name
        self._run["settings"] = dict(run.settings)
        self._run_hash = self._run.hash
        return str(self._run_hash)

    def write_scalars(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Records numbers as metrics."""
        context = {"subset": "val" if split == "validation" else split}
        for name, value in scalars.items():
            self._run.track(value, name=name, step=step, context=context)

    def end(self, status: str) -> None:
        """Records the status as the parameter `status`, and closes the Aim run."""
        self._run["status"] = status
        self._run.close()


def named(split: str, scalars: Mapping[str, float]) -> dict[str, float]:
    """Returns numbers with the names of a history."""
    return {f"{PREFIXES.get(split, f'{split}_')}{name}": value for name, value in scalars.items()}
