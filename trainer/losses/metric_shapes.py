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
    metric: keras.metrics.Metric, y: Any, sample_weight: tf.Tensor | None
) -> tf.Tensor | None:
    """Returns the weights that a metric takes: the IoU metrics of Keras want one for each label.

    Args:
        metric: the metric.
        y: the labels.
        sample_weight: shape (examples, ...), or None.
    """
    if sample_weight is None or not isinstance(metric, keras.metrics.IoU):
        return sample_weight
    labels = y if metric.sparse_y_true else tf.argmax(y, axis=metric.axis)
    weights = without_last_ones(tf.cast(sample_weight, tf.float32))
    return product(weights, tf.ones_like(labels, tf.float32))


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
