"""Runs one call of `Trainer.train`: inner loops, and the listeners that are called between them.

`OuterLoop.__init__` has the list of the listeners. After each inner loop, those that are due are
called in its order. If one of them needs the reports of the steps, these are read first: a run that
is stuck ends, and a run that has diverged is rolled back by the first listener.
"""

import contextlib
import functools
import pathlib
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

import strategies
from trainer.callbacks.callback import Listener
from trainer.callbacks.divergence import LossWatch
from trainer.callbacks.monitored import check_monitored
from trainer.callbacks.monitoring import Profile
from trainer.checkpoint import CheckpointError
from trainer.data.errors import explain
from trainer.data.iterator_state import DataPosition
from trainer.evaluation.evaluator import UnequalLengthsError
from trainer.log.run_log import RunLog
from trainer.log.summary import INTERVAL_NUMBERS, Totals, TrainSummary
from trainer.loop.inner import LONGEST_LOOP
from trainer.run.adapt import check_trained_as_saved
from trainer.run.build import check_all_saved
from trainer.run.listeners import (
    Evaluations,
    Hooks,
    LogLines,
    Rollback,
    TimedCheckpoints,
    TrainRequest,
)
from trainer.run.lost_worker import (
    WorkerLostError,
    silent_members_end_the_run,
    worker_loss_explained,
)
from trainer.run.parts import Parts
from trainer.run.reporting import Reporter, learning_rates
from trainer.run.saving import RunSaver
from trainer.run.stop_signals import StopSignals, end
from trainer.step.randomness import check_no_stateful_ops
from trainer.step.report import StepReport
from trainer.step.xla import note_xla

if TYPE_CHECKING:
    from trainer.trainer import Trainer

UNSAVED = "several workers are not saved without each other"


