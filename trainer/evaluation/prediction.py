"""Prediction: each replica computes the outputs for its share, and all rows are joined."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import strategies
from strategies.division import count_examples
from trainer.base.autograph import call_user
from trainer.evaluation.passes import compiled_pass, keys_of, next_source, without_writes
from trainer.step.accumulate import real_outputs
from trainer.step.plan import StepPlan


def predict_batch(
    plan: StepPlan,
    method: Callable[[Any], Any],
    draws: tf.Variable,
    compiles: bool,
    batch: Any,
) -> Any:
    """Returns the outputs for a global batch, in the order of its examples.

    Call it in a `tf.function`.

    Args:
        plan: the plan of the training step, whose model `method` calls; none of its variables is
            written.
        method: `Task.predict_batch`.
        draws: the counter of `next_source`.
        compiles: whether XLA compiles the pass.
        batch: the global batch.
    """
    shares = strategies.shares(batch, tf.ones([count_examples(batch)]), plan.strategy)
    arguments = (shares, plan, method, compiles, next_source(draws))
    outputs = plan.strategy.run(replica_predict, args=arguments)
    return tf.nest.map_structure(functools.partial(gathered, plan.strategy), outputs)


def gathered(strategy: tf.distribute.Strategy, shares: Any) -> Any:
    """Returns the rows of all replicas' outputs, in order. Call it in cross-replica context."""
    parts = strategy.experimental_local_results(shares)
    composite = isinstance(parts[0], tf.RaggedTensor | tf.SparseTensor)
    if composite and len(parts) == strategy.num_replicas_in_sync:
        return concatenated(parts)  # `gather` takes dense tensors only
    dtype = parts[0].dtype
    sent = SENT_AS.get(dtype, dtype)
    if strategies.capabilities(strategy).multi_worker:
        if sent not in SENT:
            raise TypeError(
                f"`predict_batch` must return numbers or bools with several workers; got {dtype!r}"
            )
        shares = strategy.run(tf.cast, args=(shares, sent))
    return tf.cast(strategy.gather(shares, axis=0), dtype)


# The dtypes that workers exchange, and those in which they send others.
SENT = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
SENT_AS = {tf.bfloat16: tf.float32, tf.uint32: tf.int64} | dict.fromkeys(
    (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32
)


def concatenated(parts: Sequence[Any]) -> Any:
    """Returns the rows of ragged or of sparse tensors in one."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    return tf.concat(parts, axis=0)


def joined(*parts: Any) -> Any:
    """Returns the rows of the outputs for all batches: an array, or a ragged or sparse tensor."""
    if isinstance(parts[0], tf.RaggedTensor | tf.SparseTensor):
        return concatenated(parts)
    return np.concatenate(parts)


def replica_predict(
    share: strategies.Share,
    plan: StepPlan,
    method: Callable[[Any], Any],
    compiles: bool,
    source: tf.Tensor,
) -> Any:
    """Returns the outputs for one replica's share of a batch. Call it in replica context."""
    share = strategies.own_share(share)
    keys = keys_of(plan, source)

    def run() -> Any:
        with without_writes(plan, keys):
            return call_user(method, share.batch)

    outputs = compiled_pass(run) if compiles else run()
    if plan.global_loss and plan.strategy.num_replicas_in_sync == 1:  # rows may not be examples
        return outputs
    return real_outputs(outputs, share, "predict_batch")
