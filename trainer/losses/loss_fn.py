"""What a `loss_fn` means: one loss and one weight per example, so that their mean is Keras's loss.

Keras reduces a loss over the whole batch. A replica or a microbatch sees only a share of it, so
the loss is split into a loss L[i] and a weight W[i] for each example. The step computes
sum(W * L) / sum(|W|) over the global batch, and sum(|W|) is known before the forward pass.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from scaling.ops.gradients import at_least_float32
from trainer.base.autograph import call_user
from trainer.base.tracking import read_copies, tracked_variables, write_copies
from trainer.base.warn_once import warn_once
from trainer.keras_compat import arguments_of_loss, keras_mask
from trainer.losses.shapes import keras_loss, name_of

LossFunction: TypeAlias = keras.losses.Loss | Callable[[Any, Any], tf.Tensor]

# A replica or microbatch sees only its share, so another loss would depend on the division.
PER_EXAMPLE = "`loss_fn` must give each example its own loss; got"
GLOBAL = 'Pass Losses(reduction="global").'


def check_loss_fn(loss_fn: LossFunction, reduction: str = "mean") -> None:
    """Raises ValueError for a loss that cannot be split into examples; warns about `None`.

    Args:
        loss_fn: a Keras loss or a function.
        reduction: "mean", or "global" for a loss that need not be split.
    """
    if reduction != "global":
        check_examples_kept(loss_fn)
    if not isinstance(loss_fn, keras.losses.Loss):
        return
    name = name_of(loss_fn)
    if type(loss_fn).__call__ is not keras.losses.Loss.__call__:
        raise ValueError(f"`loss_fn` must override call, not __call__; got {name}")
    if loss_fn.reduction == "sum":
        raise ValueError(f"`loss_fn` must have a mean as its reduction; got {name} with 'sum'")
    if loss_fn.reduction in (None, "none"):
        warn_once(
            f"loss_fn={name} has reduction=None: the trainer takes the mean, where fit of "
            "Keras differentiates the sum."
        )


def check_examples_kept(loss_fn: LossFunction, rank: int | None = None) -> None:
    """Raises ValueError if a Keras loss compares examples, or sums over them.

    Args:
        loss_fn: a Keras loss or a function.
        rank: number of dimensions of the predictions; None if unknown, which leaves negative
            axes unchecked.
    """
    name, losses = name_of(loss_fn), keras.losses
    if isinstance(loss_fn, losses.Circle) or loss_fn is losses.circle:
        raise ValueError(f"{PER_EXAMPLE} {name}, which compares examples. {GLOBAL}")
    is_overlap = isinstance(loss_fn, (losses.Dice, losses.Tversky))
    is_overlap |= any(loss_fn is function for function in (losses.dice, losses.tversky))
    axis = arguments_of_loss(loss_fn).get("axis")
    axes = [] if axis is None else list(np.ravel(axis))
    if (is_overlap and axis is None) or any(each in (0, -(rank or 0)) for each in axes):
        raise ValueError(f"{PER_EXAMPLE} {name} with axis={axis!r}, which includes the examples")


def example_losses(
    loss_fn: LossFunction, y: Any, outputs: Any, sample_weight: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns one loss per example: the mean of the example's elements, as Keras weights them.

    Labels and outputs reach a Keras loss as in Keras: cast to the loss's dtype and, if it is one
    of Keras's own losses, with their ranks aligned. A function gets integer and bool labels as
    they are, all floats in float32 (float64 if the outputs are), and all outputs of a model with
    several.

    Args:
        loss_fn: a loss that `check_loss_fn` has accepted.
        y: the labels.
        outputs: the model's outputs. If they have a Keras mask, elements where it is False weigh
            nothing.
        sample_weight: shape (examples, ...), or None. With more than one dimension it weights
            the elements of an example, such as tokens.

    Returns:
        The losses: shape (examples,); float32, unless a function returns another dtype.

    Raises:
        ValueError: if there is no loss per example, or the model has several outputs.
    """
    mask = mask_of(loss_fn, outputs)
    predictions = tf.nest.map_structure(as_float, outputs)
    if needs_alignment(y, predictions):
        check_examples_apart(loss_fn, y, predictions)
    elements = element_losses(loss_fn, y, predictions)
    weights = element_weights(loss_fn, y, sample_weight, mask)
    rank = elements.shape.rank
    if weights is None or weights.shape.rank == 1:
        return elements if rank == 1 else tf.reduce_mean(elements, axis=list(range(1, rank)))
    if weights.shape.rank > rank:
        raise ValueError(
            f"`loss_fn` must return a loss for each weight and each element of the Keras mask; got "
            f"losses of shape {elements.shape} for {weights.shape}"
        )
    elements = tf.reduce_mean(elements, axis=list(range(weights.shape.rank, rank)))
    weights = tf.cast(tf.broadcast_to(weights, tf.shape(elements)), elements.dtype)
    inner = list(range(1, weights.shape.rank))
    total = tf.reduce_sum(tf.math.multiply_no_nan(elements, weights), axis=inner)
    return tf.math.divide_no_nan(total, tf.reduce_sum(tf.abs(weights), axis=inner))


