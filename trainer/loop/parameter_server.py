"""The inner loop where workers take steps without waiting for each other."""

import collections
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.step.report import StepReport

# How many batches may wait at each worker, so that it has the next one when it has done a step.
AHEAD = 2


class RemoteSteps:
    """Takes steps on the workers of a parameter-server job, in place of `loop.run_steps`.

    The chief reads the data, so that each batch is used once, whichever worker takes it, and
    its place in the data can be saved; a step whose worker ends is given to another. It returns
    when all of the steps it was asked for are done: then nothing moves, and a checkpoint, or an
    evaluation, sees one state.

    Args:
        train_step: takes a global batch, attempts an update, and reports.
        strategy: a `tf.distribute.ParameterServerStrategy`.
        halted: shape (), bool: true when the run must not go on.
        stop: the same: somebody has asked the run to end.
        outcomes: counts of steps; their sum is how many there were.
    """

    def __init__(
        self,
        train_step: Callable[[Any], StepReport],
        strategy: tf.distribute.Strategy,
        halted: tf.Variable,
        stop: tf.Variable,
        outcomes: tf.Variable,
    ) -> None:
        """Finds the workers; they are waited for when there is something to do."""
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        names = [device.name for device in tf.config.list_logical_devices("CPU")]
        self._most = AHEAD * sum("/job:worker/" in name for name in names)
        self._halted, self._stop, self._outcomes = halted, stop, outcomes
        self._step = tf.function(train_step)

    def __call__(self, iterator: Any, num_steps: tf.Tensor) -> tuple[StepReport, tuple[()]]:
        """Takes steps on the next batches.

        Args:
            iterator: of a `tf.data.Dataset` of global batches.
            num_steps: how many: shape (), int32.

        Returns:
            The reports, in the order of the batches, each field (steps, ...).
        """
        before = int(tf.reduce_sum(self._outcomes))
        waiting: collections.deque[Any] = collections.deque()
        reports: list[StepReport] = []
        waits: list[float] = []
        for _ in range(int(num_steps)):
            if self._stop.numpy() or (reports and self._halted.numpy()):
                break
            asked = time.perf_counter()
            batch = next(iterator)
            waits.append(time.perf_counter() - asked)
            waiting.append(self._coordinator.schedule(self._step, args=(batch,)))
            while len(waiting) > self._most:
                reports.append(waiting.popleft().fetch())
        reports += [step.fetch() for step in waiting]
        fields = [tf.constant(np.stack(field)) for field in zip(*reports, strict=True)]
        # The count on the server, which each has read, moved on meanwhile.
        numbers = tf.range(before + 1, before + 1 + len(reports), dtype=tf.int64)
        known = {"step": numbers, "data_wait_secs": tf.constant(waits, tf.float32)}
        return StepReport(*fields)._replace(**known), ()
