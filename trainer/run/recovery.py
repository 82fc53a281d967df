"""Rolls a run that has diverged back to its last good checkpoint."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import logging

from trainer.callbacks.divergence import Detection, DivergedError, Divergence, LossWatch
from trainer.data.iterator_state import DataPosition
from trainer.log.run_log import RunLog
from trainer.log.summary import Totals
from trainer.run.parts import Parts
from trainer.run.reporting import Reporter
from trainer.run.saving import RunSaver

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class Recovery:
    """Rolls a diverged run back to a checkpoint.

    Args:
        trainer: a trainer that has started.
        parts: the trainer's parts, from `build`.
        position: the position in the training data.
        log: the run's log.
        watch: the loss watch, which is rolled back together with the run.
        divergence: the criteria for divergence, and the maximum number of rollbacks.
    """

    def __init__(
        self,
        trainer: "Trainer",
        parts: Parts,
        position: DataPosition,
        log: RunLog,
        watch: LossWatch,
        divergence: Divergence,
    ) -> None:
        """Stores the arguments for `roll_back`."""
        self._trainer = trainer
        self._parts = parts
        self._position = position
        self._log = log
        self._watch = watch
        self._divergence = divergence

    def roll_back(
        self,
        detection: Detection,
        reporter: Reporter,
        saver: RunSaver,
        roll_back_best: Callable[[int], None],
        went_on_at: int | None,
    ) -> int:
        """Restores the newest checkpoint from before a divergence; returns its step.

        Args:
            detection: the divergence that was detected.
            reporter: writes the log of the steps up to the divergence.
            saver: restores callbacks, and saves the run after the rollback.
            roll_back_best: leaves the models that were the best at the step that it is given.
            went_on_at: the step at which this call of `train` went on after another one; None if
                it began the run or restored it.

        Raises:
            DivergedError: if there is no such checkpoint with these data, or the run has already
                been rolled back `max_recoveries` times.
        """
        reporter.write()
        tries = self._watch.recoveries + 1
        checkpoints = self._parts.checkpoints
        with self._trainer.strategy.scope():
            path = checkpoints.restore(before=detection.first)
        step = Totals.from_state(self._parts.state).attempted
        of_other_data = step < self._position.began
        if tries > self._divergence.max_recoveries or path is None or of_other_data:
            checkpoints.resumed = False  # so that another call of `train` restores the rest, too
            back = f"went back to {path}" if path else "there is no earlier checkpoint"
            recoveries = self._watch.recoveries
            raise DivergedError(f"diverged after {recoveries} recoveries: {detection.what}; {back}")
        if went_on_at is not None and step <= went_on_at:
            logging.warning(
                "The run goes back to step %d, before this call of train, which undoes what was "
                "assigned between the calls: assign it again in on_recovery",
                step,
            )
        if "data" in checkpoints.facts:
            self._position.go_back(path, checkpoints.facts)
        batches_left_out = detection.last - step if self._divergence.skip_data else 0
        self._position.leave_out(batches_left_out)
        # A checkpoint of a run without a watch has no state of one; its window is empty.
        known = checkpoints.facts["divergence"] or LossWatch(self._divergence).state()
        self._watch.set_state(known)
        if step == self._position.began:
            self._watch.forget_losses()
        self._watch.recoveries = tries
        # Change the seed: with the same batches and random numbers, the run would diverge again.
        self._parts.state.random_seed.assign_add(1)
        begun = self._log.roll_back(step, saver.saved_interval())
        fields = {"what": detection.what, "restored": step, "batches_left_out": batches_left_out}
        with reporter.writing():
            self._log.log_event("recovery", detection.last, {**fields, "interval_begun": begun})
            roll_back_best(step)
        self._log.say(f"diverged: {detection.what}; back to step {step}")
        saver.restore_callbacks()
        self._trainer.call_hook("on_recovery", detection.last, step)
        # Save now: a run that is killed later must not forget the rollback.
        saver.save(step, again=True)
        return step
