"""The shapes of labels and outputs that Keras's own losses compare, checked while a step is traced.

Keras broadcasts labels of another shape without a word: each label is then compared with outputs
that it does not belong to, and the loss is a wrong number.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from trainer.base.autograph import call_user
from trainer.losses.default_batch import described, from_library, reason_in
from trainer.step.losses import assert_shapes

# Losses that compare a label with the output at the same place, by class and as a function.
ELEMENTWISE = (
    "BinaryCrossentropy",
    "BinaryFocalCrossentropy",
    "CategoricalFocalCrossentropy",
    "CategoricalHinge",
    "CosineSimilarity",
    "Dice",
    "Hinge",
    "Huber",
    "KLDivergence",
    "LogCosh",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Poisson",
    "SquaredHinge",
    "Tversky",
)
# The labels that Keras's cross-entropies take, by class and function: the numbers of classes
# ("sparse"), or probabilities.
LABELS_OF_LOSS = {
    "BinaryCrossentropy": "binary",
    "BinaryFocalCrossentropy": "binary",
    "binary_crossentropy": "binary",
    "binary_focal_crossentropy": "binary",
    "CategoricalCrossentropy": "categorical",
    "CategoricalFocalCrossentropy": "categorical",
    "categorical_crossentropy": "categorical",
    "categorical_focal_crossentropy": "categorical",
    "SparseCategoricalCrossentropy": "sparse",
    "sparse_categorical_crossentropy": "sparse",
}
CLASSES = tuple(getattr(keras.losses, name) for name in ELEMENTWISE)
FUNCTIONS = tuple(each().fn for each in CLASSES)


def is_elementwise(loss_fn: Any) -> bool:
    """Returns whether a loss is one of Keras's own that compare element by element."""
    return type(loss_fn) in CLASSES or any(loss_fn is each for each in FUNCTIONS)


def keras_loss(loss_fn: Any, call: Callable[..., Any], y: Any, predictions: Any) -> Any:
    """Calls a loss of Keras; its errors about what it is given say what that was.

    Args:
        loss_fn: the loss.
        call: the function that computes it.
        y: the labels.
        predictions: the outputs.

    Raises:
        ValueError: if labels and outputs do not fit each other.
    """
    check_same_shape(loss_fn, y, predictions)
    check_class_numbers(loss_fn, y, predictions)
    try:
        with tf.control_dependencies(assertions(loss_fn, y, predictions)):
            return call_user(call, y, predictions)
    except Exception as error:
        if not from_library(error):
            raise
        raise ValueError(
            f"`loss_fn` must fit the labels and the outputs; got labels {described(y)} and outputs "
            f"{described(predictions)}. {name_of(loss_fn)} raised {type(error).__name__}: "
            f"{reason_in(str(error))}. Compare the labels with what this loss takes."
        ) from error


def check_same_shape(loss_fn: Any, y: Any, predictions: Any) -> None:
    """Raises ValueError if Keras would broadcast labels or outputs to another shape.

    A last dimension of size 1 that only one of them has does not count, as in Keras.
    """
    if is_elementwise(loss_fn) and would_repeat(y, predictions):
        raise ValueError(
            f"`loss_fn` must compare labels with outputs of the same shape; got labels "
            f"{described(y)} and outputs {described(predictions)} for {name_of(loss_fn)}. Keras "
            "would repeat the smaller, and compare labels with outputs of other places. Give the "
            "model as many outputs as there are labels, or pass a function that repeats them."
        )


def would_repeat(y: Any, predictions: Any) -> bool:
    """Returns whether labels and outputs have static shapes of which one would be broadcast."""
    if not (tf.is_tensor(y) and tf.is_tensor(predictions)):
        return False
    one, other = y.shape, predictions.shape
    if one.rank is None or other.rank is None:
        return False
    if one.rank == other.rank + 1 and one[-1] == 1:
        one = one[:-1]
    elif other.rank == one.rank + 1 and other[-1] == 1:
        other = other[:-1]
    return not one.is_compatible_with(other)


def check_class_numbers(loss_fn: Any, y: Any, predictions: Any) -> None:
    """Raises ValueError if Keras would compare the class of one example with all examples' outputs.

    Keras says that this loss takes labels of shape (examples, 1), and compares them so.
    """
    if type(loss_fn) is not keras.losses.CategoricalGeneralizedCrossEntropy:
        return
    one, other = y.shape.rank, predictions.shape.rank
    if one is not None and other is not None and one != other - 1:
        raise ValueError(
            "`loss_fn` must compare the number of a class with its outputs; got labels "
            f"{described(y)} and outputs {described(predictions)} for {name_of(loss_fn)}. Keras "
            "would compare the label of each example with the outputs of all. Give the labels one "
            "dimension less than the outputs: y[:, 0], or y.argmax(-1) of one-hot labels."
        )


def assertions(loss_fn: Any, y: Any, predictions: Any) -> list[tf.Operation]:
    """Returns operations that fail if Keras would broadcast shapes that only the batch shows.

    There are none where all sizes but the number of examples are known, which is the usual case.
    """
    if not (is_elementwise(loss_fn) and tf.is_tensor(y) and tf.is_tensor(predictions)):
        return []
    one, other = y.shape, predictions.shape
    if one.rank != other.rank or not one.rank:
        return []
    if one[1:].is_fully_defined() and other[1:].is_fully_defined():
        return []
    shapes = [tf.shape(y), tf.shape(predictions)]
    rule = (
        "`loss_fn` must compare labels with outputs of the same shape, which "
        f"{name_of(loss_fn)} of Keras does not check. Labels, outputs:"
    )
    return assert_shapes(tf.reduce_all(tf.equal(*shapes)), [rule, *shapes])


def name_of(loss_fn: Any) -> str:
    """Returns the name of a loss's class, or of a function."""
    if isinstance(loss_fn, keras.losses.Loss):
        return type(loss_fn).__name__
    return str(getattr(loss_fn, "__name__", None) or type(loss_fn).__name__)
