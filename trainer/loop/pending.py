"""What another thread can learn of a running inner loop, and how it keeps the loop from a step.

An inner loop is one graph call, which may wait for data without end. While it waits, the variables
are those behind its last step. So the run can be saved, if two things are known or certain: the
reports of the steps that the loop has taken, which it returns at its end only; and that no step
begins while the variables are read. This file provides both.
"""

from typing import Any

import tensorflow as tf

from trainer.step.report import StepReport, report_spec
from trainer.step.report_bits import bits_of, packed, unpacked

HELD = "the run has been left while it waited for data"  # the error of a loop that is held back
FIRST_ROWS = 256  # steps whose reports are kept before the variables grow
HOST = "CPU:0"


class Pending:
    """The reports of a running inner loop, and a gate between its batches and its steps.

    The reports are kept where they are computed: the host would have to wait for each step to copy
    its report from an accelerator. Everything else is in plain variables on the host. Create them
    outside the strategy's scope.

    Args:
        recorded: number of variables whose gradient magnitudes are counted; 0 counts none.
        float8: number of float8 tensors.
        device: where the steps compute their reports.
    """

    def __init__(self, recorded: int = 0, float8: int = 0, *, device: str = HOST) -> None:
        """Creates the variables; no report is kept yet, and the gate is open."""
        self._specs = report_spec(recorded, float8)
        self._device = device
        self._width = int(packed(zeros(self._specs), self._specs).shape[0])
        with tf.device(device):
            self._rows = rows_variable(tf.int64, self._width, name="reports")
        with tf.device(HOST):
            self._waits = rows_variable(tf.float32, name="waits")
            self._waiting = tf.Variable(initial_value=False, trainable=False, name="waiting")
            self._held = tf.Variable(initial_value=False, trainable=False, name="held")

    def begin(self, num_steps: tf.Tensor) -> tf.Tensor:
        """Forgets the last loop's reports. Returns how many there is room for: shape (), int32."""
        room = tf.minimum(num_steps, FIRST_ROWS)
        with tf.device(self._device):
            self._rows.assign(tf.zeros([room, self._width], tf.int64))
        with tf.device(HOST):
            self._waits.assign(tf.zeros([room]))
        return room

    def wait(self) -> tf.Operation:
        """Notes that the loop waits for a batch from here on."""
        return self._waiting.assign(value=True, read_value=False)

    def arrived(self, batch: Any) -> tf.Operation:
        """Notes that the batch is there. Fails if `hold` has been called: no step may begin."""
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            arrived = self._waiting.assign(value=False, read_value=False)
        with tf.control_dependencies([arrived]), tf.device(HOST):
            return tf.debugging.Assert(~self._held.read_value(), [HELD])

    def write(
        self, index: tf.Tensor, report: StepReport, waited: tf.Tensor, room: tf.Tensor
    ) -> tf.Tensor:
        """Keeps a step's report.

        Args:
            index: number of steps that the loop took before: shape (), int32.
            report: the report, each field of shape ().
            waited: the seconds spent waiting for the step's batch: shape (), float32.
            room: how many reports there is room for: shape (), int32.

        Returns:
            The same as `room`, or twice as much after it was too little.

        Raises:
            ValueError: if a field has another dtype or shape than in the step's own report.
        """

        def grow() -> tf.Tensor:
            double(self._rows, self._device)
            double(self._waits, HOST)
            return room * 2

        room = tf.cond(index < room, lambda: room, grow)
        with tf.control_dependencies([room]):
            with tf.device(self._device):
                self._rows[index].assign(bits_of(report, self._specs))
            with tf.device(HOST):
                self._waits[index].assign(waited)
        return room

    def read(self, count: int | tf.Tensor) -> StepReport:
        """Returns the reports of the loop's first steps, each field with shape (count, ...)."""
        with tf.device(HOST):
            rows = tf.identity(self._rows.read_value())
            reports = unpacked(rows[:count], self._specs)
            return reports._replace(data_wait_secs=self._waits.read_value()[:count])

    def hold(self) -> bool:
        """Keeps the loop from its next step if it waits for a batch, and returns whether it does.

        Any thread may call it. If the batch arrives at this very moment, the loop may end with
        InvalidArgumentError although the answer is False.
        """
        # The loop sets `waiting` to False first and reads `held` afterwards; here the order is the
        # opposite one. So whichever comes first, the loop does not begin a step if this is True.
        self._held.assign(value=True)
        if self._waiting.numpy():
            return True
        self._held.assign(value=False)
        return False


def rows_variable(dtype: tf.DType, *shape: int, name: str) -> tf.Variable:
    """Returns a variable of any number of rows, of which it has none yet."""
    none = tf.zeros([0, *shape], dtype)
    return tf.Variable(none, trainable=False, shape=[None, *shape], name=name)


def double(rows: tf.Variable, device: str) -> None:
    """Appends as many rows of zeros as a variable has, which lies on the given device."""
    with tf.device(device):
        values = rows.read_value()
        rows.assign(tf.concat([values, tf.zeros_like(values)], axis=0))


def zeros(specs: StepReport) -> StepReport:
    """Returns zeros that match the specs of a report."""
    return StepReport(*(tf.zeros(spec.shape, spec.dtype) for spec in specs))
