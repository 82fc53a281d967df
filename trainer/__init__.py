"""The training loop: `Trainer`, with the types of its results and errors.

`trainer.step` is the training step alone. The names below are imported when they are first used,
so that `trainer.step` and the program `trainer.report` load only what they need.
"""

import importlib
import typing

from trainer.base import at_import

try:
    import scaling  # noqa: F401  # imports TensorFlow quietly, before anything else does
finally:  # the version is the cause of other errors, too
    at_import.check_versions(at_import.installed())

if typing.TYPE_CHECKING:
    from trainer.callbacks.callback import Callback
    from trainer.callbacks.divergence import DivergedError, Divergence
    from trainer.callbacks.monitoring import Monitoring
    from trainer.callbacks.stuck import TrainingStuckError
    from trainer.callbacks.timed import Action
    from trainer.checkpoint import CheckpointError
    from trainer.checkpoint.settings import Checkpoints
    from trainer.data.errors import DataError
    from trainer.float8.convert import convert_to_float8
    from trainer.log.summary import Totals, TrainSummary
    from trainer.log.trackers import AimTracker, MLflowTracker, TrackedRun, Tracker, WandbTracker
    from trainer.losses.settings import Losses
    from trainer.run.dry_run import DryRun, Overfit, find_batch_size
    from trainer.run.lost_worker import WorkerLostError
    from trainer.run.online_loop import BatchResult
    from trainer.step.report import StepReport
    from trainer.step.settings import Skips, Updates
    from trainer.trainer import Trainer

_HOMES = {
    "Action": "trainer.callbacks.timed",
    "AimTracker": "trainer.log.trackers",
    "BatchResult": "trainer.run.online_loop",
    "Callback": "trainer.callbacks.callback",
    "CheckpointError": "trainer.checkpoint",
    "Checkpoints": "trainer.checkpoint.settings",
    "DataError": "trainer.data.errors",
    "DivergedError": "trainer.callbacks.divergence",
    "Divergence": "trainer.callbacks.divergence",
    "DryRun": "trainer.run.dry_run",
    "Losses": "trainer.losses.settings",
    "MLflowTracker": "trainer.log.trackers",
    "Monitoring": "trainer.callbacks.monitoring",
    "Overfit": "trainer.run.dry_run",
    "Skips": "trainer.step.settings",
    "StepReport": "trainer.step.report",
    "Totals": "trainer.log.summary",
    "TrackedRun": "trainer.log.trackers",
    "Tracker": "trainer.log.trackers",
    "TrainSummary": "trainer.log.summary",
    "Trainer": "trainer.trainer",
    "TrainingStuckError": "trainer.callbacks.stuck",
    "Updates": "trainer.step.settings",
    "WandbTracker": "trainer.log.trackers",
    "WorkerLostError": "trainer.run.lost_worker",
    "convert_to_float8": "trainer.float8.convert",
    "find_batch_size": "trainer.run.dry_run",
}

__all__ = [
    "Action",
    "AimTracker",
    "BatchResult",
    "Callback",
    "CheckpointError",
    "Checkpoints",
    "DataError",
    "DivergedError",
    "Divergence",
    "DryRun",
    "Losses",
    "MLflowTracker",
    "Monitoring",
    "Overfit",
    "Skips",
    "StepReport",
    "Totals",
    "TrackedRun",
    "Tracker",
    "TrainSummary",
    "Trainer",
    "TrainingStuckError",
    "Updates",
    "WandbTracker",
    "WorkerLostError",
    "convert_to_float8",
    "find_batch_size",
]


def __getattr__(name: str) -> typing.Any:
    """Imports a public name when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, imported or not."""
    return sorted({*globals(), *__all__})
