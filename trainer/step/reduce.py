"""The one all-reduce of a step: gradients, losses, flags and statistics, summed over replicas."""

from typing import NamedTuple

import tensorflow as tf

import scaling
import strategies
from trainer.step.diagnose import NonfiniteTable, own_row
from trainer.step.microbatch import Contribution, Microbatch
from trainer.step.types import Written


class Reduced(NamedTuple):
    """The sums over replicas, the same on every replica."""

    total: Contribution  # the sums; gradients are still scaled, and sparse ones are coalesced
    table: NonfiniteTable  # what was not finite on each replica
    written: Written  # what to assign if the step is applied


def sum_over_replicas(local: Microbatch, share: strategies.Share) -> Reduced:
    """Sums the contributions, and averages what the replicas' forward passes wrote.

    One all-reduce sums the contributions, the flags and the floats that were written. A replica
    whose share was empty does not count in the average. Integers, such as counters, are not
    averaged: every replica takes the value of the first replica, whose share is never empty.

    Args:
        local: results of this replica's whole share.
        share: the examples that these results were computed from.
    """
    context = tf.distribute.get_replica_context()
    took_part = tf.cast(share.examples > 0, tf.float32)
    statistics = {
        position: tf.where(took_part > 0, value, tf.zeros_like(value))
        for position, value in local.written.items()
        if value.dtype.is_floating
    }
    row = own_row(local.nonfinite, context)
    total, table, replicas, sums = strategies.sum_gradients(
        (local.contribution, row, took_part, statistics)
    )
    # Coalesce again: rows from several replicas may share an index, and adding them may overflow.
    total = total._replace(gradients=[scaling.coalesce(gradient) for gradient in total.gradients])
    means = {position: value / tf.cast(replicas, value.dtype) for position, value in sums.items()}
    written = local.written | means
    found = strategies.capabilities(context.strategy)
    # Other strategies assign outside the replicas, so all copies get the first replica's value.
    if found.multi_worker or found.decides_in_replica:
        written |= integers_of_first(local.written, context)
    return Reduced(total, table, written)


def integers_of_first(written: Written, context: tf.distribute.ReplicaContext) -> Written:
    """Returns the integers among the written values, as they are on the job's first replica.

    Integers are summed separately because they are kept on the host, while the other sums may be on
    accelerators. They are summed in int32, which a TPU can add.
    """
    is_first = context.replica_id_in_sync_group == 0
    mine = {
        position: tf.where(is_first, tf.cast(value, tf.int32), 0)
        for position, value in written.items()
        if not value.dtype.is_floating
    }
    sums = strategies.sum_gradients(mine)
    return {position: tf.cast(value, written[position].dtype) for position, value in sums.items()}
