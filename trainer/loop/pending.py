"""What another thread can learn of a running inner loop, and how it keeps the loop from a step.

An inner loop is one graph call, which may wait for data without end. While it waits, the variables
are those behind its last step. So the run can be saved, if two things are known or certain: the
reports of the steps that the loop has taken, which it returns at its end only; and that no step
begins while the variables are read. This file provides both.
"""

from typing import Any

import tensorflow as tf

from trainer.step.report import StepReport, report_spec

HELD = "the run has been left while it waited for data"  # the error of a loop that is held back
FIRST_ROWS = 256  # steps whose reports are kept before the variable grows


class Pending:
    """The reports of a running inner loop, and a gate between its batches and its steps.

    The variables are plain ones on the host. Create them outside the strategy's scope.

    Args:
        recorded: number of variables whose gradient magnitudes are counted; 0 counts none.
        float8: number of float8 tensors.
    """

    def __init__(self, recorded: int = 0, float8: int = 0) -> None:
        """Creates the variables; no report is kept yet, and the gate is open."""
        self._specs = report_spec(recorded, float8)
        self._width = int(packed(zeros(self._specs)).shape[0])
        with tf.device("CPU:0"):
            self._rows = tf.Variable(
                tf.zeros([0, self._width], tf.int32),
                trainable=False,
                shape=[None, self._width],
                name="reports",
            )
            self._waiting = tf.Variable(initial_value=False, trainable=False, name="waiting")
            self._held = tf.Variable(initial_value=False, trainable=False, name="held")

    def begin(self, num_steps: tf.Tensor) -> tf.Tensor:
        """Forgets the last loop's reports. Returns how many the variable holds: shape (), int32."""
        rows = tf.minimum(num_steps, FIRST_ROWS)
        self._rows.assign(tf.zeros([rows, self._width], tf.int32))
        return rows

    def wait(self) -> tf.Operation:
        """Notes that the loop waits for a batch from here on."""
        return self._waiting.assign(value=True, read_value=False)

    def arrived(self) -> tf.Operation:
        """Notes that the batch is there. Fails if `hold` has been called: no step may begin."""
        with tf.control_dependencies([self._waiting.assign(value=False, read_value=False)]):
            is_open = ~self._held.read_value()
        return tf.debugging.Assert(is_open, [HELD])

    def write(self, index: tf.Tensor, report: StepReport, rows: tf.Tensor) -> tf.Tensor:
        """Keeps a step's report.

        Args:
            index: number of steps that the loop took before: shape (), int32.
            report: the report, each field of shape ().
            rows: how many reports the variable holds: shape (), int32.

        Returns:
            The same as `rows`, or twice as many after it has grown.
        """

        def grow() -> tf.Tensor:
            more = tf.zeros([rows, self._width], tf.int32)
            self._rows.assign(tf.concat([self._rows.read_value(), more], axis=0))
            return rows * 2

        rows = tf.cond(index < rows, lambda: rows, grow)
        with tf.control_dependencies([rows]):
            self._rows.scatter_update(tf.IndexedSlices(packed(report)[None], index[None]))
        return rows

    def read(self, count: int | tf.Tensor) -> StepReport:
        """Returns the reports of the loop's first steps, each field with shape (count, ...)."""
        return unpacked(self._rows.read_value()[:count], self._specs)

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


def zeros(specs: StepReport) -> StepReport:
    """Returns zeros that match the specs of a report."""
    return StepReport(*(tf.zeros(spec.shape, spec.dtype) for spec in specs))


def packed(report: StepReport) -> tf.Tensor:
    """Returns the bits of a step's report: shape (width,), int32."""
    parts = []
    for dtype, names in by_dtype(report).items():
        numbers = tf.stack([getattr(report, name) for name in names])
        parts.append(as_int32(numbers, dtype))
    vectors = [field for field in report if field.shape.rank]
    return tf.concat([*parts, *(as_int32(each, each.dtype) for each in vectors)], axis=0)


def as_int32(numbers: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the bits of a vector as a vector."""
    if dtype == tf.bool:
        return tf.cast(numbers, tf.int32)
    return numbers if dtype == tf.int32 else tf.reshape(tf.bitcast(numbers, tf.int32), [-1])


def unpacked(rows: tf.Tensor, specs: StepReport) -> StepReport:
    """Returns the reports whose bits `packed` has returned.

    Args:
        rows: shape (steps, width), int32.
        specs: the specs of a report.
    """
    fields: dict[str, tf.Tensor] = {}
    start = 0
    for dtype, names in by_dtype(specs).items():
        width = len(names) * dtype.size // 4 if dtype != tf.bool else len(names)
        numbers = from_int32(rows[:, start : start + width], dtype)
        fields |= dict(zip(names, tf.unstack(numbers, num=len(names), axis=1), strict=True))
        start += width
    for name, spec in specs._asdict().items():
        if spec.shape.rank:
            width = spec.shape[0] * spec.dtype.size // 4
            fields[name] = from_int32(rows[:, start : start + width], spec.dtype)
            start += width
    return StepReport(**fields)


def from_int32(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the numbers in the rows of a matrix of bits."""
    if dtype == tf.bool:
        return bits > 0
    if dtype.size == 8:  # two at a time
        bits = tf.reshape(bits, [tf.shape(bits)[0], bits.shape[1] // 2, 2])
    return bits if dtype == tf.int32 else tf.bitcast(bits, dtype)


def by_dtype(report: Any) -> dict[tf.DType, list[str]]:
    """Returns the names of a report's fields of shape (), keyed by dtype."""
    found: dict[tf.DType, list[str]] = {}
    for name, field in report._asdict().items():
        if not field.shape.rank:
            found.setdefault(field.dtype, []).append(name)
    return found
