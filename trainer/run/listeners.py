"""The listeners of a run: rollbacks, log lines, evaluations, hooks and checkpoints."""

import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from absl import logging

from trainer.callbacks.callback import Listener
from trainer.callbacks.divergence import Detection, DivergedError, LossWatch
from trainer.checkpoint.best import Best
from trainer.data.iterator_state import DataPosition
from trainer.log.summary import Totals
from trainer.loop.inner import next_multiple
from trainer.run.parts import Parts
from trainer.run.reporting import Reporter
from trainer.run.saving import RunSaver

if TYPE_CHECKING:
    from trainer.trainer import Trainer

Results = dict[str, float]


class TrainRequest(NamedTuple):
    """The arguments of one call of `train`, checked and resolved."""

    target: int  # the step to reach
    evaluate: Callable[[], Results | None] | None  # returns None if the evaluation was stopped
    # Traces the evaluation, so that an error in it ends the run before the first step.
    trace_evaluation: Callable[[], None] | None
    eval_interval: int | None  # number of steps between evaluations; None: at the end only
    export: Callable[[pathlib.Path], None]  # writes the evaluated model into a folder
    evaluate_at_start: bool = False  # whether to evaluate before the run's first step, too
    results: Sequence[str] = ()  # the names of the results of an evaluation
    due: int | None = None  # the step whose evaluation an earlier call has begun and not ended


class Periodic(Listener):
    """A listener at each multiple of an interval, and at the end of the run.

    Args:
        interval: the number of steps between two calls; None: at the end only.
        target: the step at which this call of `train` ends.
        start: returns the step from which the interval is counted.
    """

    def __init__(
        self, interval: int | None, target: int, start: Callable[[], int] = lambda: 0
    ) -> None:
        """Stores the arguments."""
        self._interval, self._target, self._start = interval, target, start

    def next_stop(self, step: int) -> int | None:
        """Returns the end of the present interval, or of the run."""
        stop = next_multiple(self._interval, step, self._start())
        return self._target if stop is None else min(stop, self._target)


class LogLines(Periodic):
    """Writes the log line of an interval."""

    def __init__(
        self, reporter: Reporter, interval: int | None, target: int, start: Callable[[], int]
    ) -> None:
        """Stores the arguments."""
        super().__init__(interval, target, start)
        self._reporter = reporter

    def after(self, step: int) -> None:
        """Writes the line, and calls `on_log`."""
        del step
        self._reporter.write()


class Evaluations(Periodic):
    """Evaluates the model, and keeps it if it is one of the best.

    Args:
        trainer: a trainer that has started.
        request: the arguments of this call of `train`.
        reporter: the writer of the log.
        saver: remembers an evaluation that was begun and not ended.
        kept_steps: returns the steps of the checkpoints to which the run may be rolled back.
        interval: as for `Periodic`.
        start: as for `Periodic`.
    """

    def __init__(
        self,
        trainer: "Trainer",
        request: TrainRequest,
        reporter: Reporter,
        saver: RunSaver,
        kept_steps: Callable[[], Collection[int]],
        interval: int | None,
        start: Callable[[], int],
    ) -> None:
        """Stores the arguments. Only the chief keeps models, and only if `keep_best` is set."""
        super().__init__(interval, request.target, start)
        self._trainer, self._reporter, self._saver = trainer, reporter, saver
        self._evaluate, self._export = request.evaluate, request.export
        self._kept_steps = kept_steps
        settings, folder = trainer.checkpoints, trainer.model_dir
        self._best = None
        if settings.keep_best and folder and trainer.is_chief:
            self._best = Best(folder, settings.keep_best, settings.best_metric, settings.best_is)

    @property
    def unfinished(self) -> bool:
        """Whether an evaluation of the current step is due, and has not ended."""
        return self._saver.evaluation_due

    def is_due(self, before: int, step: int) -> bool:
        """Returns whether to evaluate.

        It is noted before any hook is called, of which one may raise an error: a resumed run
        evaluates then.
        """
        due = super().is_due(before, step) and self._evaluate is not None
        self._saver.evaluation_due = due
        return due

    def after(self, step: int) -> None:
        """Evaluates, unless the run is asked to stop meanwhile."""
        if self._evaluate is None:
            return
        self._saver.evaluation_due = True
        log = self._reporter.log
        self._trainer.call_hook("on_evaluate_begin", step)
        with log.console.status("evaluating ..."):
            results = self._evaluate()
            if results is not None:
                self._take(step, results)
        log.restart_clock()

    def _take(self, step: int, results: Results) -> None:
        """Logs results, and keeps the model if it is one of the best."""
        with self._reporter.writing():
            self._reporter.log.log_evaluation(step, results)
        if self._best and self._best.consider(step, results, self._export, self._kept_steps()):
            self._reporter.log.say(f"kept in {self._trainer.model_dir}/best")
        self._saver.evaluation_due = False
        self._trainer.call_hook("on_evaluate_end", step, results)

    def roll_back(self, step: int) -> None:
        """Leaves the models that were the best at the step to which the run was rolled back."""
        self._saver.evaluation_due = False
        if self._best:
            self._best.roll_back(step, self._kept_steps())


