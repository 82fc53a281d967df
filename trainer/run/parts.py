"""The parts of a trainer that has started, and their types."""

from typing import Any, NamedTuple, Protocol, TypeAlias

import tensorflow as tf

from trainer.checkpoint import CheckpointSaver
from trainer.evaluation.evaluator import Evaluator
from trainer.fingerprint import Fingerprint
from trainer.replay.recorder import FlightRecorder
from trainer.step import StepPlan, StepReport, TrainState
from trainer.step.types import Batch, MetricsByName, Variable


class RunSteps(Protocol):
    """The inner loop: `loop.inner.run_steps` as a `tf.function`, or `RemoteSteps`."""

    def __call__(
        self, iterator: tf.data.Iterator, num_steps: tf.Tensor
    ) -> tuple[StepReport, Batch]:
        """Takes up to `num_steps` steps; returns their reports, and the last batch if kept."""

    def get_concrete_function(self, iterator: tf.data.Iterator, num_steps: tf.Tensor) -> Any:
        """Returns the traced loop. `RemoteSteps` has no such method."""

    def experimental_get_tracing_count(self) -> int:
        """Returns how many times the loop was traced. `RemoteSteps` has no such method."""


class PendingSteps(Protocol):
    """What is known of an inner loop while it runs: `loop.pending.Pending`, or `RemoteSteps`."""

    def read(self, count: int) -> StepReport:
        """Returns the reports of the loop's first steps, each field with shape (count, ...)."""


class Metrics(NamedTuple):
    """A run's metrics, keyed by name.

    Evaluation has metrics of its own, so that it does not reset the training metrics.
    """

    train: MetricsByName
    eval: MetricsByName


class Slot(NamedTuple):
    """A variable for which an optimizer has slots; see `slots`."""

    variable: Variable
    missed: int  # updates of the optimizer that the variable was not part of, up to `since`
    since: int | None  # updates of the optimizer when the variable was frozen; None: it is trained


# The slots of each optimizer, keyed by its name in a checkpoint.
Slots: TypeAlias = dict[str, list[Slot]]


class Parts(NamedTuple):
    """The objects that `build` makes for a trainer."""

    plan: StepPlan
    state: TrainState
    run_steps: RunSteps  # takes many steps in one call
    pending: PendingSteps  # what is known of `run_steps` while it runs
    run_batch: Any  # takes one step with a given batch: `loop.inner.run_batch` as a `tf.function`
    stop: tf.Variable  # shape=(), bool: any thread may set it, to end `run_steps` or an evaluation
    metrics: Metrics
    evaluator: Evaluator
    checkpoints: CheckpointSaver
    recorder: FlightRecorder | None
    declared: Fingerprint  # by the run when it was built: see `declared.py`
    slots: Slots
