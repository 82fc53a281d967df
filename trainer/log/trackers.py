"""Experiment trackers: where a run's numbers go besides its own files.

A tracker is any object with the methods of `Tracker`. Those for MLflow, Weights & Biases and Aim
import their packages when they are first used. Trackers get what `metrics.jsonl` has in its "run",
"train" and "validation" lines. They never change a run: if one fails in the middle, the run warns
and goes on, and its own files are complete.
"""

import contextlib
import importlib
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from absl import logging

from trainer.base.argument_checks import check_choice
from trainer.base.atomic_files import write_atomically
from trainer.log.model_table import flattened
from trainer.log.summary import PREFIXES

FILE = "trackers.json"  # in `model_dir`: each tracker's id of the run
MAX_PARAMETER = 500  # characters of a parameter that every MLflow server stores
MAX_PARAMETERS = 100  # parameters in one request


class TrackedRun(NamedTuple):
    """What a tracker is told about a run when a call of `train` begins."""

    name: str  # the name of `model_dir`, or of the trainer's class
    settings: Mapping[str, Any]  # the settings in `metrics.jsonl`, as JSON types
    step: int  # the step that the run has reached
    model_dir: pathlib.Path | None
    run_id: str | None  # what `begin` returned in an earlier process of the same run


@runtime_checkable
class Tracker(Protocol):
    """Records the numbers of runs elsewhere. The chief worker calls it, between inner loops.

    Example:
        >>> class Lines:
        ...     def begin(self, run):
        ...         return run.run_id or run.name
        ...
        ...     def write_scalars(self, split, step, scalars):
        ...         print(split, step, dict(scalars))
        ...
        ...     def end(self, status):
        ...         print(status)
        >>> isinstance(Lines(), Tracker)
        True
    """

    def begin(self, run: TrackedRun) -> str:
        """Begins to record a run, or goes on with it.

        Returns:
            An id with which another process can go on recording the same run.
        """

    def write_scalars(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Records numbers.

        Args:
            split: "train" for a log line, "validation" for an evaluation.
            step: the step that the numbers belong to.
            scalars: the numbers, keyed by name.
        """

    def end(self, status: str) -> None:
        """Ends a call of `train`. Another call of `begin` may follow.

        Args:
            status: "finished", "stopped" (before the target, as asked) or "failed".
        """


class Trackers:
    """The trackers of a run.

    Args:
        trackers: the trackers.
        model_dir: the folder that keeps their ids of the run; None keeps none.
    """

    def __init__(
        self, trackers: Sequence[Tracker] = (), model_dir: pathlib.Path | None = None
    ) -> None:
        """Stores the arguments."""
        self._trackers: dict[str, Tracker] = {}
        for tracker in trackers:
            name = type(tracker).__name__
            alike = sum(type(each) is type(tracker) for each in self._trackers.values())
            self._trackers[f"{name} {alike + 1}" if alike else name] = tracker
        self._path = model_dir / FILE if model_dir else None
        self._failing: set[str] = set()

    @contextlib.contextmanager
    def recording(self, run: TrackedRun, target: int, reached: Any) -> Iterator[None]:
        """Context manager: begins to record a run, and ends it with its status.

        Args:
            run: the run.
            target: the step at which the run ends.
            reached: a function that returns the step that the run has reached.
        """
        self._begin(run)
        status = "failed"
        try:
            yield
            status = "finished" if reached() >= target else "stopped"
        finally:
            self._end(self._trackers, status)

    def write_scalars(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Passes numbers to all trackers; one that fails is named in a warning."""
        for name, tracker in self._trackers.items():
            with self._going_on(name, f"record step {step}"):
                tracker.write_scalars(split, step, scalars)

    def _begin(self, run: TrackedRun) -> None:
        """Begins to record, with the ids of the earlier process if this one has resumed the run."""
        known = {}
        if run.step and self._path and self._path.exists():
            with contextlib.suppress(ValueError):  # damaged: the trackers begin new runs
                known = dict(json.loads(self._path.read_text()))
        ids: dict[str, str] = {}
        try:
            for name, tracker in self._trackers.items():
                ids[name] = tracker.begin(run._replace(run_id=known.get(name)))
        except BaseException:
            self._end(ids, "failed")
            raise
        if ids and self._path:
            write_atomically(self._path, json.dumps(ids))

    def _end(self, names: Iterable[str], status: str) -> None:
        """Ends the run at the trackers with these names."""
        for name in names:
            with self._going_on(name, "end the run"):
                self._trackers[name].end(status)

    @contextlib.contextmanager
    def _going_on(self, name: str, what: str) -> Iterator[None]:
        """Context manager: turns an exception into a warning, once until the tracker works."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # the run is worth more than its tracker
            if name not in self._failing:
                logging.warning("%s could not %s, and the run goes on: %r", name, what, error)
            self._failing.add(name)
        else:
            self._failing.discard(name)


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


SERVICES: dict[str, Callable[[], Tracker]] = {
    "mlflow": MLflowTracker,
    "wandb": WandbTracker,
    "aim": AimTracker,
}


def make_tracker(tracker: str | Tracker) -> Tracker:
    """Returns the tracker with a name, with its defaults; a tracker is returned as it is."""
    if not isinstance(tracker, str):
        return tracker
    check_choice("trackers", tracker, tuple(SERVICES))
    return SERVICES[tracker]()