def global_loss(
    loss_fn: LossFunction, y: Any, outputs: Any, sample_weight: tf.Tensor | None, mask: Any
) -> tf.Tensor:
    """Returns the loss of a whole batch: shape (), float32.

    If the loss gives each element a number, this is their weighted mean.

    Args:
        loss_fn: a Keras loss or a function.
        y: the labels.
        outputs: the model's outputs.
        sample_weight: shape (examples, ...), or None.
        mask: the Keras mask of the outputs, or None.
    """
    predictions = tf.nest.map_structure(as_float, outputs)
    elements, own_mask = losses_and_mask(loss_fn, y, predictions)
    elements = tf.cast(elements, tf.float32)
    weights = element_weights(loss_fn, y, sample_weight, mask)
    if own_mask is not None and ignore_class_of(loss_fn) is None:
        weights = product(weights, tf.cast(own_mask, tf.float32))
    if weights is None:
        return tf.reduce_mean(elements)
    elements = tf.reduce_mean(elements, axis=list(range(weights.shape.rank, elements.shape.rank)))
    weights = tf.broadcast_to(weights, tf.shape(elements))
    total = tf.reduce_sum(tf.math.multiply_no_nan(elements, weights))
    return tf.math.divide_no_nan(total, tf.reduce_sum(tf.abs(weights)))


def example_weights(
    loss_fn: LossFunction, y: Any, sample_weight: tf.Tensor | None, mask: Any = None
) -> tf.Tensor | None:
    """Returns each example's weight, or None if every example weighs the same.

    The weight of an example with weights for its elements is the sum of their magnitudes;
    `example_losses` keeps their signs.

    Args:
        loss_fn: the loss. With `ignore_class`, elements of that class weigh nothing.
        y: the labels of the global batch.
        sample_weight: shape (global_batch, ...), or None.
        mask: the Keras mask of the model's outputs, or None.

    Returns:
        The weights: shape (global_batch,), float32.
    """
    weights = element_weights(loss_fn, y, sample_weight, mask)
    if weights is None or weights.shape.rank == 1:
        return weights
    return tf.reduce_sum(tf.abs(weights), axis=list(range(1, weights.shape.rank)))


def element_weights(
    loss_fn: LossFunction, y: Any, sample_weight: tf.Tensor | None, mask: Any = None
) -> tf.Tensor | None:
    """Returns the weights of the elements of all examples, or None if all are 1.

    Returns:
        The weights: float32, shape (examples, ...), without trailing dimensions of size 1.
    """
    ignored = ignore_class_of(loss_fn)
    weights = None
    if sample_weight is not None:
        weights = without_last_ones(tf.cast(sample_weight, tf.float32))
    if ignored is not None:
        weights = product(weights, tf.cast(tf.cast(y, tf.float32) != float(ignored), tf.float32))
    if mask is not None:
        weights = product(weights, tf.cast(mask, tf.float32))
    return weights


