"""Runs calls of `Trainer.train_on_batch`: one step each, and the work after an inner loop."""

import contextlib
import math
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from trainer.base.atomic_files import only_writer
from trainer.callbacks.divergence import LossWatch
from trainer.data.errors import MARK, DataError, reason_of
from trainer.data.iterator_state import DataPosition
from trainer.log.run_log import RunLog
from trainer.log.summary import ENDLESS
from trainer.run.listeners import TrainRequest
from trainer.run.outer_loop import OuterLoop
from trainer.run.parts import Parts
from trainer.step.objective import ONLY
from trainer.step.types import Batch, Rows
from trainer.step.xla import note_xla

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class BatchResult(NamedTuple):
    """What `Trainer.train_on_batch` returns with `return_aux=True`; all of it about one batch."""

    values: dict[str, float]  # what it returns without: the loss of the batch, and the metrics
    applied: bool  # whether the step was applied, and not skipped
    # NumPy arrays with one row per example, computed before the update. If the step was attempted
    # again, they are of the last attempt.
    losses: Any = None  # float32, not weighted; with several optimizers, a dict of arrays by name;
    # None with reduction="global"
    aux: Any = None  # what `compute_loss` returned along with the losses; the outputs, by default


def on_host(rows: Rows | None) -> tuple[Any, Any]:
    """Returns losses and aux as NumPy arrays, and None for what was not kept."""
    if rows is None:
        return None, None
    aux, losses = tf.nest.map_structure(
        lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, rows
    )
    return losses.get(ONLY, losses) if losses else None, aux


class OnlineLoop(OuterLoop):
    """Trains on one batch after the other, until the trainer is changed or reads data again.

    Args:
        trainer: a trainer that has started.
        parts: the trainer's parts.
        position: the position in data, an `OnlinePosition`.
        watch: the loss watch, which detects divergence, or None.
        log: the run's log.
        request: what to do in the steps; its target is `ENDLESS`.
    """

    def __init__(
        self,
        trainer: "Trainer",
        parts: Parts,
        position: DataPosition,
        watch: LossWatch | None,
        log: RunLog,
        request: TrainRequest,
    ) -> None:
        """Begins to wait for the first batch."""
        request = request._replace(target=ENDLESS)
        super().__init__(trainer, parts, position, watch, log, request)
        self.parts = parts
        self._held = contextlib.ExitStack()  # the lock of the folder, and the trackers' run
        self._waiting_since = time.perf_counter()

    def begin(self, *, first: bool) -> None:
        """Does what comes before the first step; see `OuterLoop.begin`."""
        self._held.enter_context(only_writer(self._trainer.model_dir))
        super().begin(first=first)
        if self._rollbacks and self._parts.checkpoints.holds_other_variables():
            self._saver.save(self._step, again=True)

    def start_recording(self) -> None:
        """Begins to record the run with its trackers, if there are any."""
        self._held.enter_context(self._tracked())

    def release(self) -> None:
        """Lets other runs write to the folder, and ends the trackers' run; also after an error."""
        self._held.__exit__(*sys.exc_info())

    @property
    def batch(self) -> Batch:
        """The batch with which the loop began."""
        return self._position.data.first

    def _reached(self) -> int:
        """Returns the target: no call is the last one, so the run is never stopped before it."""
        return ENDLESS

    @property
    def _step_function(self) -> Any:
        """The function that takes steps."""
        return self._parts.run_batch

    def _traced_step(self) -> Any:
        """Traces the step; returns None if it runs eagerly."""
        if tf.config.functions_run_eagerly():
            return None
        return self._parts.run_batch.get_concrete_function(self.batch, tf.constant(0.0))

    def take(self, batch: Batch) -> BatchResult:
        """Takes one step with a global batch, as tensors."""
        try:
            return self._take(batch)
        except Exception as error:
            self._finish_saving(error)
            self.log.log_failure(self._step, error)
            raise

    def _take(self, batch: Batch) -> BatchResult:
        """Does what `take` says."""
        before, parts = self._step, self._parts
        for listener in self._listeners:
            listener.before(before)
        waited = time.perf_counter() - self._waiting_since
        try:
            report, (metrics, rows) = parts.run_batch(batch, tf.constant(waited, tf.float32))
        except tf.errors.OpError as error:
            if MARK in error.message:
                raise DataError(f"{reason_of(error.message)}, after step {before}") from error
            note_xla(error)
            error.add_note(f"raised after step {before}.")
            self.failure = error
            raise
        if self._count_traces() != self._traces:
            self.note_setup()
        self._step = before + 1
        self.log.add(report, self._step, compiling=before == self._start)
        if parts.recorder:
            spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
            with self._reporter.writing():
                parts.recorder.keep_overflow(report, batch, spec)
        self._reporter.read()
        results = {"loss": float(report.loss.numpy()[0])}
        counted = self.log.any_applied
        results |= {name: float(value) if counted else math.nan for name, value in metrics.items()}
        self._after_inner_loop(before)
        self._waiting_since = time.perf_counter()
        return BatchResult(results, bool(report.grads_finite.numpy()[0]), *on_host(rows))

    def leave_out_time(self) -> None:
        """Leaves the time since the last step out of the reported speed and waiting."""
        self.log.restart_clock()
        self._waiting_since = time.perf_counter()

    def close(self, *, save: bool) -> None:
        """Logs the steps since the last log line, and waits for checkpoints.

        Args:
            save: whether to save the run as well.
        """
        try:
            self._call_user(self._reporter.write)
            if save:
                self._saver.save(self._step)
            self._saver.wait()
        finally:
            self.release()
