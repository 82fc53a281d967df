"""Weights of classes: `fit(class_weight={0: 1.0, 1: 5.0})`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from scaling.base.argument_checks import shown
from trainer.losses.loss_shapes import name_of
from trainer.losses.output_losses import is_several

FORM = "Pass {0: 1.0, 1: 5.0}, for example."


def check_class_weight(
    class_weight: object, loss_fn: object, reduction: str, *, overridden: bool
) -> None:
    """Raises TypeError or ValueError unless `class_weight` is None or can be used.

    Args:
        class_weight: the argument of `Trainer`.
        loss_fn: the argument of `Trainer`, or None.
        reduction: must be "mean".
        overridden: whether a subclass overrides `compute_loss`.
    """
    if class_weight is None:
        return
    if not isinstance(class_weight, Mapping) or not class_weight:
        raise TypeError(
            f"`class_weight` must be a dict of weights by class; got {shown(class_weight)}. The "
            f"loss of an example is multiplied by the weight of its class. {FORM}"
        )
    for label, weight in class_weight.items():
        is_class = isinstance(label, (int, np.integer)) and not isinstance(label, bool)
        is_weight = isinstance(weight, (int, float, np.number)) and not isinstance(weight, bool)
        if not is_class or label < 0 or not is_weight or not math.isfinite(weight):
            raise ValueError(
                "`class_weight` must map class numbers from 0 to finite weights; got "
                f"{shown(label)}: {weight!r}. {FORM}"
            )
    if overridden or loss_fn is None or is_several(loss_fn) or reduction != "mean":
        raise ValueError(
            "`class_weight` must be None unless one loss_fn compares the labels with one output; "
            f"got {shown(dict(class_weight))}. Otherwise it is not known which labels are classes. "
            "Multiply the losses by the weights in compute_loss."
        )
    if getattr(loss_fn, "reduction", None) == "mean_with_sample_weight":
        raise ValueError(
            "`class_weight` must be None if the reduction of loss_fn is 'mean_with_sample_weight'; "
            f"got {shown(dict(class_weight))}. `fit` divides by the sum of the weights then, which "
            "the step must know before the forward pass. Leave reduction= out, or yield the weight "
            "of each example's class as the third element of the data."
        )


def class_factors(y: tf.Tensor, class_weight: Mapping[int, float], loss_fn: Any) -> tf.Tensor:
    """Returns the weight of each example's class: shape (examples,), float32.

    As in Keras, labels are rounded, and classes that are not named weigh 1.

    Args:
        y: labels of shape (examples,) or (examples, 1); with a categorical loss also one-hot, of
            shape (examples, classes).
        class_weight: weights by class.
        loss_fn: the loss.

    Raises:
        ValueError: if an example has several labels.

    Example:
        >>> class_factors(tf.constant([0, 1, 2]), {1: 5.0}, None).numpy()
        array([1., 5., 1.], dtype=float32)
    """
    if not hasattr(y, "shape"):
        raise ValueError(
            f"`class_weight` must be used with one tensor of labels; got a {type(y).__name__}. It "
            "is not known which labels are classes. Multiply the losses by the weights in "
            "compute_loss."
        )
    one_hot = y.shape.rank == 2 and y.shape[-1] != 1
    if (one_hot and not name_of(loss_fn).lower().startswith("categorical")) or y.shape.rank > 2:
        raise ValueError(
            "`class_weight` must be used with one label per example; got labels of shape "
            f"{y.shape} and {name_of(loss_fn)}. The loss of an example has the weight of its "
            "class. Weight single labels by weights of the labels' shape as the third element of "
            "the data, with a loss_fn that returns one loss for each label."
        )
    labels = tf.argmax(y, axis=-1) if one_hot else tf.reshape(y, [-1])
    labels = tf.cast(tf.round(tf.cast(labels, tf.float32)), tf.int32)
    table = np.ones([max(class_weight) + 1], np.float32)
    for label, weight in class_weight.items():
        table[label] = weight
    inside = (labels >= 0) & (labels < len(table))
    return tf.where(inside, tf.gather(table, tf.where(inside, labels, 0)), 1.0)
