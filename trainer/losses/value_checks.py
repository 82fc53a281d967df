"""Checks the values of every batch, for `check_data=True`: in the graph, before the step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from trainer.base.autograph import call_user, without_autograph
from trainer.data.errors import MARK
from trainer.losses.loss_fn import ignore_class_of
from trainer.losses.outputs import OutputLosses
from trainer.losses.shapes import LABELS_OF_LOSS, name_of

# What a batch must hold: whether it does, this in words, and numbers that were found instead.
Rule: TypeAlias = tuple[tf.Tensor, str, Sequence[tf.Tensor]]


def checked(
    step: Callable[[Any], Any],
    weights: Callable[[Any], tf.Tensor],
    label_rules: Callable[[Any], Sequence[Rule]],
) -> Callable[[Any], Any]:
    """Returns a step that raises InvalidArgumentError for a batch with wrong values.

    No variable is changed before the batch is known to be right.

    Args:
        step: takes a global batch.
        weights: returns the weights of a batch's examples.
        label_rules: returns the rules of a batch's labels.
    """

    @without_autograph
    def checked_step(batch: Any) -> Any:
        own = {"example_weights": tf.convert_to_tensor(call_user(weights, batch))}
        rules = [*finite(batch), *finite(own), *label_rules(batch)]
        with tf.device("CPU:0"):  # where an error can name what was found
            checks = [
                tf.raw_ops.Assert(condition=holds, data=[f"{MARK} {wanted}", *found])
                for holds, wanted, found in rules
            ]
        with tf.control_dependencies(checks):
            return step(tf.nest.map_structure(tf.identity, batch, expand_composites=True))

    return checked_step


def finite(batch: Any) -> list[Rule]:
    """Returns the rules that the floating-point tensors of a batch hold neither inf nor NaN."""
    rules: list[Rule] = []
    for path, leaf in keras.tree.flatten_with_path(batch):
        place = f"part {'/'.join(map(str, path))} of the batch" if path else "the batch"
        for values in tf.nest.flatten(leaf, expand_composites=True):
            if values.dtype.is_floating or values.dtype.is_complex:
                right = tf.reduce_all(tf.math.is_finite(tf.abs(values)))
                rules.append((right, f"finite numbers in {place}; got inf or NaN", ()))
    return rules


def in_range(name: str, labels: Any, low: int, high: int, ignored: int | None = None) -> Rule:
    """Returns the rule that labels are in a range.

    Args:
        name: of the labels, for errors.
        labels: a tensor of any dtype.
        low: the smallest label.
        high: the largest label.
        ignored: a label outside of the range that does not count.
    """
    values = tf.nest.flatten(labels, expand_composites=True)[0]
    # A bound such as 999 need not be a number of the labels' own dtype, such as uint8.
    values = tf.cast(values, tf.int64 if values.dtype.is_integer else tf.float64)
    if ignored is not None:
        values = tf.where(values == ignored, tf.cast(low, values.dtype), values)
    least, most = tf.reduce_min(values), tf.reduce_max(values)
    right = (tf.size(values) == 0) | ((least >= low) & (most <= high))
    wanted = f"{name} from {low} to {high}; got a smallest and a largest of"
    return right, wanted, [least, most]


def label_rules(loss_fn: Any, y: Any, outputs: Callable[[], Any]) -> list[Rule]:
    """Returns the rules that labels are in their ranges, as far as these are known.

    Args:
        loss_fn: a loss as `Task` resolves it, or `OutputLosses`.
        y: the labels of a batch, in the structure that `loss_fn` takes.
        outputs: returns the model's outputs, or specs with their shapes. Called only if a range
            depends on them.
    """
    if not isinstance(loss_fn, OutputLosses):
        return rules_of_one("labels", loss_fn, y, outputs)
    keys = loss_fn.losses.keys()
    labels = loss_fn.by_key("labels", y, keys)

    def output_of(key: Any) -> Any:
        return loss_fn.by_key("outputs", outputs(), keys)[key]

    return [
        rule
        for key, loss in loss_fn.losses.items()
        for rule in rules_of_one(
            f"labels of {key}", loss, labels[key], functools.partial(output_of, key)
        )
    ]


def rules_of_one(name: str, loss_fn: Any, labels: Any, output: Callable[[], Any]) -> list[Rule]:
    """Returns the rules of the labels of one loss."""
    if isinstance(loss_fn, keras.losses.Loss) and type(loss_fn).__module__.split(".")[0] != "keras":
        return []  # a class of the user, whatever its name
    kind = LABELS_OF_LOSS.get(name_of(loss_fn))
    if kind in ("binary", "categorical"):
        return [in_range(name, labels, 0, 1)]
    classes = output().shape[-1] if kind == "sparse" else None
    return [in_range(name, labels, 0, classes - 1, ignore_class_of(loss_fn))] if classes else []
