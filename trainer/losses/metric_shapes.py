"""The shapes of labels and outputs that Keras's own metrics compare, checked when they are traced.

Keras broadcasts labels of another shape without a word, or takes the largest of one number: with
class numbers as labels, `CategoricalAccuracy` is a number that means nothing.
"""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from trainer.losses.default_batch import described
from trainer.losses.loss_fn import product, without_last_ones
from trainer.losses.loss_shapes import would_repeat
from trainer.losses.metric_shares import is_of_keras

# Metrics that compare a label with the output at the same place.
ELEMENTWISE = (
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "CategoricalHinge",
    "ConcordanceCorrelation",
    "CosineSimilarity",
    "F1Score",
    "FBetaScore",
    "Hinge",
    "KLDivergence",
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
)
CLASSES = tuple(getattr(keras.metrics, name) for name in ELEMENTWISE)
OF_CLASS_NUMBERS = {
    keras.metrics.CategoricalAccuracy: "SparseCategoricalAccuracy",
    keras.metrics.CategoricalCrossentropy: "SparseCategoricalCrossentropy",
    keras.metrics.TopKCategoricalAccuracy: "SparseTopKCategoricalAccuracy",
}


def check_outputs(aux: Any, metrics: Iterable[str]) -> None:
    """Raises ValueError if `compute_loss` returned no outputs for metrics to compare."""
    if isinstance(aux, tuple) and not aux:
        raise ValueError(
            "`compute_loss` must return (losses, outputs) if there are metrics; got losses alone, "
            f"and metrics {', '.join(metrics)}. They compare outputs with labels. Return the "
            "outputs as well, override update_metrics(batch, aux), or leave the metrics out."
        )


def weights_for(
    metric: keras.metrics.Metric,
    y: Any,
    sample_weight: tf.Tensor | None,
    mask: tf.Tensor | None = None,
) -> tf.Tensor | None:
    """Returns the weights that a metric takes.

    Keras's metrics that are means multiply them by the Keras mask of the outputs themselves, and
    all others of Keras ignore it. Keras's IoU metrics want a weight for each label, and those of
    `FBetaScore` must have one dimension.

    Args:
        metric: the metric.
        y: the labels.
        sample_weight: shape (examples, ...), or None.
        mask: the mask of the outputs: shape (examples, ...), bool; or None.

    Raises:
        ValueError: if the metric would change the weights.
    """
    if sample_weight is not None:
        if sample_weight.dtype.is_floating:
            check_not_truncated(metric)
        else:
            sample_weight = tf.cast(sample_weight, tf.int32)  # tf.abs takes no bools
        sample_weight = tf.abs(sample_weight)  # with signs, an accuracy could be any number
    ignores_mask = is_of_keras(type(metric)) and not isinstance(
        metric, keras.metrics.MeanMetricWrapper
    )
    if mask is not None and ignores_mask:
        if sample_weight is None:
            sample_weight = tf.cast(mask, tf.int32 if counts_integers(metric) else tf.float32)
        else:
            sample_weight = product(sample_weight, tf.cast(mask, sample_weight.dtype))
    if sample_weight is None:
        return None
    if isinstance(metric, keras.metrics.IoU):
        labels = y if metric.sparse_y_true else tf.argmax(y, axis=metric.axis)
        ones = tf.ones_like(labels, sample_weight.dtype)
        return product(without_last_ones(sample_weight), ones)
    if isinstance(metric, keras.metrics.FBetaScore):
        return weights_of_examples(metric, without_last_ones(sample_weight))
    return sample_weight


def counts_integers(metric: keras.metrics.Metric) -> bool:
    """Returns whether a metric is one of Keras's IoU metrics without a floating-point dtype."""
    return isinstance(metric, keras.metrics.IoU) and tf.as_dtype(metric.dtype).is_integer


def check_not_truncated(metric: keras.metrics.Metric) -> None:
    """Raises ValueError if a metric makes integers of its weights, as Keras's IoU metrics do."""
    if counts_integers(metric):
        kind = type(metric).__name__
        raise ValueError(
            f"`metrics` must keep the weights of the examples; got {kind} {metric.name!r}, which "
            "counts in integers and makes 0 of a weight of 0.9. Pass "
            f'keras.metrics.{kind}(..., dtype="float32").'
        )


def weights_of_examples(metric: keras.metrics.Metric, weights: tf.Tensor) -> tf.Tensor:
    """Returns weights of shape (examples,); raises ValueError if they have other dimensions."""
    if weights.shape.rank not in (1, None):
        raise ValueError(
            f"`metrics` must take the weights that the data have; got weights {described(weights)} "
            f"for {type(metric).__name__}, which takes one for each example. Leave the metric out, "
            "or override update_metrics(batch, outputs)."
        )
    return weights


def check_metric_shapes(metric: keras.metrics.Metric, y: Any, outputs: Any) -> None:
    """Raises ValueError if one of Keras's metrics would broadcast labels or outputs.

    A last dimension of size 1 that only one of them has does not count, as in Keras.

    Args:
        metric: the metric.
        y: the labels.
        outputs: the outputs.
    """
    if type(metric) not in CLASSES or not would_repeat(y, outputs):
        return
    sparse = OF_CLASS_NUMBERS.get(type(metric))
    remedy = f"Pass keras.metrics.{sparse}() for labels that are class numbers, " if sparse else ""
    raise ValueError(
        f"`metrics` must compare labels with outputs of the same shape; got labels {described(y)} "
        f"and outputs {described(outputs)} for {type(metric).__name__}. Keras would repeat the "
        "smaller, and compare labels with outputs of other places. "
        f"{remedy or 'Give them the same shape, '}or override update_metrics(batch, outputs)."
    )
