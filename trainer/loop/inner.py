"""The inner loop: many steps in one graph call, without any work on the host in between."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer.base.autograph import call_user
from trainer.loop.pending import HOST, Pending
from trainer.step.report import StepReport

LONGEST_LOOP = 10_000  # steps; when a loop begins, it makes room for the reports of all its steps


def run_steps(
    train_step: Callable[[Any], StepReport],
    halted: tf.Variable,
    stop_requested: Callable[[], tf.Tensor],
    pending: Pending,
    iterator: tf.data.Iterator,
    num_steps: tf.Tensor,
    *,
    keep_overflows: bool = False,
) -> tuple[StepReport, Any]:
    """Takes up to `num_steps` steps. Trace it in a `tf.function`, in cross-replica context.

    The loop ends before `num_steps` when the run is halted or asked to stop.

    Args:
        train_step: takes a global batch, attempts an update, and returns a report.
        halted: shape (), bool: whether the run must stop. If it is true, no step is taken.
        stop_requested: returns whether the run was asked to stop, possibly from another thread:
            shape (), bool. It must return the same value on every worker.
        pending: keeps the reports of the steps while the loop runs.
        iterator: an iterator over a `tf.data.Dataset` of global batches, with at least
            `num_steps` batches left.
        num_steps: the maximum number of steps: shape (), int32. It is a tensor because a Python
            number would cause a retrace.
        keep_overflows: whether to end after the first of several consecutive skips and return the
            skipped batch, while the weights are still those that the step used.

    Returns:
        The reports of the steps, each field with shape (steps, ...); and the last batch, or ()
        without `keep_overflows`.
    """
    batch_spec = iterator.element_spec if keep_overflows else ()
    no_batch = tf.nest.map_structure(zeros_of, batch_spec)

    def limit_unless_ended() -> tf.Tensor:
        goes_on = ~(halted.read_value() | stop_requested())
        return num_steps * tf.cast(goes_on, tf.int32, name="goes_on")

    def body(index: tf.Tensor, limit: tf.Tensor, kept: Any) -> tuple[tf.Tensor, tf.Tensor, Any]:
        del limit, kept
        following = index + 1
        batch, waited = timed_next(iterator)
        report = call_user(train_step, batch)
        pending.write(index, following, report, waited)
        limit = limit_unless_ended()
        if not keep_overflows:
            return following, limit, ()
        return following, tf.where(report.consecutive_skips == 1, 0, limit), batch

    # The loop goes on by two int32 numbers, which TensorFlow keeps on the host if there is a GPU.
    # The index has shape (1,), which the operation that assigns a row of a variable takes.
    pending.begin(num_steps)
    taken, _, kept = tf.while_loop(
        lambda index, limit, _: tf.reshape(index, []) < limit,
        body,
        (tf.constant([0]), limit_unless_ended(), no_batch),
        shape_invariants=(
            tf.TensorShape([1]),
            tf.TensorShape([]),
            tf.nest.map_structure(invariant_of, batch_spec),
        ),
        parallel_iterations=1,
    )
    return pending.read(taken[0]), kept


def run_batch(
    train_step: Callable[[Any], StepReport],
    results: Callable[[], Any],
    batch: Any,
    waited: tf.Tensor,
) -> tuple[StepReport, Any]:
    """Takes one step with a given batch. Trace it in a `tf.function`, in cross-replica context.

    Args:
        train_step: as for `run_steps`.
        results: called after the step.
        batch: the global batch.
        waited: the seconds spent waiting for the batch: shape (), float32.

    Returns:
        The report of the step, each field with shape (1, ...); and what `results` returns.
    """
    report = call_user(train_step, batch)._replace(data_wait_secs=waited)
    return StepReport(*(tf.expand_dims(field, 0) for field in report)), results()


def timed_next(iterator: tf.data.Iterator) -> tuple[Any, tf.Tensor]:
    """Returns the next batch, and the seconds spent waiting for it: shape (), float64.

    Under `tf.config.experimental.enable_op_determinism()`, nothing is timed and the seconds are 0.
    """
    if not clock_allowed():
        return next(iterator), tf.constant(0.0, tf.float64)
    start = tf.timestamp()
    with tf.control_dependencies([start]):
        batch = next(iterator)
    with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)), tf.device(HOST):
        return batch, tf.timestamp() - start


def clock_allowed() -> bool:
    """Returns whether TensorFlow lets a graph read the clock.

    Under `enable_op_determinism()` it does not, because the time differs from run to run. No public
    function says whether that mode is on, so the clock is read once, outside the graph.
    """
    try:
        with tf.init_scope():
            tf.timestamp()
    except tf.errors.FailedPreconditionError:
        return False
    return True


def zeros_of(spec: tf.TypeSpec) -> Any:
    """Returns zeros that match a spec; dimensions of unknown size get size 0.

    Args:
        spec: of a dense, ragged or sparse tensor. The latter two have no values.
    """
    shape = [dimension or 0 for dimension in spec.shape]
    if isinstance(spec, tf.SparseTensorSpec):
        indices = tf.zeros([0, len(shape)], tf.int64)
        return tf.SparseTensor(indices, tf.zeros([0], spec.dtype), tf.constant(shape, tf.int64))
    if not isinstance(spec, tf.RaggedTensorSpec):
        return tf.zeros(shape, spec.dtype)
    sizes = [shape[0] + 1, *[1] * (spec.ragged_rank - 1)]
    splits = [tf.zeros([size], spec.row_splits_dtype) for size in sizes]
    values = tf.zeros([0, *shape[spec.ragged_rank + 1 :]], spec.dtype)
    return tf.RaggedTensor.from_nested_row_splits(values, splits)


def invariant_of(spec: tf.TypeSpec) -> tf.TensorShape | tf.TypeSpec:
    """Returns what `tf.while_loop` needs to know of a batch's component; see `zeros_of`."""
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None] * spec.shape.rank, spec.dtype)
    return spec if isinstance(spec, tf.RaggedTensorSpec) else spec.shape


def next_multiple(interval: int | None, step: int, start: int = 0) -> int | None:
    """Returns the first step after `step` that is a whole number of intervals after `start`.

    Returns None without an interval.

    Example:
        >>> next_multiple(25, 25), next_multiple(25, 26, start=10), next_multiple(None, 0)
        (50, 35, None)
    """
    return interval and step + interval - (step - start) % interval
