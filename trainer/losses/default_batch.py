"""What the default `compute_loss` and `predict_batch` ask of a batch, of labels and of a model.

All of it is known while a step is traced, so nothing is checked again for every batch.
"""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from strategies.division import shapes_in
from trainer.base.warn_once import warn_once
from trainer.keras_compat import arguments_of_loss
from trainer.losses.outputs import OutputLosses, is_several
from trainer.losses.shapes import LABELS_OF_LOSS, name_of
from trainer.step.types import Batch

# The smallest distance of a number below 1 from 1, which is all that is left of a logit.
STEP_BELOW_ONE = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def unpack(batch: Batch) -> tuple[Batch, Batch, tf.Tensor | None]:
    """Returns (x, y, sample_weight); raises ValueError if the batch has a different form."""
    if isinstance(batch, tuple) and len(batch) in (2, 3):
        return batch if len(batch) == 3 else (*batch, None)
    raise ValueError(
        "`compute_loss` must be overridden unless batches are (x, y) or (x, y, sample_weight); got "
        f"shapes {shapes_in(batch)}"
    )


def all_inputs(data: Any, model: Any) -> Any:
    """Returns an array for each of a model's several inputs as one item; other data as it is.

    The second item of a tuple would otherwise be labels.
    """
    declared = getattr(model, "inputs", None) if isinstance(model, keras.Model) else None
    arrays = isinstance(data, tuple | list) and all(hasattr(each, "shape") for each in data)
    return (tuple(data),) if declared and arrays and 1 < len(data) == len(declared) else data


def check_class_weight(
    class_weight: object, loss_fn: object, reduction: str, *, overridden: bool
) -> None:
    """Raises ValueError for a `class_weight` that would have no effect, or another than in `fit`.

    Args:
        class_weight: the field of `Losses`, or None.
        loss_fn: the argument of `Trainer`, or None.
        reduction: must be "mean".
        overridden: whether a subclass overrides `compute_loss`.
    """
    if not class_weight:
        return
    if overridden or loss_fn is None or is_several(loss_fn) or reduction != "mean":
        raise ValueError("`class_weight` must be None unless one loss_fn compares one output")
    if getattr(loss_fn, "reduction", None) == "mean_with_sample_weight":
        # `fit` divides by the sum of the weights then, which is not known before the forward pass.
        raise ValueError("`class_weight` must be None with reduction='mean_with_sample_weight'")


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
    one_hot = y.shape.rank == 2 and y.shape[-1] != 1
    if (one_hot and not name_of(loss_fn).lower().startswith("categorical")) or y.shape.rank > 2:
        raise ValueError(
            f"`class_weight` must be used with one label per example; got shape {y.shape}"
        )
    labels = tf.argmax(y, axis=-1) if one_hot else tf.reshape(y, [-1])
    labels = tf.cast(tf.round(tf.cast(labels, tf.float32)), tf.int32)
    lowest = min(class_weight)
    table = np.ones([max(class_weight) - lowest + 1], np.float32)
    for label, weight in class_weight.items():
        table[label - lowest] = weight
    places = labels - lowest
    inside = (places >= 0) & (places < len(table))
    return tf.where(inside, tf.gather(table, tf.where(inside, places, 0)), 1.0)


def warn_of_half_probabilities(model: Any, loss_fn: Any) -> None:
    """Warns if a model's last layer computes a sigmoid or a softmax in half precision.

    A probability near 1 is rounded to 1 there. The loss is then as large as Keras's clipping
    allows, its gradient is 0, and an evaluation in float32 does not show it. Casting the
    probabilities afterwards does not bring the logits back.

    Args:
        model: the model. Only a Sequential or functional model tells its last layer.
        loss_fn: the loss, or an `OutputLosses`.
    """
    losses = loss_fn.losses.values() if isinstance(loss_fn, OutputLosses) else [loss_fn]
    if not any(map(takes_probabilities, losses)):
        return
    for layer in last_layers(model):
        step = STEP_BELOW_ONE.get(layer.compute_dtype)
        activation = getattr(layer, "activation", None)
        if step and (
            isinstance(layer, keras.layers.Softmax)
            or activation in (keras.activations.sigmoid, keras.activations.softmax)
        ):
            warn_once(
                f"The layer {layer.name!r} computes probabilities in {layer.compute_dtype}: those "
                f"within {step:.2g} of 1 are rounded, and at 1 the loss has no gradient. Give it "
                'dtype="float32", or use from_logits=True.'
            )


def takes_probabilities(loss: Any) -> bool:
    """Returns whether a loss is one of Keras's cross-entropies, and expects probabilities."""
    if name_of(loss) not in LABELS_OF_LOSS:
        return False
    known = getattr(keras.losses, name_of(loss))
    from_logits = arguments_of_loss(loss).get("from_logits", False)
    return loss is known or (type(loss) is known and not from_logits)


def last_layers(model: Any) -> list[keras.Layer]:
    """Returns the layers whose outputs are the outputs of a Sequential or functional model."""
    if isinstance(model, keras.Sequential):
        return list(model.layers[-1:])
    try:
        outputs = {id(output) for output in model.outputs}
        return [layer for layer in model.layers if id(layer.output) in outputs]
    except AttributeError:  # not a functional model, or a layer with several outputs
        return []
