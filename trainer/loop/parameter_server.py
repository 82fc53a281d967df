"""The inner loop for parameter servers, whose workers do not wait for each other."""

import collections
import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

import scaling
from trainer.step.plan import StepPlan
from trainer.step.report import StepReport, report_spec
from trainer.step.state import TrainState

# Batches queued per worker, so that a worker has the next one as soon as it finishes a step.
QUEUED_PER_WORKER = 2
# What a lost server, worker or call raises: there may be nothing left to wait for.
LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)


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
        plan: the constants of the step.
        run: the run's step counts.
        stop: shape (), bool: whether the run was asked to stop.
    """

    def __init__(
        self,
        train_step: Callable[[Any], StepReport],
        plan: StepPlan,
        run: TrainState,
        stop: tf.Variable,
    ) -> None:
        """Connects to the workers. The first call waits until they are ready."""
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(plan.strategy)
        names = [device.name for device in tf.config.list_logical_devices("CPU")]
        self._max_queued = QUEUED_PER_WORKER * sum("/job:worker/" in name for name in names)
        self._plan, self._run, self._stop = plan, run, stop
        self._step = tf.function(train_step)
        self._scheduled: collections.deque[RemoteReport] = collections.deque()
        self._before = 0  # steps attempted before this call
        self._reports: list[StepReport] = []  # of this call's steps, in the order of the batches
        self._waits: list[float] = []  # seconds spent waiting for each batch
        # Skips in a row, in the order of the batches. Workers count them in the order in which they
        # finish, and may overwrite each other's counts.
        self._skips = 0
        self._halted = False

    def __call__(
        self, iterator: tf.data.Iterator, num_steps: tf.Tensor
    ) -> tuple[StepReport, tuple[()]]:
        """Takes one step on each of the next batches.

        The call ends early if the run is asked to stop, or if it must not continue. The steps that
        are scheduled by then are taken.

        Args:
            iterator: an iterator over a `tf.data.Dataset` of global batches.
            num_steps: the maximum number of steps: shape (), int32.

        Returns:
            The reports in the order of the batches, each field with shape (steps, ...); and () in
            place of a skipped batch, because none is kept.
        """
        self._before, self._skips = int(self._run.step), int(self._run.consecutive_skips)
        self._halted = False
        self._scheduled.clear()
        self._reports.clear()
        self._waits.clear()
        try:
            self._take(iterator, int(num_steps))
        except LOST:
            raise
        except tf.errors.OpError:
            self._forget()
            raise
        return self.read(len(self._reports)), ()

    def _take(self, iterator: tf.data.Iterator, num_steps: int) -> None:
        """Schedules the steps, and waits for them."""
        for _ in range(num_steps):
            if self._stop.numpy() or self._halted:
                break
            start = time.perf_counter()
            batch = next(iterator)
            self._waits.append(time.perf_counter() - start)
            self._scheduled.append(self._coordinator.schedule(self._step, args=(batch,)))
            while len(self._scheduled) > self._max_queued:
                self._fetch()
        self._finish()

    def _fetch(self) -> None:
        """Waits for the first step that is scheduled, and judges whether the run may go on."""
        report = self._scheduled.popleft().fetch()
        self._skips = 0 if report.grads_finite else self._skips + 1
        self._halted |= self._skips >= self._plan.skips.max_skips
        self._halted |= scaling.Cause(int(report.cause)) in self._plan.skips.halting_causes
        self._reports.append(report._replace(consecutive_skips=np.int64(self._skips)))

    def _forget(self) -> None:
        """Waits for what is scheduled and drops its errors, which the next call would raise."""
        self._scheduled.clear()
        with contextlib.suppress(tf.errors.OpError):
            self._coordinator.join()

    def _finish(self) -> None:
        """Waits for the steps that are scheduled."""
        while self._scheduled:
            self._fetch()
        self._run.consecutive_skips.assign(self._skips)

    def read(self, count: int) -> StepReport:
        """Returns the reports of the call's first steps, each field with shape (count, ...)."""
        if not count:
            return StepReport(*(tf.zeros([0, *spec.shape], spec.dtype) for spec in report_spec()))
        fields = zip(*self._reports[:count], strict=True)
        # Number the steps by batch: they finish in any order, so a worker's own count may differ.
        numbers = tf.range(self._before + 1, self._before + 1 + count, dtype=tf.int64)
        waited = tf.constant(self._waits[:count], tf.float32)
        reports = StepReport(*(tf.constant(np.stack(field)) for field in fields))
        return reports._replace(step=numbers, data_wait_secs=waited)
