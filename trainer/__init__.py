"""The training loop: `Trainer`, and what its runs report."""

from trainer.liveness import TrainingStuckError
from trainer.report import StepReport, Totals, TrainSummary
from trainer.trainer import Trainer

__all__ = ["StepReport", "Totals", "TrainSummary", "Trainer", "TrainingStuckError"]
