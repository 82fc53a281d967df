"""Checks the values of every batch, for `check_data=True`: in the graph, before the step."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from trainer.base.autograph import call_user, without_autograph

MARK = "check_data"  # by which an error of these checks is recognised
FAILED = re.compile(rf"\[{MARK}: (.*?)\]((?: \[[^\]]*\])*)")


class LabelRange(NamedTuple):
    """The labels that one loss can take."""

    name: str  # of the labels, for errors
    labels: tf.Tensor
    low: int
    high: int
    ignored: int | None  # a label outside of the range that does not count


def checked(
    step: Callable[[Any], Any],
    weights: Callable[[Any], tf.Tensor],
    ranges: Callable[[Any], Sequence[LabelRange]],
) -> Callable[[Any], Any]:
    """Returns a step that raises InvalidArgumentError for a batch with wrong values.

    No variable is changed before the batch is known to be right.

    Args:
        step: takes a global batch.
        weights: returns the weights of a batch's examples.
        ranges: returns the ranges of a batch's labels.
    """

    @without_autograph
    def check_and_step(batch: Any) -> Any:
        own = {"example_weights": tf.convert_to_tensor(call_user(weights, batch))}
        with tf.control_dependencies([*finite(batch), *finite(own), *map(in_range, ranges(batch))]):
            return step(tf.nest.map_structure(tf.identity, batch, expand_composites=True))

    return check_and_step


def finite(batch: Any) -> list[tf.Operation]:
    """Checks that the floating-point tensors of a batch hold neither inf nor NaN."""
    checks = []
    for path, leaf in keras.tree.flatten_with_path(batch):
        for values in tf.nest.flatten(leaf, expand_composites=True):
            if values.dtype.is_floating or values.dtype.is_complex:
                right = tf.reduce_all(tf.math.is_finite(tf.abs(values)))
                checks.append(check(right, f"finite numbers in {place(path)}; got inf or NaN"))
    return checks


def in_range(labels: LabelRange) -> tf.Operation:
    """Checks that labels are in their range."""
    values = tf.nest.flatten(labels.labels, expand_composites=True)[0]
    # A bound such as 999 need not be a number of the labels' own dtype, such as uint8.
    values = tf.cast(values, tf.int64 if values.dtype.is_integer else tf.float64)
    if labels.ignored is not None:
        values = tf.where(values == labels.ignored, tf.cast(labels.low, values.dtype), values)
    least, most = tf.reduce_min(values), tf.reduce_max(values)
    right = (tf.size(values) == 0) | ((least >= labels.low) & (most <= labels.high))
    wanted = f"{labels.name} from {labels.low} to {labels.high}; got a smallest and a largest of"
    return check(right, wanted, least, most)


def check(right: tf.Tensor, wanted: str, *found: tf.Tensor) -> tf.Operation:
    """Returns an operation that fails if a condition is false.

    Args:
        right: shape (), bool.
        wanted: what the data must hold, and "got".
        *found: numbers that were found instead, each of shape ().
    """
    with tf.device("CPU:0"):  # where an error can name what was found
        data = [tf.constant(f"{MARK}: {wanted}"), *found]
        return tf.raw_ops.Assert(condition=right, data=data)


def place(path: Sequence[Any]) -> str:
    """Returns how an error names a part of a batch.

    Example:
        >>> place((0, "image")), place(())
        ('part 0/image of the batch', 'the batch')
    """
    return f"part {'/'.join(map(str, path))} of the batch" if path else "the batch"


def found_in(message: str) -> str | None:
    """Returns what is wrong with a batch, as text; None if another operation failed.

    Args:
        message: of an error that a step raised.

    Example:
        >>> found_in("assertion failed: [check_data: labels of at least 0; got] [-1]")
        'labels of at least 0; got -1'
    """
    failed = FAILED.search(message)
    if failed is None:
        return None
    numbers = re.findall(r"\[([^\]]*)\]", failed[2])
    return f"{failed[1]} {' and '.join(numbers)}".rstrip()
