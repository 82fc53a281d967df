"""Updates metrics with a replica's share of a batch, with the weights that each of them takes."""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from strategies.division import count_examples
from trainer.base.autograph import call_user
from trainer.base.warn_once import warn_once
from trainer.losses.loss_fn import product, without_last_ones


def update_share(metric: keras.metrics.Metric, *arguments: Any, **weights: Any) -> None:
    """Updates a metric with a replica's share of a batch, which may be empty.

    Keras's metrics add nothing for no examples. A metric or function of the user's may divide by
    their number, so it is not called.

    Args:
        metric: the metric.
        *arguments: labels and outputs.
        **weights: `sample_weight`.
    """
    if replicas_in_sync() == 1 or is_of_keras(type(metric)):
        call_user(metric.update_state, *arguments, **weights)
        return

    if not is_of_keras(type(metric).update_state):
        warn_once(
            f"The variables of the metric {metric.name!r} are added up over replicas: right for "
            "sums and counts alone. Keep sums in the metric, and divide in result()."
        )

    def update() -> bool:
        call_user(metric.update_state, *arguments, **weights)
        return True

    tf.cond(count_examples(arguments[0]) > 0, update, lambda: False)


def is_of_keras(item: Any) -> bool:
    """Returns whether Keras defines a class or a function."""
    return str(item.__module__).partition(".")[0] == "keras"


def replicas_in_sync() -> int:
    """Returns the number of replicas that take this step together; 1 outside of a replica."""
    context = tf.distribute.get_replica_context()
    return int(context.num_replicas_in_sync) if context else 1


def check_outputs(aux: Any, metrics: Iterable[str]) -> None:
    """Raises ValueError if `compute_loss` returned no outputs for metrics to compare."""
    if isinstance(aux, tuple) and not aux:
        raise ValueError(
            "`compute_loss` must return (losses, outputs) for metrics; got losses alone for "
            f"{', '.join(metrics)}"
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
            if counts_integers(metric):  # which makes 0 of a weight of 0.9
                raise ValueError(
                    f"`metrics` must keep weights: {metric.name!r} needs dtype='float32'"
                )
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
        weights = without_last_ones(sample_weight)
        if weights.shape.rank not in (1, None):  # it would multiply all examples by all weights
            raise ValueError(
                f"`metrics` must take the weights of the data; got shape {weights.shape} for "
                f"{metric.name!r}, which takes one for each example"
            )
        return weights
    return sample_weight


def counts_integers(metric: keras.metrics.Metric) -> bool:
    """Returns whether a metric is one of Keras's IoU metrics without a floating-point dtype."""
    return isinstance(metric, keras.metrics.IoU) and tf.as_dtype(metric.dtype).is_integer
