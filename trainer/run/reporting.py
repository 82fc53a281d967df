"""Reads the reports of steps: ends a run that is stuck, detects divergence, writes the log.

Also what the log says when a run begins and ends.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from trainer.callbacks.divergence import Detection, LossWatch
from trainer.callbacks.stuck import TrainingStuckError, check_not_stuck
from trainer.checkpoint import CheckpointError
from trainer.checkpoint.best import BETTER
from trainer.data.errors import reason_of
from trainer.keras_compat import learning_rate_setting
from trainer.log.model_table import variable_rows
from trainer.log.run_log import RunLog
from trainer.log.summary import Interval, Totals, TrainSummary
from trainer.log.trackers import TrackedRun
from trainer.losses.metrics import numbers_of
from trainer.run.parts import Parts
from trainer.step import StepPlan

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class Reporter:
    """Reads the reports that the inner loops leave in the log.

    Args:
        trainer: a trainer that has started.
        parts: the trainer's parts, from `build`.
        log: the run's log.
        watch: the loss watch, which detects divergence, or None.
        target: the step at which this call of `train` ends.
        call_user: calls code of the user.
    """

    def __init__(
        self,
        trainer: "Trainer",
        parts: Parts,
        log: RunLog,
        watch: LossWatch | None,
        target: int,
        call_user: Callable[[Callable[[], object]], None],
    ) -> None:
        """Stores the arguments. No divergence has been detected yet."""
        self._trainer = trainer
        self._parts = parts
        self.log = log
        self._watch = watch
        self._target = target
        self._call_user = call_user
        self._divergence: Detection | None = None  # detected, but not handled yet

    @property
    def diverged(self) -> bool:
        """Whether a divergence was detected that has not been handled yet."""
        return self._divergence is not None

    def take_divergence(self) -> Detection | None:
        """Returns the detected divergence and clears it; None if there is none."""
        divergence, self._divergence = self._divergence, None
        return divergence

    def read(self) -> None:
        """Reads and checks the reports of the steps since the last call.

        Raises:
            TrainingStuckError: if the run cannot continue.
        """
        with self.writing():
            steps = self.log.read()
        if steps is None:
            return
        record = self._parts.recorder.latest if self._parts.recorder else None
        names = self._parts.plan.variable_names
        try:
            check_not_stuck(steps, self._trainer.skips, names, record)
        except TrainingStuckError:
            self._write()
            raise
        if self._watch and not self._divergence:
            self._divergence = self._watch.detect(steps)
        for callback in self._trainer.callbacks:
            self._call_user(functools.partial(callback.take_reports, steps))

    def write(self) -> None:
        """Writes a log line for the steps since the last log line, and calls `on_log`.

        Does nothing if there are no such steps.
        """
        line = self._write()
        if line:
            self._trainer.call_hook("on_log", line.step, line.scalars())

    def _write(self) -> Interval | None:
        """Writes a log line, and returns what it says; None if there are no steps to log."""
        if not self.log.pending:
            return None
        metrics = self._parts.metrics.train
        values = numbers_of(metrics)
        totals, rates = Totals.from_state(self._parts.state), learning_rates(self._parts.plan)
        with self.writing():
            line = self.log.flush(self._target, totals, values, rates)
        for metric in metrics.values():
            metric.reset_state()
        return line

    def introduce(self, step: int, settings: Mapping[str, Any]) -> None:
        """Logs the model and the settings on the console and in `metrics.jsonl`.

        Args:
            step: the step at which the run begins, or goes on.
            settings: the settings of the run, as JSON types.
        """
        rows = variable_rows(self._trainer.model)
        with self.writing():
            self.log.log_start(type(self._trainer).__name__, step, settings, rows)

    def tracked(
        self, step: int, settings: Callable[[], dict[str, Any]], reached: Callable[[], int]
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context that records the run with its trackers, if there are any.

        Args:
            step: the step at which the run begins, or goes on.
            settings: returns the settings of the run, as JSON types.
            reached: returns the step that the run has reached when the context ends.
        """
        folder, name = self._trainer.model_dir, type(self._trainer).__name__
        if not self._trainer.trackers:
            return contextlib.nullcontext()
        known = {key: value for key, value in settings().items() if key != "pipeline"}
        name = folder.resolve().name if folder else name
        run = TrackedRun(name, known, step, folder, run_id=None)
        return self.log.trackers.recording(run, self._target, reached)

    def conclude(self, step: int, start: int, seconds: float) -> TrainSummary:
        """Logs and returns a summary of the run.

        Args:
            step: the step that the run has reached.
            start: the step at which this call of `train` began.
            seconds: the duration of this call.
        """
        totals, checkpoints = Totals.from_state(self._parts.state), self._parts.checkpoints
        sizes, snapshot = checkpoints.bytes, self.log.history.snapshot()
        config = self._trainer.checkpoints
        summary = TrainSummary(
            step=step,
            steps_run=step - start,
            totals=totals,
            loss_scale=self._trainer.loss_scale,
            seconds=seconds,
            checkpoint=str(checkpoints.latest) if checkpoints.latest else None,
            checkpoint_bytes=sum(sizes.values()),
            position_bytes=sizes.get("data", 0) + sizes.get("counts", 0),
            best=snapshot.best(config.best_metric, BETTER[config.best_is]),
            schedule_lag=totals.skipped if self._parts.plan.has_schedule else 0,
            snapshot=snapshot,
        )
        with self.writing():
            if checkpoints.deferred:
                self.log.say(str(summary))
            else:
                self.log.log_end(summary, self._target)
        return summary

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Context manager: turns a file system error into a CheckpointError naming the folder."""
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            raise CheckpointError(
                f"the log in {self._trainer.model_dir} could not be written: "
                f"{reason_of(str(error))}; everything up to the last checkpoint is safe"
            ) from error


def learning_rates(plan: StepPlan) -> dict[str, float]:
    """Returns the learning rates that the last update used. Waits for the device.

    A schedule is evaluated at that update's number. Before the first update, these are the
    rates that it will use.

    Returns:
        The learning rate under the name "learning_rate". With several optimizers, one for each,
        under "learning_rate/NAME"; the optimizers in a `keras.optimizers.MultiOptimizer` are named
        by their own names and positions.
    """
    rates = {}
    for objective in plan.objectives:
        name = f"learning_rate/{objective.name}" if objective.name else "learning_rate"
        parts = objective.updating
        for position, optimizer in enumerate(parts):
            suffix = f"/{optimizer.name}_{position}" if len(parts) > 1 else ""
            rates[name + suffix] = last_learning_rate(optimizer)
    return rates


def last_learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the learning rate of an optimizer's last update. Waits for the device."""
    setting = learning_rate_setting(optimizer)
    if not isinstance(setting, keras.optimizers.schedules.LearningRateSchedule):
        return float(tf.convert_to_tensor(optimizer.learning_rate))
    count = optimizer.iterations
    last = tf.maximum(tf.convert_to_tensor(count) - 1, 0)
    # As in an update, a schedule gets the variable, to which floats can be added. They cannot be
    # added to a tensor of integers.
    with keras.StatelessScope([(count, last)]):
        return float(tf.convert_to_tensor(setting(count)))
