"""Why a step was skipped, and where: replica, variable, how many elements. Runs on skips alone.

Each replica's row of a small table travels with the one all-reduce, so every replica knows
who met a non-finite value; how many there are is then counted in the sums, which all share.
"""

from typing import Any, NamedTuple

import tensorflow as tf

import scaling
from trainer.step.differentiate import Trouble
from trainer.step.gradients import count_nonfinite, numbers, squares_in_float32


class Finding(NamedTuple):
    """Where a non-finite value was first met; see the fields of `Outcome`."""

    cause: tf.Tensor
    bad_replica: tf.Tensor
    bad_variable: tf.Tensor
    inf_count: tf.Tensor
    nan_count: tf.Tensor


def no_finding() -> Finding:
    """Returns the finding of a step in which all was finite."""
    return Finding(*(tf.constant(value) for value in (int(scaling.Cause.NONE), -1, -1, 0, 0)))


class Table(NamedTuple):
    """What was not finite on which replica. Tables of one row each add up over replicas."""

    forward: tf.Tensor  # shape=(replicas,), float32: 0 if the loss was finite
    losses: tf.Tensor  # shape=(replicas, 2), float32: how many losses were inf, and NaN
    gradient: tf.Tensor  # shape=(replicas,), float32: the first bad gradient, from 1; 0: none

    @property
    def loss_finite(self) -> tf.Tensor:
        """Whether every replica's loss was finite: shape (), bool."""
        return tf.reduce_all(self.forward == 0)


def own_row(trouble: Trouble, context: tf.distribute.ReplicaContext) -> Table:
    """Returns the table of one replica: its own row, and zeros."""
    mine = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync)
    return Table(
        forward=mine * trouble.forward,
        losses=mine[:, None] * trouble.losses[None],
        gradient=mine * tf.cast(first(trouble.gradients > 0) + 1, tf.float32),
    )


def locate(
    table: Table,
    statistics_finite: tf.Tensor,
    summed: list[Any],
    unscaled: list[Any],
    weights: list[Any],
    state: Any,
    rule: Any,
    *,
    alone: bool,
) -> Finding:
    """Finds where a step first met a non-finite value.

    Args:
        table: of all replicas.
        statistics_finite: whether what the forward pass would write is: shape (), bool.
        summed: the gradients summed over replicas, still scaled; None where there is none.
        unscaled: the same, unscaled.
        weights: the values of the same variables.
        state: the loss-scale rule's, of this step.
        rule: if it has a `min_scale`, no backoff is left there.
        alone: whether `summed` is one microbatch's, of whose gradients the table says nothing.

    Returns:
        The finding; `bad_variable` is a position in these lists.
    """
    in_weights, in_summed, in_unscaled = (
        count_by_variable(values) for values in (weights, summed, unscaled)
    )
    if alone:
        table = table._replace(gradient=tf.cast(first_row(in_summed)[None] + 1, tf.float32))
    overflowing = tf.reduce_any(in_unscaled > 0, axis=1) | squares_overflow(unscaled)
    of_local = table.gradient[tf.maximum(first(table.gradient > 0), 0)]
    variables = {
        scaling.Cause.WEIGHTS: (-1, first_row(in_weights), in_weights),
        scaling.Cause.BACKWARD: (
            first(table.gradient > 0),
            tf.cast(of_local, tf.int32) - 1,
            in_summed,
        ),
        scaling.Cause.REDUCTION: (-1, first_row(in_summed), in_summed),
        scaling.Cause.UNSCALING: (-1, first(overflowing), in_unscaled),
    }
    rows = {
        cause: tf.stack([replica, variable, *tf.unstack(counts[tf.maximum(variable, 0)])])
        for cause, (replica, variable, counts) in variables.items()
    }
    replica = first(table.forward > 0)
    losses = tf.cast(table.losses[tf.maximum(replica, 0)], tf.int32)
    rows[scaling.Cause.FORWARD] = tf.stack([replica, -1, *tf.unstack(losses)])

    finite = {
        "weights_finite": tf.reduce_all(in_weights == 0),
        "loss_finite": table.loss_finite & statistics_finite,
        "local_gradients_finite": tf.reduce_all(table.gradient == 0),
        "summed_gradients_finite": tf.reduce_all(in_summed == 0),
        "unscaled_gradients_finite": False,  # or the step would not have been skipped
    }
    place = scaling.find_cause(**finite)
    at_min_scale = state.loss_scale <= getattr(rule, "min_scale", 0.0)
    row = tf.gather(tf.stack([rows[cause] for cause in sorted(rows)]), place - 1)
    return Finding(scaling.find_cause(**finite, at_min_scale=at_min_scale), *tf.unstack(row))


def count_by_variable(values: list[Any]) -> tf.Tensor:
    """Returns how many elements are inf, and NaN, in each: shape (variables, 2), int32."""
    return tf.stack([count_nonfinite(numbers(value)) for value in values])


def squares_overflow(values: list[Any]) -> tf.Tensor:
    """Returns where a sum of squares is beyond float32: shape (variables,), bool."""
    return ~tf.math.is_finite(tf.stack([squares_in_float32(value) for value in values]))


def first_row(counts: tf.Tensor) -> tf.Tensor:
    """Returns the first row that is not all 0, or -1: shape (), int32."""
    return first(tf.reduce_any(counts > 0, axis=1))


def first(flags: tf.Tensor) -> tf.Tensor:
    """Returns the position of the first true flag, or -1: shape (), int32."""
    position = tf.argmax(tf.cast(flags, tf.int32), output_type=tf.int32)
    return tf.where(tf.reduce_any(flags), position, -1)