class OuterLoop:
    """Trains from the current step of a trainer to a target step.

    Args:
        trainer: a trainer that has started.
        parts: the trainer's parts, from `build`.
        position: the position in the training data.
        watch: the loss watch, which detects divergence, or None.
        log: the run's log.
        request: the arguments of this call of `train`.
        signals: the stop signals; None if the run does not hear of any.
    """

    def __init__(
        self,
        trainer: "Trainer",
        parts: Parts,
        position: DataPosition,
        watch: LossWatch | None,
        log: RunLog,
        request: TrainRequest,
        signals: StopSignals | None = None,
    ) -> None:
        """Makes the listeners."""
        self._trainer, self._parts, self._position = trainer, parts, position
        self.log, self._request, self._signals, self._watch = log, request, signals, watch
        self._step = self._start = Totals.from_state(parts.state).attempted
        self._resumed = parts.checkpoints.latest is not None
        self._traces = 0  # of the step, when the trainer's setup was last noted
        self.failure: tf.errors.OpError | None = None  # what ended a step in its middle

        self._saver = saver = RunSaver(trainer, parts, position, watch, log, signals)
        self._reporter = Reporter(trainer, parts, log, watch, request.target, self._call_user)
        log_interval, eval_interval, start = self._intervals()
        kept_steps = parts.checkpoints.kept_steps if watch else tuple
        self._evaluations = Evaluations(
            trainer, request, self._reporter, saver, kept_steps, eval_interval, start
        )
        of_run = trainer, parts, position, self._reporter, saver, self._evaluations
        self._rollbacks = [Rollback(*of_run, watch, self._go_back)] if watch else []
        self._profiles = []
        if steps := trainer.monitoring.profile_steps:
            folder = trainer.model_dir if trainer.is_chief else None
            self._profiles = [Profile((steps[0], steps[1]), folder, log.say)]
        # What is called between inner loops, in this order.
        self._listeners: list[Listener] = [
            *self._rollbacks,
            *self._profiles,
            LogLines(self._reporter, log_interval, request.target, start),
            self._evaluations,
            *trainer.callbacks,
            Hooks(trainer, position, lambda: self._data_began),
            TimedCheckpoints(saver, trainer.checkpoints.interval, request.target),
        ]

    def _intervals(self) -> tuple[int | None, int | None, Callable[[], int]]:
        """Returns the intervals of log lines and evaluations, and from where they are counted.

        Both end where epochs end if there are callbacks of Keras.
        """
        log_interval, eval_interval = self._trainer.log_interval, self._request.eval_interval
        epoch = self._position.data.steps_per_epoch
        per_epoch = [type(each).__name__ for each in self._trainer.callbacks if each.per_epoch]
        if not (per_epoch and epoch):
            return log_interval, eval_interval, lambda: 0
        if eval_interval and epoch % eval_interval and eval_interval % epoch:
            raise ValueError(
                f"`eval_interval` must be a multiple of an epoch's {epoch} steps, or divide them, "
                f"with {per_epoch[0]}; got {eval_interval}"
            )
        return epoch, eval_interval or epoch, lambda: self._data_began

    def begin(self, *, first: bool) -> None:
        """Does what comes before the first step.

        Args:
            first: whether this is the trainer's first call of `train`.

        Raises:
            ValueError: as for `RunSaver.resume`, `check` and `check_monitored`.
        """
        request, metrics = self._request, self._parts.metrics.train
        logged = [*INTERVAL_NUMBERS, *learning_rates(self._parts.plan), *metrics]
        results = request.results if request.evaluate else None
        check_monitored(self._trainer.callbacks, logged, results)
        checkpoints = self._parts.checkpoints
        if self._step and (checkpoints.resumed or checkpoints.latest is None):
            for rollback in self._rollbacks:
                rollback.went_on_at = self._step
        self._saver.resume(self.log, request.target)
        if self._watch and self._position.began == self._step < self._request.target:
            self._watch.forget_losses()
        self._tell_where_epochs_begin()
        if first and not (self._step or self._resumed):
            self.log.set_aside()
        self.check(first=first)

    def _tell_where_epochs_begin(self) -> None:
        """Tells the callbacks where epochs begin."""
        length, before = self._position.data.steps_per_epoch, self._position.epochs_before
        for callback in self._trainer.callbacks:
            callback.set_epochs(length, self._data_began, before, self._request.target)

    @property
    def _data_began(self) -> int:
        """The step at which the first pass over this data began."""
        return self._step - self._position.used

    def check(self, *, first: bool) -> None:
        """Traces the step and checks it, if there are steps to take.

        Args:
            first: whether the trainer has not been checked before.

        Raises:
            ValueError: if a resumed run could not repeat an operation of the step exactly or trains
                other variables, if `check_gradients` finds others than those of a plain loop, or if
                an evaluation cannot be computed.
        """
        if self._step >= self._request.target:
            return
        check_trained_as_saved(self._trainer, self._parts)
        if step := self._traced_step():
            check_no_stateful_ops(step.graph)
            check_all_saved(step, self._trainer, self._parts)
        if self._request.trace_evaluation:
            self._request.trace_evaluation()
        if first and self._trainer.monitoring.check_gradients:
            from trainer.run.gradient_check import check_gradients  # noqa: PLC0415  # on request

            state = self._parts.state.loss_scaler.state
            check_gradients(self._parts.plan, self._position.data.first, state)

    def introduce(self) -> None:
        """Logs the model and the settings."""
        self._reporter.introduce(self._start, self._saver.settings())

    def _tracked(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that records the run with its trackers, if there are any."""
        return self._reporter.tracked(self._start, self._saver.settings, self._reached)

    def _reached(self) -> int:
        """Returns the step that the run has reached."""
        return self._step

    def run(self) -> None:
        """Runs inner loops until the target is reached or the run is asked to stop."""
        try:
            self._run()
        except Exception as error:
            # SIGTERM is why another worker has ended, too.
            terminated = self._signals and self._signals.received is signal.SIGTERM
            if isinstance(error, WorkerLostError) and terminated:
                end(f"stopped after step {self._step}: {UNSAVED}. WorkerLostError: {error}")
            self._finish_saving(error)
            self.log.log_failure(self._step, error)
            raise

    def _finish_saving(self, error: Exception) -> None:
        """Waits for a checkpoint that is still written when the run ends with an error."""
        try:
            self._saver.wait()
        except CheckpointError as failed:
            error.add_note(f"A checkpoint could not be written: {failed}")

    def _run(self) -> None:
        """Does what `run` says."""
        target, strategy = self._request.target, self._trainer.strategy
        with (
            self._tracked(),
            self.log.console.progress_bar(self._start, target),
            silent_members_end_the_run(strategy, self._progress),
            worker_loss_explained(strategy, self._progress),
            contextlib.ExitStack() as ending,
        ):
            for profile in self._profiles:
                ending.callback(profile.end)
            if not self._parts.checkpoints.deferred:
                self._catch_up()
            while self._step < target and not self._stop_asked():
                before = self._step
                for listener in self._listeners:
                    self._call_user(functools.partial(listener.before, before))
                self._take_steps()
                if self._step > before:  # a loop that was asked to stop at once took no step
                    self._after_inner_loop(before)
            if self._step < target or self._evaluation_was_stopped():
                self._end_early()
            self._saver.wait()

    def _catch_up(self) -> None:
        """Evaluates and saves what has to be before the first step."""
        step, evaluations = self._step, self._evaluations
        # A run that is resumed from a checkpoint of step 0 has been evaluated already.
        if self._request.evaluate_at_start and not (step or self._resumed):
            self._call_user(lambda: evaluations.after(step))
        due = self._saver.is_evaluation_due(step) or self._request.due == step
        if due and self._request.evaluate:
            self._call_user(lambda: evaluations.after(step))
            if step and not evaluations.unfinished:
                rest = self._listeners[self._listeners.index(evaluations) + 1 : -1]
                self._call([each for each in rest if each.is_due(step - 1, step)])
            self._saver.save(step, again=not evaluations.unfinished)
        if self._rollbacks and self._parts.checkpoints.holds_other_variables():
            # So that there is a checkpoint to roll back to, which fits the optimizers.
            self._saver.save(step, again=True)

    def _after_inner_loop(self, before: int) -> None:
        """Calls the listeners that are due.

        Args:
            before: the step at which the inner loop began.
        """
        due = [each for each in self._listeners if each.is_due(before, self._step)]
        if any(listener.reads for listener in due):
            self._reporter.read()
        self._call(due)

    def _call(self, due: Sequence[Listener]) -> None:
        """Calls listeners after the current step, until a rollback or an evaluation that stops."""
        step = self._step
        for listener in due:
            call = functools.partial(listener.after, step)
            self._call_user(call) if listener.saves_on_error else call()
            if self._step != step:
                break  # the run was rolled back
            if listener is self._evaluations and self._evaluation_was_stopped():
                break  # the next call evaluates again, and does what comes after it

    def _evaluation_was_stopped(self) -> bool:
        """Returns whether a checkpoint is to say that the evaluation of this step is still due."""
        saves = self._trainer.checkpoints.folder_in(self._trainer.model_dir) is not None
        return saves and self._evaluations.unfinished

    def note_setup(self) -> None:
        """Notes the settings as they are after a trace, which may have changed some itself.

        For example, it may have filled a cache. Otherwise this would pass for a change by a hook.
        """
        self._traces = self._count_traces()
        self._trainer.note_setup()

    def _count_traces(self) -> int:
        """Returns how often the step was traced; 0 for parameter servers, which do not tell."""
        count = getattr(self._step_function, "experimental_get_tracing_count", None)
        return count() if count else 0

    @property
    def _step_function(self) -> Any:
        """The function that takes steps."""
        return self._parts.run_steps

    def conclude(self, began: float) -> TrainSummary:
        """Logs and returns a summary of the run.

        Args:
            began: the value of `time.perf_counter()` when this call of `train` began.
        """
        return self._reporter.conclude(self._step, self._start, time.perf_counter() - began)

    def _progress(self) -> tuple[int, pathlib.Path | None]:
        """Returns the step after the last inner loop, and the newest checkpoint or None.

        It reads no variable: that would wait for a worker that does not answer.
        """
        return self._step, self._parts.checkpoints.latest

    @property
    def evaluation_due(self) -> int | None:
        """The step whose evaluation was begun and not ended; None if there is none."""
        return self._step if self._evaluations.unfinished else None

    def _traced_step(self) -> Any:
        """Traces the step; returns None if it runs eagerly or on parameter servers."""
        run_steps = self._parts.run_steps
        traced = hasattr(run_steps, "get_concrete_function")
        if not traced or tf.config.functions_run_eagerly():
            return None
        with self.log.console.busy("tracing the training step ..."):
            return run_steps.get_concrete_function(self._position.iterator, tf.constant(1))

    def _take_steps(self) -> None:
        """Runs one inner loop, which ends early if the run is asked to stop."""
        before, iterator = self._step, self._position.iterator
        longest = before + min(self._trainer.steps_per_loop, LONGEST_LOOP)
        stops = [listener.next_stop(before) for listener in self._listeners]
        end = min(longest, *(stop for stop in stops if stop is not None))
        busy: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if before == self._start:
            busy = self.log.console.busy(
                "preparing the training step, and taking the first ones ..."
            )
        try:
            with busy:
                report, batch = self._parts.run_steps(iterator, tf.constant(end - before))
        except tf.errors.OpError as error:
            self._explain(error)
            self.failure = error
            raise
        if self._count_traces() != self._traces:
            self.note_setup()
        self._account_for(report)
        if self._parts.recorder:
            # If there is a step to record, the loop ended right after it, so `batch` is its batch.
            with self._reporter.writing():
                self._parts.recorder.keep_overflow(report, batch, iterator.element_spec)
        # Read the reports now instead of at the next log line: `read` raises if the run is stuck,
        # and a loop that ends early, or at a step to record, may have ended for that reason. The
        # steps of parameter servers are all scheduled before one of them can end the run.
        on_servers = strategies.capabilities(self._trainer.strategy).asynchronous
        if self._parts.recorder or self._step < end or on_servers:
            self._reporter.read()

    def _account_for(self, report: StepReport) -> None:
        """Adds the steps of an inner loop to the step, the log and the position in the data."""
        taken, before = int(report.step.shape[0]), self._step
        self._step = before + taken
        self.log.add(report, self._step, compiling=before == self._start)
        self._position.taken += taken

    def _explain(self, error: tf.errors.OpError) -> None:
        """Raises DataError if the data caused the error; otherwise adds a note to the error."""
        done = Totals.from_state(self._parts.state).attempted
        taken = done - self._step
        note_xla(error)
        # Workers may still be in steps.
        if strategies.capabilities(self._trainer.strategy).asynchronous:
            self._position.taken += taken
        else:
            self._account_for(self._parts.pending.read(taken))
        self._position.leave_out_one()  # the failed step's batch
        self._saver.wait()
        latest, target = self._parts.checkpoints.latest, self._request.target
        reader = self._position.data.reader
        explain(error, done, target, latest, reader.error if reader else None)

    def _go_back(self, step: int) -> None:
        """Notes that the run was rolled back."""
        self._step = step
        self._tell_where_epochs_begin()

    def _stop_asked(self) -> bool:
        return bool(strategies.any_worker(self._trainer.stop_asked, self._trainer.strategy))

    def _end_early(self) -> None:
        """Saves and logs a run that was asked to stop.

        It is saved first, with the interval that is not finished: a resumed run removes the line
        that is written here, and writes the line of the whole interval.
        """
        self._reporter.read()
        for rollback in self._rollbacks:
            rollback.after(self._step)
        self._saver.save(self._step)
        self._call_user(self._reporter.write)
        self.log.say(f"stopped at step {self._step} of {self._request.target}, as asked")

    def _call_user(self, function: Callable[[], object]) -> None:
        """Calls code of the user, and saves the run if it raises.

        A run that has diverged is not saved, and neither is one of several workers, unless all of
        them raise the error: the others do not know of it, and are elsewhere. Use this only between
        steps.
        """
        try:
            function()
        except Exception as error:
            several = strategies.capabilities(self._trainer.strategy).multi_worker
            if several and not isinstance(error, UnequalLengthsError):
                error.add_note(f"raised at step {self._step}: {UNSAVED}")
                raise
            self._reporter.read()
            if self._reporter.diverged:
                saved = ". The run was not saved, because it has diverged."
            else:
                self._saver.save(self._step)
                self._saver.wait()
                saved = ". The run was saved." if self._parts.checkpoints.latest else ""
            error.add_note(f"raised at step {self._step}{saved}")
            raise
