"""The training loop: `Trainer`, and what its runs report. `trainer.step` is the step alone."""

from trainer.actions import Action
from trainer.liveness import TrainingStuckError
from trainer.report import Totals, TrainSummary
from trainer.step.report import StepReport
from trainer.trainer import Trainer

__all__ = ["Action", "StepReport", "Totals", "TrainSummary", "Trainer", "TrainingStuckError"]