def product(weights: tf.Tensor | None, others: tf.Tensor) -> tf.Tensor:
    """Returns the product of weights of examples and of their elements, in either order."""
    others = without_last_ones(others)
    if weights is None:
        return others
    rank = max(weights.shape.rank, others.shape.rank)
    aligned = []
    for each in (weights, others):
        shape = tf.concat([tf.shape(each), tf.ones([rank - each.shape.rank], tf.int32)], axis=0)
        aligned.append(tf.reshape(each, shape) if each.shape.rank < rank else each)
    return aligned[0] * aligned[1]


def element_losses(loss_fn: LossFunction, y: Any, predictions: Any) -> tf.Tensor:
    """Returns the losses before any reduction: shape (examples, ...)."""
    if isinstance(loss_fn, keras.losses.Loss):
        check_examples_kept(loss_fn, tf.nest.flatten(predictions)[0].shape.rank)
    losses, mask = losses_and_mask(loss_fn, y, predictions)
    if losses.shape.rank in (0, None):
        raise ValueError(
            f"{PER_EXAMPLE} {name_of(loss_fn)}, which returned shape {losses.shape}. {GLOBAL}"
        )
    if mask is not None and ignore_class_of(loss_fn) is None:
        # Keras divides by the number of losses in the whole batch that are not masked.
        raise ValueError(f"`loss_fn` must put no Keras mask on its losses; got {name_of(loss_fn)}")
    return losses


