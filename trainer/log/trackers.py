"""Experiment trackers: where a run's numbers go besides its own files.

A tracker is any object with the methods of `Tracker`. Three are in `tracker_services.py`. Trackers
get what `metrics.jsonl` has in its "run", "train" and "validation" lines. They never change a run:
if one fails in the middle, the run warns and goes on, and its own files are complete.
"""

import contextlib
import importlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from absl import logging

from trainer.base.atomic_files import write_atomically

FILE = "trackers.json"  # in `model_dir`: each tracker's id of the run
# Classes in `tracker_services.py`, by name.
SERVICES = {"mlflow": "MLflowTracker", "wandb": "WandbTracker", "aim": "AimTracker"}


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
        self._trackers = {name_of(tracker, trackers): tracker for tracker in trackers}
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


def name_of(tracker: Tracker, trackers: Sequence[Tracker]) -> str:
    """Returns the class of a tracker, with its number if several have the same class."""
    alike = [each for each in trackers if type(each) is type(tracker)]
    number = next(index for index, each in enumerate(alike) if each is tracker)
    return type(tracker).__name__ + (f" {number + 1}" if number else "")


def check_trackers(name: str, trackers: object) -> None:
    """Raises TypeError or ValueError unless `trackers` is a list of trackers or their names."""
    known = f"names ({', '.join(SERVICES)}) or objects with the methods of trainer.Tracker"
    if not isinstance(trackers, (list, tuple)):
        raise TypeError(f"`{name}` must be a list of {known}; got {trackers!r}")
    for tracker in trackers:
        named = isinstance(tracker, str) and tracker in SERVICES
        if isinstance(tracker, type) or not (named or isinstance(tracker, Tracker)):
            raise ValueError(f"`{name}` must be a list of {known}; got {tracker!r}")


def make_tracker(tracker: str | Tracker) -> Tracker:
    """Returns the tracker with a name, with its defaults; a tracker is returned as it is."""
    if not isinstance(tracker, str):
        return tracker
    services = importlib.import_module("trainer.log.tracker_services")
    made: Tracker = getattr(services, SERVICES[tracker])()
    return made
