"""Rolls a run that has diverged back to its last good checkpoint."""

from trainer.data.iterator_state import DataPosition
from trainer.log.run_log import RunLog
from trainer.log.summary import Totals
from trainer.monitor.divergence import Detection, Divergence, LossWatch, diverged_error
from trainer.run.protocol import Parts, RunnableTrainer
from trainer.run.reporting import Reporter
from trainer.run.saving import RunSaver


class Recovery:
    """Rolls a run back.

    Args:
        trainer: a trainer that has started.
        parts: what it works with.
        position: the position in its data.
        log: the run's.
        watch: what noticed the divergence.
        divergence: what counts as one, and how often a run may be rolled back.
    """

    def __init__(
        self,
        trainer: RunnableTrainer,
        parts: Parts,
        position: DataPosition,
        log: RunLog,
        watch: LossWatch,
        divergence: Divergence,
    ) -> None:
        """Rolls nothing back yet."""
        self._trainer = trainer
        self._parts = parts
        self._position = position
        self._log = log
        self._watch = watch
        self._divergence = divergence

    def roll_back(self, detection: Detection, reporter: Reporter, saver: RunSaver) -> int:
        """Restores the newest checkpoint from before a divergence; returns its step.

        Args:
            detection: the divergence.
            reporter: writes what happened up to it.
            saver: saves the run again once it is rolled back.

        Raises:
            DivergedError: if there is no such checkpoint, or the run was rolled back too often.
        """
        reporter.write()
        tries = self._watch.recoveries + 1
        checkpoints = self._parts.checkpoints
        with self._trainer.strategy.scope():
            path = checkpoints.restore(before=detection.first)
        if tries > self._divergence.max_recoveries or path is None:
            raise diverged_error(detection, self._watch.recoveries, path)
        step = Totals.from_state(self._parts.state).attempted
        self._position.read(path, checkpoints.facts["batches_taken"])
        batches_left_out = detection.last - step if self._divergence.skip_data else 0
        self._position.drop(batches_left_out)
        if checkpoints.facts["divergence"]:
            self._watch.set_state(checkpoints.facts["divergence"])
        self._watch.recoveries = tries
        # With the same random numbers and batches it would diverge again.
        self._parts.state.random_seed.assign_add(1)
        fields = {"what": detection.what, "restored": step, "batches_left_out": batches_left_out}
        with reporter.writing():
            self._log.log_event("recovery", detection.last, fields)
        self._log.say(f"diverged: {detection.what}; back to step {step}")
        self._trainer.on_recovery(detection.last, step)
        saver.save(step, again=True)  # or a run that is killed now would not know of the rollback
        return step
