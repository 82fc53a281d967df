"""The training step without a `Trainer` around it, for custom loops under any strategy."""

from trainer.step.attempt import attempt_step
from trainer.step.gather import all_gather, own_rows
from trainer.step.plan import StepPlan, plan_step
from trainer.step.report import StepReport
from trainer.step.settings import Skips, Updates
from trainer.step.state import TrainState

__all__ = [
    "Skips",
    "StepPlan",
    "StepReport",
    "TrainState",
    "Updates",
    "all_gather",
    "attempt_step",
    "own_rows",
    "plan_step",
]
