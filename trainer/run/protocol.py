"""Types for a trainer, as this room sees it, and for the trainer's parts.

`RunnableTrainer` lists the members of `Trainer` that this room uses. A test checks that `Trainer`
has all of them.
"""

import contextlib
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import tensorflow as tf

import scaling
from trainer.callbacks.action import Action
from trainer.callbacks.callback import Callback
from trainer.callbacks.monitoring import Monitoring
from trainer.checkpoint import CheckpointSaver
from trainer.checkpoint.settings import Checkpoints
from trainer.evaluation.evaluator import Evaluator
from trainer.fingerprint import Fingerprint
from trainer.log.trackers import Tracker
from trainer.losses.settings import Losses
from trainer.losses.value_checks import LabelRange
from trainer.replay.recorder import FlightRecorder
from trainer.step import StepPlan, StepReport, TrainState
from trainer.step.skips import Skips
from trainer.step.types import Aux, Batch, MetricsByName, Model, Optimizers, Variable
from trainer.step.updates import Updates


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


class RunnableTrainer(Protocol):
    """The members of a trainer that this package uses."""

    # Settings; see the arguments of the same names in `Trainer`.
    model_dir: pathlib.Path | None
    strategy: tf.distribute.Strategy
    strategy_name: str | None  # None if the strategy was passed as an object
    precision: scaling.Precision
    rule: scaling.LossScaleRule
    losses: Losses
    num_microbatches: int
    updates: Updates
    checkpoints: Checkpoints
    skips: Skips
    monitoring: Monitoring
    weights_overridden: bool  # whether `example_weights` is overridden
    has_optimizer: bool  # whether an optimizer was given, or `build_optimizer` is overridden
    steps_per_loop: int
    jit_compile: bool | str
    compile_mode_open: bool  # whether `jit_compile` was "auto", and no mode has been chosen yet
    seed: int | None
    log_interval: int
    style: str  # of the console output; see `RunConsole`
    actions: list[Action]
    trackers: list[Tracker]
    callbacks: list[Callback]
    is_chief: bool
    edits: int  # how often an attribute was set, or `retrace` called, between two calls
    stop_asked: bool  # whether the run has been asked to stop

    @property
    def model(self) -> Model:
        """The model; built on first use."""

    @property
    def optimizer(self) -> Optimizers:
        """The optimizer, or a dict of several, keyed by name; built on first use."""

    @property
    def metrics(self) -> MetricsByName:
        """The metrics in use, keyed by name."""

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step. Waits for the device."""

    def lending(self, metrics: MetricsByName) -> contextlib.AbstractContextManager[None]:
        """Context manager in which `metrics` are those in use."""

    def build_metrics(self) -> MetricsByName:
        """Returns new metrics, keyed by name."""

    def compute_loss(self, batch: Batch, training: bool) -> Any:
        """Returns losses, or (losses, aux); see `Task.compute_loss`."""

    def example_weights(self, batch: Batch) -> tf.Tensor:
        """Returns the weight of each example's loss."""

    def update_metrics(self, batch: Batch, aux: Aux) -> None:
        """Updates the metrics in use."""

    def predict_batch(self, batch: Batch) -> Aux:
        """Returns the model's outputs for a batch."""

    def checkpoint_items(self) -> dict[str, object]:
        """Returns further items for checkpoints, keyed by name."""

    def train_step(self, batch: Batch) -> StepReport:
        """Attempts one update."""

    def eval_step(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        """Evaluates one global batch."""

    def check_unchanged(self) -> None:
        """Raises ValueError if a hook has changed what the step was traced with."""

    def note_setup(self) -> None:
        """Notes what the step was traced with, as it is after the trace."""

    def label_ranges(self, batch: Batch) -> Sequence[LabelRange]:
        """Returns the ranges of a batch's labels, as far as they are known."""

    def overrides(self, hook: str) -> bool:
        """Returns whether the trainer or one of its callbacks has a hook."""

    def call_hook(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of the trainer, and then of each callback."""
