"""Evaluation and prediction: a forward pass over each replica's share, and what is left of it."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from trainer.accumulate import real_rows
from trainer.checks import check_weights
from trainer.differentiate import losses_and_aux
from trainer.step import my_share
from trainer.task import Task


def evaluate_all(
    iterator: Iterator[Any],
    strategy: tf.distribute.Strategy,
    task: Task,
    compute_loss: Callable[..., Any],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Evaluates every batch that is left in an iterator. Trace it in a `tf.function`.

    Returns:
        The weighted sum of losses and the sum of weights, over all replicas: shape (), float32.
    """
    total = weight = tf.constant(0.0)
    for batch in iterator:
        weights = check_weights(task.example_weights(batch), batch)
        sums = strategy.run(replica_evaluate, args=(batch, weights, task, compute_loss))
        total += strategy.reduce(tf.distribute.ReduceOp.SUM, sums[0], axis=None)
        weight += strategy.reduce(tf.distribute.ReduceOp.SUM, sums[1], axis=None)
    return total, weight


def replica_evaluate(
    batch: Any, weights: tf.Tensor, task: Task, compute_loss: Callable[..., Any]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Evaluates one replica's share of a batch. Call it in replica context.

    Args:
        batch: the global batch.
        weights: shape (global_batch,), float32.
        task: whose metrics are updated, with real examples only.
        compute_loss: the task's, compiled or not.

    Returns:
        This replica's weighted sum of losses and its sum of weights: shape (), float32.
    """
    share = my_share(batch, weights)
    losses, aux = losses_and_aux(compute_loss(share.batch, training=False), share.batch)
    task.update_metrics(real_rows(share.batch, share), real_rows(aux, share))
    total = tf.reduce_sum(tf.math.multiply_no_nan(losses, share.weights))
    return total, tf.reduce_sum(share.weights)


def replica_predict(batch: Any, predict_batch: Callable[[Any], Any]) -> Any:
    """Returns the outputs for one replica's share of a batch. Call it in replica context."""
    rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    share = my_share(batch, tf.ones([rows]))
    return real_rows(predict_batch(share.batch), share)
