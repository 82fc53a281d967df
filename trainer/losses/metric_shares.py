"""Updates metrics with a replica's share of a batch."""

import inspect
from typing import Any

import keras
import tensorflow as tf

from strategies.division import count_examples
from trainer.base.autograph import call_user
from trainer.base.warn_once import warn_once


def update_share(metric: keras.metrics.Metric, *arguments: Any, **weights: Any) -> None:
    """Updates a metric with a replica's share of a batch, which may be empty.

    Keras's metrics add nothing for no examples. A metric or function of the user's may divide by
    their number, so it is not called.

    Args:
        metric: the metric.
        *arguments: labels and outputs.
        **weights: `sample_weight`.

    Raises:
        TypeError: if the metric does not take `sample_weight`.
    """
    check_takes_weights(metric)
    if replicas_in_sync() == 1 or is_of_keras(type(metric)):
        call_user(metric.update_state, *arguments, **weights)
        return

    if not is_of_keras(type(metric).update_state):
        warn_of_added_states(metric)

    def update() -> bool:
        call_user(metric.update_state, *arguments, **weights)
        return True

    tf.cond(count_examples(arguments[0]) > 0, update, lambda: False)


def check_takes_weights(metric: keras.metrics.Metric) -> None:
    """Raises TypeError unless a metric takes `sample_weight`, as all of Keras's own do."""
    signature = inspect.signature(metric.update_state, follow_wrapped=False)
    if not any(
        each.kind is each.VAR_KEYWORD
        or (each.name == "sample_weight" and each.kind is not each.POSITIONAL_ONLY)
        for each in signature.parameters.values()
    ):
        raise TypeError(
            "`metrics` must hold metrics whose update_state takes sample_weight; got "
            f"{type(metric).__name__}, whose update_state does not. Examples that pad a batch have "
            "weight 0, and the metric would count them. Add a parameter sample_weight=None, and "
            "weight the examples by it."
        )


def is_of_keras(item: Any) -> bool:
    """Returns whether Keras defines a class or a function."""
    return str(item.__module__).partition(".")[0] == "keras"


def replicas_in_sync() -> int:
    """Returns the number of replicas that take this step together; 1 outside of a replica."""
    context = tf.distribute.get_replica_context()
    return int(context.num_replicas_in_sync) if context else 1


def warn_of_added_states(metric: keras.metrics.Metric) -> None:
    """Warns that the replicas' copies of a user's metric are added up."""
    warn_once(
        f"The metric {metric.name!r} ({type(metric).__name__}) is updated by each replica with its "
        "share of a batch, and Keras adds up the variables of all replicas. That is right for sums "
        "and counts, but not for a largest value, a mean or a variance. Keep sums in the metric, "
        "and divide in result()."
    )
