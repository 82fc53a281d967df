"""The one all-reduce of a step: gradients, losses, flags and statistics, summed over replicas."""

from typing import NamedTuple

import tensorflow as tf

import scaling
import strategies
from trainer.step.diagnose import NonfiniteTable, own_row
from trainer.step.microbatch import Contribution, Microbatch
from trainer.step.types import Values


class Reduced(NamedTuple):
    """The sums over replicas, the same on every replica."""

    total: Contribution  # the sums; gradients are still scaled, and sparse ones are coalesced
    table: NonfiniteTable  # what was not finite on each replica
    written: Values  # what to assign if the step is applied


def sum_over_replicas(
    local: Microbatch,
    share: strategies.Share,
    reduce_dtype: str | None = None,
    bucket_bytes: int | None = None,
) -> Reduced:
    """Sums the contributions, and combines what the replicas' forward passes wrote.

    One all-reduce sums the contributions, the flags and the replicas' parts of means. With a
    `reduce_dtype` or buckets, the gradients have all-reduces of their own: the flags must stay in
    float32, and they depend on the whole backward pass, for which no bucket should wait. Whether a
    replica's gradients are finite is determined before the cast, so an overflow in the cast or in
    the sum counts as one of the reduction.

    Integers, such as counters, have no mean: every replica takes the value of the first replica,
    whose share is never empty. Of values that replace variables, such as a float8 layer's amax
    history, every replica takes the element-wise maximum.

    Args:
        local: results of this replica's whole share.
        share: the examples that these results were computed from.
        reduce_dtype: the dtype in which gradients are summed; None for their own.
        bucket_bytes: the size of a bucket of gradients; see `strategies.sum_gradients`.
    """
    context = tf.distribute.get_replica_context()
    parts = {
        position: value for position, value in local.written.items() if value.dtype.is_floating
    }
    row = own_row(local.nonfinite, context)
    own_values = {
        position: row_of_replica(tf.where(share.examples > 0, value, value.dtype.min), context)
        for position, value in local.replaced.items()
    }
    apart = reduce_dtype is not None or bucket_bytes is not None
    together = local.contribution._replace(gradients=[]) if apart else local.contribution
    total, table, means, tables = strategies.sum_gradients((together, row, parts, own_values))
    if apart:
        own = local.contribution.gradients
        gradients = strategies.sum_gradients(own, reduce_dtype, bucket_bytes)
        total = total._replace(gradients=gradients)
    # Coalesce again: rows from several replicas may share an index, and adding them may overflow.
    total = total._replace(gradients=[scaling.coalesce(gradient) for gradient in total.gradients])
    maxima = {position: tf.reduce_max(rows, axis=0) for position, rows in tables.items()}
    written = local.written | means | maxima
    found = strategies.capabilities(context.strategy)
    # Other strategies assign outside the replicas, so all copies get the first replica's value.
    if found.multi_worker or found.decides_in_replica:
        written |= integers_of_first(local.written, context)
    return Reduced(total, table, written)


def row_of_replica(value: tf.Tensor, context: tf.distribute.ReplicaContext) -> tf.Tensor:
    """Returns a table with a row for each replica: the value in this replica's row, else zeros."""
    replicas = tf.range(context.num_replicas_in_sync)
    mine = tf.reshape(replicas == context.replica_id_in_sync_group, [-1] + [1] * value.shape.rank)
    return tf.where(mine, value[None], tf.zeros_like(value)[None])


def integers_of_first(written: Values, context: tf.distribute.ReplicaContext) -> Values:
    """Returns the integers among the written values, as they are on the job's first replica.

    Integers are summed separately because they are kept on the host, while the other sums may be on
    accelerators. They are summed as int32 halves, which a TPU can add: an int64 travels as its
    upper and its lower 32 bits.
    """
    mine = {
        position: as_int32(value)
        for position, value in written.items()
        if not value.dtype.is_floating
    }
    if not mine:
        return {}
    # All in one tensor: `MirroredStrategy` refuses to sum several int32 tensors at once.
    flat = tf.concat([tf.reshape(number, [-1]) for number in mine.values()], axis=0)
    is_first = context.replica_id_in_sync_group == 0
    total = strategies.sum_gradients(tf.where(is_first, flat, 0))
    parts = tf.split(total, [number.shape.num_elements() for number in mine.values()])
    return {
        position: from_int32(tf.reshape(part, number.shape), written[position])
        for part, (position, number) in zip(parts, mine.items(), strict=True)
    }


def as_int32(value: tf.Tensor) -> tf.Tensor:
    """Returns the bits of an integer or bool tensor as int32; 64 bits become two numbers.

    All replicas but one add 0, so the bits of the sum are those of that replica.
    """
    if value.dtype.size == 8:  # shape (..., 2)
        return tf.bitcast(value, tf.int32)
    return tf.cast(value, tf.int32)


def from_int32(number: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Reverses `as_int32`; `like` has the dtype to return."""
    if like.dtype.size == 8:
        return tf.bitcast(number, like.dtype)
    return tf.cast(number, like.dtype)
