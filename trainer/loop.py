"""The inner loop: many steps in one graph call, with nothing for the host to do in between."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from trainer.report import StepReport


def run_steps(
    train_step: Callable[[Any], StepReport], iterator: Iterator[Any], num_steps: tf.Tensor
) -> StepReport:
    """Takes steps on the next batches. Trace it in a `tf.function`, in cross-replica context.

    Args:
        train_step: takes a global batch, attempts an update, and reports.
        iterator: over global batches; it must not end within these steps.
        num_steps: shape (), int32: a tensor, since a Python number would retrace.

    Returns:
        The reports of all the steps, each field with one more dimension: (num_steps, ...).
    """
    fields = [
        tf.TensorArray(dtype, num_steps)
        for dtype in StepReport(
            step=tf.int64,
            loss=tf.float32,
            regularization_loss=tf.float32,
            gradient_norm=tf.float32,
            loss_scale=tf.float32,
            grads_finite=tf.bool,
            cause=tf.int32,
            examples=tf.int64,
            max_magnitude=tf.float32,
            magnitude_counts=tf.float32,
        )
    ]

    def body(index: tf.Tensor, fields: list[tf.TensorArray]) -> tuple:
        report = train_step(next(iterator))
        written = [field.write(index, value) for field, value in zip(fields, report, strict=True)]
        return index + 1, written

    _, fields = tf.while_loop(
        lambda index, _: index < num_steps, body, (tf.constant(0), fields), parallel_iterations=1
    )
    return StepReport(*(field.stack() for field in fields))


def next_stop(step: int, target: int, steps_per_loop: int, intervals: Iterable[int | None]) -> int:
    """Returns the step at which the next inner loop ends.

    Args:
        step: where it begins.
        target: the last step of all.
        steps_per_loop: the most steps it may take.
        intervals: it ends at every multiple of these, if it meets one; None has none.

    Example:
        >>> next_stop(10, target=1000, steps_per_loop=100, intervals=[None, 25])
        25
    """
    multiples = [(step // interval + 1) * interval for interval in intervals if interval]
    return min([step + steps_per_loop, target, *multiples])


def crossed(interval: int | None, before: int, step: int) -> bool:
    """Returns whether a multiple of `interval` lies in (before, step].

    Example:
        >>> crossed(25, 20, 30), crossed(25, 30, 40), crossed(None, 0, 100)
        (True, False, False)
    """
    return interval is not None and step // interval > before // interval
