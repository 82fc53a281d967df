"""The shapes that Keras's own losses and metrics compare, checked while a step is traced.

Keras broadcasts labels of another shape without a word: each label is then compared with outputs
that it does not belong to, and the loss is a wrong number. With class numbers as labels,
`CategoricalAccuracy` is a number that means nothing.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from trainer.base.autograph import call_user
from trainer.step.losses import assert_shapes

# Losses and metrics of Keras that compare a label with the output at the same place.
ELEMENTWISE = (
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "BinaryFocalCrossentropy",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "CategoricalFocalCrossentropy",
    "CategoricalHinge",
    "ConcordanceCorrelation",
    "CosineSimilarity",
    "Dice",
    "F1Score",
    "FBetaScore",
    "Hinge",
    "Huber",
    "KLDivergence",
    "LogCosh",
    "LogCoshError",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "PearsonCorrelation",
    "Poisson",
    "R2Score",
    "RootMeanSquaredError",
    "SquaredHinge",
    "TopKCategoricalAccuracy",
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
ELEMENTWISE_LOSSES, ELEMENTWISE_METRICS = (
    [vars(module)[name] for name in ELEMENTWISE if name in vars(module)]
    for module in (keras.losses, keras.metrics)
)
FUNCTIONS = [each().fn for each in ELEMENTWISE_LOSSES]


def is_elementwise(loss_fn: Any) -> bool:
    """Returns whether a loss is one of Keras's own that compare element by element."""
    return type(loss_fn) in ELEMENTWISE_LOSSES or any(loss_fn is each for each in FUNCTIONS)


def keras_loss(loss_fn: Any, call: Callable[..., Any], y: Any, predictions: Any) -> Any:
    """Calls a loss of Keras, on labels and outputs that it does not broadcast.

    Args:
        loss_fn: the loss.
        call: the function that computes it.
        y: the labels.
        predictions: the outputs.

    Raises:
        ValueError: if labels and outputs do not fit each other.
    """
    wrong = is_elementwise(loss_fn) and would_repeat(y, predictions)
    if type(loss_fn) is keras.losses.CategoricalGeneralizedCrossEntropy:
        # It compares class numbers of shape (examples, 1) with the outputs of all examples.
        wrong = y.shape.rank != predictions.shape.rank - 1
    if wrong:
        raise ValueError(
            "`loss_fn` must compare labels and outputs of one shape; got "
            f"{y.shape} and {predictions.shape} for {name_of(loss_fn)}"
        )
    with tf.control_dependencies(assertions(loss_fn, y, predictions)):
        return call_user(call, y, predictions)


def would_repeat(y: Any, predictions: Any) -> bool:
    """Returns whether labels and outputs have static shapes of which one would be broadcast.

    A last dimension of size 1 that only one of them has does not count, as in Keras.
    """
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
    rule = f"`loss_fn` must compare labels and outputs of one shape ({name_of(loss_fn)}); got"
    return assert_shapes(tf.reduce_all(tf.equal(*shapes)), [rule, *shapes])


def name_of(loss_fn: Any) -> str:
    """Returns the name of a loss's class, or of a function."""
    if isinstance(loss_fn, keras.losses.Loss):
        return type(loss_fn).__name__
    return str(getattr(loss_fn, "__name__", None) or type(loss_fn).__name__)
