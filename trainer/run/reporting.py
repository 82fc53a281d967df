"""Reads what steps reported: ends a run that is stuck, notices divergence, writes the log."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from trainer.checkpoint import CheckpointError
from trainer.data.errors import reason_of
from trainer.log.run_log import RunLog
from trainer.log.summary import Totals
from trainer.monitor.divergence import Detection, LossWatch
from trainer.monitor.stuck import TrainingStuckError, check_not_stuck
from trainer.run.protocol import Parts, RunnableTrainer


class Reporter:
    """Reads the reports that the inner loops leave in the log.

    Args:
        trainer: a trainer that has started.
        parts: what it works with.
        log: the run's.
        watch: what looks for divergence, or None.
        target: the step to reach.
    """

    def __init__(
        self,
        trainer: RunnableTrainer,
        parts: Parts,
        log: RunLog,
        watch: LossWatch | None,
        target: int,
    ) -> None:
        """Reads nothing yet."""
        self._trainer = trainer
        self._parts = parts
        self._log = log
        self._watch = watch
        self._target = target
        self._divergence: Detection | None = None  # found, and nothing done about it yet

    @property
    def diverged(self) -> bool:
        """Whether a divergence was found about which nothing has been done yet."""
        return self._divergence is not None

    def take_divergence(self) -> Detection | None:
        """Returns the divergence that was found, and forgets it; None if there is none."""
        divergence, self._divergence = self._divergence, None
        return divergence

    def read(self) -> None:
        """Reads the reports of the steps since the last time, and examines them.

        Raises:
            TrainingStuckError: if the run must not go on.
        """
        with self.writing():
            steps = self._log.read()
        if steps is None:
            return
        record = self._parts.recorder.latest if self._parts.recorder else None
        names = self._parts.plan.variable_names
        try:
            check_not_stuck(steps, self._trainer.skip_policy, names, record)
        except TrainingStuckError:
            self.write()
            raise
        if self._watch and not self._divergence:
            self._divergence = self._watch.detect(steps)

    def write(self) -> None:
        """Writes a log line about the steps since the last one, if there are any."""
        if not self._log.pending:
            return
        metrics = self._trainer.metrics
        values = {name: float(metric.result()) for name, metric in metrics.items()}
        with self.writing():
            self._log.flush(self._target, Totals.from_state(self._parts.state), values)
        for metric in metrics.values():
            metric.reset_state()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Within, an error of the file system becomes a CheckpointError that names the folder."""
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            raise CheckpointError(
                f"The log in {self._trainer.model_dir} could not be written: "
                f"{reason_of(str(error))}. Everything up to the last checkpoint is safe. Free some "
                "space or fix the permissions, then run the same command again."
            ) from error
