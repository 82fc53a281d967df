"""The training loop: `Trainer`, and what its runs report. `trainer.step` is the step alone."""

from trainer.base import tensorflow_startup as startup

startup.import_tensorflow()  # before anything else does

from trainer.checkpoint import CheckpointError
from trainer.data.errors import DataError
from trainer.log.summary import Totals, TrainSummary
from trainer.monitor.actions import Action
from trainer.monitor.divergence import DivergedError, Divergence
from trainer.monitor.lost_worker import WorkerLostError
from trainer.monitor.stuck import TrainingStuckError
from trainer.run.dry_run import DryRun, Overfit, find_batch_size
from trainer.step.report import StepReport
from trainer.trainer import Trainer

__all__ = [
    "Action",
    "CheckpointError",
    "DataError",
    "DivergedError",
    "Divergence",
    "DryRun",
    "Overfit",
    "StepReport",
    "Totals",
    "TrainSummary",
    "Trainer",
    "TrainingStuckError",
    "WorkerLostError",
    "find_batch_size",
]