def losses_and_mask(
    loss_fn: LossFunction, y: Any, predictions: Any
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns what a loss computes before any reduction, and the Keras mask that it puts on it.

    Args:
        loss_fn: a Keras loss or a function.
        y: the labels.
        predictions: the outputs, in float32 or float64.
    """
    if takes_one_output(loss_fn) and not tf.is_tensor(predictions):
        # Keras would stack a list, and compare it as one tensor.
        raise ValueError(
            f"`loss_fn` must have a loss for each of several outputs; got {name_of(loss_fn)}"
        )
    if isinstance(loss_fn, keras.losses.Loss):
        # Loss.__call__ casts; `call` does not. `__call__` itself would reduce over the share.
        y, predictions = (
            tf.nest.map_structure(
                lambda each: keras.ops.convert_to_tensor(each, dtype=loss_fn.dtype), tree
            )
            for tree in (y, predictions)
        )
        losses = keras_loss(loss_fn, loss_fn.call, y, predictions)
    elif is_keras_function(loss_fn):
        pair = aligned(tf.cast(y, predictions.dtype), predictions)
        losses = keras_loss(loss_fn, loss_fn, *pair)
    else:
        dtype = tf.nest.flatten(predictions)[0].dtype
        labels = tf.nest.map_structure(
            lambda each: tf.cast(each, dtype) if each.dtype.is_floating else each, y
        )
        losses = call_user(loss_fn, labels, predictions)
    mask = keras_mask(losses)
    losses = tf.convert_to_tensor(losses)
    if isinstance(loss_fn, keras.losses.Loss) or losses.dtype == tf.float64:
        losses = tf.cast(losses, tf.float32)
    return losses, mask


def aligned(y: tf.Tensor, predictions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Gives labels and predictions the same rank, as Keras does before it calls a loss function.

    If one has one dimension more, of size 1, the other one gets it too if it has a single
    dimension; otherwise that dimension is dropped.
    """
    if y.shape.rank == predictions.shape.rank + 1 and y.shape[-1] == 1:
        if predictions.shape.rank == 1:
            return y, predictions[:, None]
        return tf.squeeze(y, axis=-1), predictions
    if predictions.shape.rank == y.shape.rank + 1 and predictions.shape[-1] == 1:
        if y.shape.rank == 1:
            return y[:, None], predictions
        return y, tf.squeeze(predictions, axis=-1)
    return y, predictions


def needs_alignment(y: Any, predictions: Any) -> bool:
    """Returns whether one of two tensors has one more dimension, of size 1, as (examples, 1)."""
    if not (tf.is_tensor(y) and tf.is_tensor(predictions)):
        return False
    shorter, longer = sorted([y.shape, predictions.shape], key=lambda shape: shape.rank or 0)
    return bool(shorter.rank and longer.rank == shorter.rank + 1 and longer[-1] == 1)


def check_examples_apart(loss_fn: LossFunction, y: tf.Tensor, predictions: tf.Tensor) -> None:
    """Raises ValueError if broadcasting makes an example's loss depend on another example.

    `y - predictions` of shapes (examples,) and (examples, 1) is a table of all pairs. Tries the
    loss on two examples, together and one at a time. Its errors are left to the real call.
    """
    counted, strategy = tracked_variables([loss_fn]), tf.distribute.get_strategy()
    with tf.init_scope():
        before = read_copies(counted, strategy)
        try:
            labels = tf.cast(tf.reshape([0, 1], [2] + [1] * (y.shape.rank - 1)), y.dtype)
            guesses = tf.reshape([0.25, 0.625], [2] + [1] * (predictions.shape.rank - 1))
            both, again = (element_losses(loss_fn, labels, guesses) for _ in range(2))
            single = [element_losses(loss_fn, labels[i:][:1], guesses[i:][:1]) for i in (0, 1)]
            means = np.mean(np.reshape(both, [2, -1]), axis=1)
            own_means = [np.mean(losses) for losses in single]
        except Exception:  # noqa: BLE001  # any error of the user's function: see above
            return
        finally:
            write_copies(counted, before, strategy)
    if not np.array_equal(both, again, equal_nan=True):  # it draws random numbers, or counts
        return
    if not np.allclose(means, own_means, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise ValueError(
            f"{PER_EXAMPLE} {name_of(loss_fn)}, which pairs all labels of shape {y.shape} with all "
            f"outputs of shape {predictions.shape}"
        )


def mask_of(loss_fn: LossFunction, outputs: Any) -> tf.Tensor | None:
    """Returns the Keras mask of a model's output, or None.

    Raises:
        ValueError: if one of several outputs has a mask.
    """
    if tf.is_tensor(outputs):
        return keras_mask(outputs)
    for output in tf.nest.flatten(outputs):
        mask = keras_mask(output)
        if mask is not None:
            raise ValueError(
                "`loss_fn` must compare one output if it has a Keras mask; got several for "
                f"{name_of(loss_fn)}: override compute_loss"
            )
    return None


def ignore_class_of(loss_fn: LossFunction) -> int | None:
    """Returns the class whose labels do not count, or None."""
    if isinstance(loss_fn, keras.losses.SparseCategoricalCrossentropy):
        ignored: int | None = arguments_of_loss(loss_fn)["ignore_class"]
        return ignored
    return None


def takes_one_output(loss_fn: LossFunction) -> bool:
    """Returns whether a loss compares one tensor with another, as all Keras losses do."""
    return isinstance(loss_fn, keras.losses.Loss) or is_keras_function(loss_fn)


def is_keras_function(loss_fn: LossFunction) -> bool:
    """Returns whether this is one of the functions in `keras.losses`."""
    return getattr(keras.losses, getattr(loss_fn, "__name__", ""), None) is loss_fn


def without_last_ones(tensor: tf.Tensor) -> tf.Tensor:
    """Drops the trailing dimensions of static size 1, except the first dimension."""
    while tensor.shape.rank > 1 and tensor.shape[-1] == 1:
        tensor = tf.squeeze(tensor, axis=-1)
    return tensor


def as_float(output: tf.Tensor) -> tf.Tensor:
    """Returns a model's output in float32, or in float64 if it is."""
    return tf.cast(output, tf.float64 if output.dtype == tf.float64 else tf.float32)


def floats_at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """Casts a tensor in half precision to float32; returns any other unchanged."""
    return at_least_float32("loss", tensor) if tensor.dtype.is_floating else tensor