class Rollback(Listener):
    """Rolls a run that has diverged back to its last good checkpoint.

    It comes first: what the others would do belongs to steps that are undone.

    Args:
        trainer: a trainer that has started.
        parts: the trainer's parts, from `build`.
        position: the position in the training data.
        reporter: detects a divergence, and writes the log of the steps up to it.
        saver: restores callbacks, and saves the run after the rollback.
        evaluations: keeps the models that were the best at the earlier step.
        watch: the loss watch, which has the criteria, and is rolled back together with the run.
        go_back: called with the step to which the run was rolled back.

    Attributes:
        went_on_at: the step at which this call of `train` went on after another one; None if it
            began the run or restored it.
    """

    reads = False
    saves_on_error = False
    went_on_at: int | None = None

    def __init__(
        self,
        trainer: "Trainer",
        parts: Parts,
        position: DataPosition,
        reporter: Reporter,
        saver: RunSaver,
        evaluations: Evaluations,
        watch: LossWatch,
        go_back: Callable[[int], None],
    ) -> None:
        """Stores the arguments."""
        self._trainer, self._parts, self._position = trainer, parts, position
        self._reporter, self._saver, self._evaluations = reporter, saver, evaluations
        self._watch, self._go_back = watch, go_back

    def is_due(self, before: int, step: int) -> bool:
        """Returns True: a divergence may be detected in any report."""
        del before, step
        return True

    def after(self, step: int) -> None:
        """Rolls the run back if a divergence was detected in the reports that were read."""
        del step
        if detection := self._reporter.take_divergence():
            self._roll_back(detection)

    def _roll_back(self, detection: Detection) -> None:
        """Restores the newest checkpoint from before a divergence.

        Raises:
            DivergedError: if there is no such checkpoint with these data, or the run has already
                been rolled back `max_recoveries` times.
        """
        reporter, saver = self._reporter, self._saver
        reporter.write()
        tries = self._watch.recoveries + 1
        checkpoints = self._parts.checkpoints
        with self._trainer.strategy.scope():
            path = checkpoints.restore(before=detection.first)
        step = Totals.from_state(self._parts.state).attempted
        of_other_data = step < self._position.began
        if tries > self._watch.divergence.max_recoveries or path is None or of_other_data:
            checkpoints.resumed = False  # so that another call of `train` restores the rest, too
            back = f"went back to {path}" if path else "there is no earlier checkpoint"
            recoveries = self._watch.recoveries
            raise DivergedError(f"diverged after {recoveries} recoveries: {detection.what}; {back}")
        if self.went_on_at is not None and step <= self.went_on_at:
            logging.warning(
                "The run goes back to step %d, before this call of train, which undoes what was "
                "assigned between the calls: assign it again in on_recovery",
                step,
            )
        if "data" in checkpoints.facts:
            self._position.go_back(path, checkpoints.facts)
        batches_left_out = detection.last - step if self._watch.divergence.skip_data else 0
        self._position.leave_out(batches_left_out)
        # A checkpoint of a run without a watch has no state of one; its window is empty.
        known = checkpoints.facts["divergence"] or LossWatch(self._watch.divergence).state()
        self._watch.set_state(known)
        if step == self._position.began:
            self._watch.forget_losses()
        self._watch.recoveries = tries
        # Change the seed: with the same batches and random numbers, the run would diverge again.
        self._parts.state.random_seed.assign_add(1)
        begun = reporter.log.roll_back(step, saver.saved_interval())
        fields = {"what": detection.what, "restored": step, "batches_left_out": batches_left_out}
        with reporter.writing():
            reporter.log.log_event("recovery", detection.last, {**fields, "interval_begun": begun})
            self._evaluations.roll_back(step)
        reporter.log.say(f"diverged: {detection.what}; back to step {step}")
        saver.restore_callbacks()
        self._trainer.call_hook("on_recovery", detection.last, step)
        # Save now: a run that is killed later must not forget the rollback.
        saver.save(step, again=True)
        self._go_back(step)


class Hooks(Listener):
    """The hooks for inner loops and epochs, of the trainer and of its callbacks.

    Args:
        trainer: a trainer that has started.
        position: the position in the training data.
        start: returns the step at which the first pass over the data began.
    """

    reads = False

    def __init__(
        self, trainer: "Trainer", position: DataPosition, start: Callable[[], int]
    ) -> None:
        """Notes the length of an epoch, if somebody waits for its end."""
        self._trainer, self._position, self._start = trainer, position, start
        waits = trainer.overrides("on_epoch_end")
        self._epoch = position.data.steps_per_epoch if waits else None

    def before(self, step: int) -> None:
        """Calls `on_loop_begin`, and checks that the step is still the one that was traced."""
        self._trainer.call_hook("on_loop_begin", step)
        self._trainer.check_unchanged()

    def next_stop(self, step: int) -> int | None:
        """Returns the end of the present epoch."""
        return next_multiple(self._epoch, step, self._start())

    def is_due(self, before: int, step: int) -> bool:
        """Returns True: `on_loop_end` is called after each inner loop."""
        del before, step
        return True

    def after(self, step: int) -> None:
        """Calls `on_epoch_end` at the end of an epoch, and `on_loop_end`."""
        if self._epoch and (step - self._start()) % self._epoch == 0:
            self._trainer.call_hook("on_epoch_end", self._position.epochs_ended)
        self._trainer.call_hook("on_loop_end", step)


class TimedCheckpoints(Periodic):
    """Saves the run.

    It comes last, so that every checkpoint has been checked first, and includes the effects of all
    other listeners.
    """

    saves_on_error = False

    def __init__(self, saver: RunSaver, interval: int | None, target: int) -> None:
        """Stores the arguments."""
        super().__init__(interval, target)
        self._saver = saver

    def is_due(self, before: int, step: int) -> bool:
        """Returns whether an interval in steps or in seconds has ended."""
        return super().is_due(before, step) or self._saver.is_late()

    def after(self, step: int) -> None:
        """Saves the run."""
        self._saver.save(step)
