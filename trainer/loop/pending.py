"""The reports of a running inner loop, in variables: they are there even if the loop fails."""

import tensorflow as tf

from trainer.step.report import StepReport, bits_of, packed, report_spec, unpacked

HOST = "CPU:0"


class Pending:
    """The reports of a running inner loop.

    The reports are kept where they are computed: the host would have to wait for each step to copy
    its report from an accelerator. Everything else is in plain variables on the host. Create them
    outside the strategy's scope.

    Args:
        recorded: number of variables whose gradient magnitudes are counted; 0 counts none.
        float8: number of float8 tensors.
        device: where the steps compute their reports.
    """

    def __init__(self, recorded: int = 0, float8: int = 0, *, device: str = HOST) -> None:
        """Creates the variables; no report is kept yet."""
        self._specs = report_spec(recorded, float8)
        self._device = device
        self._width = int(packed(zeros(self._specs), self._specs).shape[0])
        with tf.device(device):
            self._rows = rows_variable(tf.int64, self._width, name="reports")
        with tf.device(HOST):
            self._waits = rows_variable(tf.float64, name="waits")

    def begin(self, num_steps: tf.Tensor) -> None:
        """Forgets the last loop's reports, and makes room for those of `num_steps` steps."""
        with tf.device(self._device):
            self._rows.assign(tf.zeros([num_steps, self._width], tf.int64))
        with tf.device(HOST):
            self._waits.assign(tf.zeros([num_steps], tf.float64))

    def write(
        self, index: tf.Tensor, following: tf.Tensor, report: StepReport, waited: tf.Tensor
    ) -> None:
        """Keeps a step's report.

        Args:
            index: number of steps that the loop took before: shape (1,), int32.
            following: the same number after this step: shape (1,), int32.
            report: the report, each field of shape ().
            waited: the seconds spent waiting for the step's batch: shape (), float64.

        Raises:
            ValueError: if a field has another dtype or shape than in the step's own report.
        """
        with tf.device(self._device):
            assign_row(self._rows, index, following, bits_of(report, self._specs))
        with tf.device(HOST):
            assign_row(self._waits, index, following, waited)

    def read(self, count: int | tf.Tensor) -> StepReport:
        """Returns the reports of the loop's first steps, each field with shape (count, ...)."""
        with tf.device(HOST):
            rows = tf.identity(self._rows.read_value())
            reports = unpacked(rows[:count], self._specs)
            waits = tf.cast(self._waits.read_value()[:count], tf.float32)
            return reports._replace(data_wait_secs=waits)


def rows_variable(dtype: tf.DType, *shape: int, name: str) -> tf.Variable:
    """Returns a variable of any number of rows, of which it has none yet."""
    none = tf.zeros([0, *shape], dtype)
    return tf.Variable(none, trainable=False, shape=[None, *shape], name=name)


def assign_row(rows: tf.Variable, index: tf.Tensor, following: tf.Tensor, value: tf.Tensor) -> None:
    """Assigns one row of a variable, as `rows[index].assign(value)` does, in a single operation.

    Args:
        rows: the variable.
        index: which row: shape (1,), int32.
        following: the number after it: shape (1,), int32.
        value: the row.
    """
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=rows.handle, begin=index, end=following, strides=[1], value=value, shrink_axis_mask=1
    )


def zeros(specs: StepReport) -> StepReport:
    """Returns zeros that match the specs of a report."""
    return StepReport(*(tf.zeros(spec.shape, spec.dtype) for spec in specs))
