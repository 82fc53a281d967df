"""The inner loop for parameter servers, whose workers do not wait for each other."""

import collections
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from trainer.step.report import StepReport

# Batches queued per worker, so that a worker has the next one as soon as it finishes a step.
QUEUED_PER_WORKER = 2


class RemoteReport(Protocol):
    """A scheduled step: a `tf.distribute.experimental.coordinator.RemoteValue`."""

    def fetch(self) -> StepReport:
        """Waits for the step and returns its report as NumPy arrays."""


class RemoteSteps:
    """Runs steps on the workers of a parameter-server job; replaces `inner.run_steps`.

    The chief reads the data and schedules one step per batch. So each batch is used once, by
    whichever worker is free, and the position in the data can be saved. If a worker is lost, its
    step is scheduled on another one. A call returns when all of its steps are done, so a checkpoint
    or an evaluation between two calls sees a consistent state.

    Args:
        train_step: takes a global batch, attempts an update, and returns a report.
        strategy: a `tf.distribute.ParameterServerStrategy`.
        halted: shape (), bool: whether the run must stop.
        stop: shape (), bool: whether the run was asked to stop.
        outcomes: integer counts of steps by outcome; their sum is the number of attempted steps.
    """

    def __init__(
        self,
        train_step: Callable[[Any], StepReport],
        strategy: tf.distribute.Strategy,
        halted: tf.Variable,
        stop: tf.Variable,
        outcomes: tf.Variable,
    ) -> None:
        """Connects to the workers. The first call waits until they are ready."""
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        names = [device.name for device in tf.config.list_logical_devices("CPU")]
        self._max_queued = QUEUED_PER_WORKER * sum("/job:worker/" in name for name in names)
        self._halted, self._stop, self._outcomes = halted, stop, outcomes
        self._step = tf.function(train_step)

    def __call__(
        self, iterator: tf.data.Iterator, num_steps: tf.Tensor
    ) -> tuple[StepReport, tuple[()]]:
        """Takes one step on each of the next batches.

        The call ends early if the run is halted or asked to stop.

        Args:
            iterator: an iterator over a `tf.data.Dataset` of global batches.
            num_steps: the maximum number of steps: shape (), int32.

        Returns:
            The reports in the order of the batches, each field with shape (steps, ...); and () in
            place of a skipped batch, because none is kept.
        """
        before = int(tf.reduce_sum(self._outcomes))
        scheduled: collections.deque[RemoteReport] = collections.deque()
        reports: list[StepReport] = []
        waits: list[float] = []
        for _ in range(int(num_steps)):
            if self._stop.numpy() or (reports and self._halted.numpy()):
                break
            start = time.perf_counter()
            batch = next(iterator)
            waits.append(time.perf_counter() - start)
            scheduled.append(self._coordinator.schedule(self._step, args=(batch,)))
            while len(scheduled) > self._max_queued:
                reports.append(scheduled.popleft().fetch())
        reports += [step.fetch() for step in scheduled]
        fields = [tf.constant(np.stack(field)) for field in zip(*reports, strict=True)]
        # Number the steps by batch: they finish in any order, so a worker's own count may differ.
        numbers = tf.range(before + 1, before + 1 + len(reports), dtype=tf.int64)
        waited = tf.constant(waits, tf.float32)
        return StepReport(*fields)._replace(step=numbers, data_wait_secs=waited), ()
