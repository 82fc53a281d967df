"""The training loop: `Trainer`, and what its runs report. `trainer.step` is the step alone."""

from trainer import startup

startup.import_tensorflow()  # before anything else does

from trainer.actions import Action
from trainer.checkpoint import CheckpointError
from trainer.data_errors import DataError
from trainer.divergence import DivergedError, Divergence
from trainer.liveness import TrainingStuckError
from trainer.log.summary import Totals, TrainSummary
from trainer.lost_worker import WorkerLostError
from trainer.step.report import StepReport
from trainer.trainer import Trainer
from trainer.trial import DryRun, Overfit, find_batch_size

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
