"""The inner loop: many steps in one graph call, with nothing for the host to do in between."""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from trainer.base.autograph import call_user
from trainer.step.report import StepReport, report_spec


def run_steps(
    train_step: Callable[[Any], StepReport],
    halted: tf.Variable,
    stop_asked: Callable[[], tf.Tensor],
    iterator: Any,
    num_steps: tf.Tensor,
    *,
    recorded: int = 0,
    keep_overflows: bool = False,
) -> tuple[StepReport, Any]:
    """Takes steps on the next batches. Trace it in a `tf.function`, in cross-replica context.

    Args:
        train_step: takes a global batch, attempts an update, and reports.
        halted: shape (), bool: no step is taken while it is true: the run must not go on.
        stop_asked: returns shape (), bool: whether somebody has asked the run to end, maybe from
            another thread; the same on every worker.
        iterator: of a `tf.data.Dataset` of global batches; it must not end within these steps.
        num_steps: shape (), int32: a tensor, since a Python number would retrace.
        recorded: the variables whose gradients' magnitudes are counted.
        keep_overflows: whether to end early at the first skip of a row, and to bring its batch
            back: the weights are still that step's.

    Returns:
        The reports of the steps taken, each field with one more dimension: (steps, ...); and the
        last batch, or () if it is not to be kept.
    """
    specs = report_spec(recorded)
    fields = [
        tf.TensorArray(spec.dtype, 0, dynamic_size=True, element_shape=spec.shape) for spec in specs
    ]
    batch_spec = iterator.element_spec if keep_overflows else ()
    no_batch = tf.nest.map_structure(empty, batch_spec)

    def body(index: tf.Tensor, going: tf.Tensor, batch: Any, fields: list[tf.TensorArray]) -> tuple:
        del going
        batch, waited = timed_next(iterator)
        report = call_user(train_step, batch)._replace(data_wait_secs=waited)
        written = [field.write(index, value) for field, value in zip(fields, report, strict=True)]
        going = ~(halted.read_value() | stop_asked())
        if keep_overflows:
            going &= report.consecutive_skips != 1
        return index + 1, going, batch if keep_overflows else (), written

    _, _, batch, fields = tf.while_loop(
        lambda index, going, *_: going & (index < num_steps),
        body,
        (tf.constant(0), ~(halted.read_value() | stop_asked()), no_batch, fields),
        shape_invariants=(
            tf.TensorShape([]),
            tf.TensorShape([]),
            tf.nest.map_structure(lambda spec: spec.shape, batch_spec),
            [tf.TensorShape(None) for _ in fields],
        ),
        parallel_iterations=1,
    )
    return StepReport(*(field.stack() for field in fields)), batch


def timed_next(iterator: Any) -> tuple[Any, tf.Tensor]:
    """Returns the next batch, and the seconds it was waited for: shape (), float32."""
    asked = tf.timestamp()
    with tf.control_dependencies([asked]):
        batch = next(iterator)
    with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
        return batch, tf.cast(tf.timestamp() - asked, tf.float32)


def empty(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns a tensor that a spec fits: 0 where it leaves a dimension open."""
    return tf.zeros([dimension or 0 for dimension in spec.shape], spec.dtype)


def next_stop(
    step: int,
    target: int,
    steps_per_loop: int,
    intervals: Iterable[int | None],
    marks: Iterable[int] = (),
) -> int:
    """Returns the step at which the next inner loop ends.

    Args:
        step: where it begins.
        target: the last step of all.
        steps_per_loop: the most steps it may take.
        intervals: it ends at every multiple of these, if it meets one; None has none.
        marks: and at each of these steps.

    Example:
        >>> next_stop(10, target=1000, steps_per_loop=100, intervals=[None, 25])
        25
    """
    multiples = [(step // interval + 1) * interval for interval in intervals if interval]
    ahead = [mark for mark in marks if mark > step]
    return min([step + steps_per_loop, target, *multiples, *ahead])


def crossed(interval: int | None, before: int, step: int) -> bool:
    """Returns whether a multiple of `interval` lies in (before, step].

    Example:
        >>> crossed(25, 20, 30), crossed(25, 30, 40), crossed(None, 0, 100)
        (True, False, False)
    """
    return interval is not None and step // interval > before // interval
