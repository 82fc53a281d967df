"""Finds out why a step was skipped, and where: cause, replica, variable, number of elements.

Each replica fills in its row of a small table. The step's one all-reduce sums these tables, so
every replica knows which replicas met an inf or NaN. `diagnose` runs only after a skip. It counts
inf and NaN in the summed gradients, which are the same on all replicas.
"""

from typing import NamedTuple

import tensorflow as tf

import scaling
from trainer.step.report import Outcome
from trainer.step.types import Batch, Gradient, NonfiniteFlags, Rows, ScaleState, Values
from trainer.step.verdict import count_nonfinite, gradient_values, half_squared_norm

CONCISE_HEALTH = 3  # the mode of TensorFlow's summary that counts inf and NaN


class Finding(NamedTuple):
    """Where a non-finite value was first found; see the fields of `Outcome`."""

    cause: tf.Tensor
    bad_replica: tf.Tensor
    bad_variable: tf.Tensor
    inf_count: tf.Tensor
    nan_count: tf.Tensor


def no_finding() -> Finding:
    """Returns the finding of a step in which everything was finite."""
    return Finding(*(tf.constant(value) for value in (int(scaling.Cause.NONE), -1, -1, 0, 0)))


class NonfiniteTable(NamedTuple):
    """What was not finite on each replica. The tables of all replicas are summed."""

    loss: tf.Tensor  # shape=(replicas,), float32: 0 if the loss was finite
    losses: tf.Tensor  # shape=(replicas, 2), float32: numbers of inf and NaN losses
    gradient: tf.Tensor  # shape=(replicas,), float32: 1 + position of the first bad gradient, or 0

    @property
    def losses_finite(self) -> tf.Tensor:
        """Whether every replica's loss was finite: shape (), bool."""
        return tf.reduce_all(self.loss == 0)


class Evidence(NamedTuple):
    """What `diagnose` examines after a skip; the same on every replica."""

    table: NonfiniteTable
    statistics_finite: tf.Tensor  # shape=(), bool: `judge.stay_finite` of the forward pass
    summed: list[Gradient]  # gradients summed over replicas, still scaled


class ReplicaResult(NamedTuple):
    """One replica's results. Only `batch`, `rows` and integers in `written` differ by replica."""

    outcome: Outcome  # cause and place are those of a finite step until `diagnose` fills them in
    evidence: Evidence  # what `diagnose` examines after a skip
    gradients: list[Gradient]  # summed, unscaled, clipped: ready to apply
    written: Values  # what the forward pass would have assigned; floats: mean over replicas
    batch: Batch  # this replica's real examples; none in an empty share
    rows: Rows  # of these examples


def own_row(nonfinite: NonfiniteFlags, context: tf.distribute.ReplicaContext) -> NonfiniteTable:
    """Returns the table of one replica, in which all other replicas' rows are zeros."""
    mine = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync)
    return NonfiniteTable(
        loss=mine * nonfinite.loss,
        losses=mine[:, None] * nonfinite.losses[None],
        gradient=mine * tf.cast(first_true(nonfinite.gradients > 0) + 1, tf.float32),
    )


def diagnose(
    evidence: Evidence,
    weights: list[tf.Tensor],
    scale_state: ScaleState,
    rule: scaling.LossScaleRule,
    *,
    single_pass: bool,
    in_xla: bool,
) -> tuple[Finding, tf.Tensor]:
    """Finds where a step first met a non-finite value.

    Args:
        evidence: the evidence from the step.
        weights: values of the variables whose gradients were computed, in the same order.
        scale_state: the loss-scale rule's state that the step used.
        rule: the loss-scale rule. At the rule's `min_scale`, the scale cannot back off.
        single_pass: whether a step is one microbatch on one replica. Then the table's gradient
            column is not filled in, and the summed gradients are the replica's own.
        in_xla: whether XLA compiles the diagnosis.

    Returns:
        The finding, whose `bad_variable` is a position in `weights`; and whether the summed
        gradients hold no inf: shape (), bool.
    """
    # Unscaled again: a branch that took both would take twice as many tensors.
    unscaled = scaling.unscale_gradients(evidence.summed, scale_state)
    in_weights = count_by_variable(weights, in_xla=in_xla)
    in_summed = in_unscaled = count_by_variable(evidence.summed, in_xla=in_xla)
    if not isinstance(rule, scaling.NoLossScale):
        in_unscaled = count_by_variable(unscaled, in_xla=in_xla)
    table = evidence.table
    if single_pass:
        table = table._replace(gradient=tf.cast(first_row(in_summed)[None] + 1, tf.float32))
    rows = findings_by_cause(table, unscaled, in_weights, in_summed, in_unscaled)
    finite = {
        "weights_finite": tf.reduce_all(in_weights == 0),
        "loss_finite": table.losses_finite & evidence.statistics_finite,
        "local_gradients_finite": tf.reduce_all(table.gradient == 0),
        "summed_gradients_finite": tf.reduce_all(in_summed == 0),
        "unscaled_gradients_finite": False,  # otherwise the step would not have been skipped
    }
    place = scaling.find_cause(**finite)
    at_min_scale = scale_state.loss_scale <= getattr(rule, "min_scale", 0.0)
    row = tf.gather(tf.stack([rows[cause] for cause in sorted(rows)]), place - 1)
    finding = Finding(scaling.find_cause(**finite, at_min_scale=at_min_scale), *tf.unstack(row))
    return finding, tf.reduce_all(in_summed[:, 0] == 0)


def findings_by_cause(
    table: NonfiniteTable,
    unscaled: list[Gradient],
    in_weights: tf.Tensor,
    in_summed: tf.Tensor,
    in_unscaled: tf.Tensor,
) -> dict[scaling.Cause, tf.Tensor]:
    """Returns what to report for each possible cause of a skip.

    Args:
        table: the table of all replicas.
        unscaled: the unscaled gradients.
        in_weights: inf and NaN counts of the weights: shape (variables, 2), int32.
        in_summed: the same for the summed gradients.
        in_unscaled: the same for the unscaled gradients.

    Returns:
        A dict of (replica, variable, number of inf, number of NaN), keyed by cause: shape (4,),
        int32, each.
    """
    overflowing = tf.reduce_any(in_unscaled > 0, axis=1) | squares_overflow(unscaled)
    bad_local = at(table.gradient, first_true(table.gradient > 0))
    places = {
        scaling.Cause.WEIGHTS: (-1, first_row(in_weights), in_weights),
        scaling.Cause.BACKWARD: (
            first_true(table.gradient > 0),
            tf.cast(bad_local, tf.int32) - 1,
            in_summed,
        ),
        scaling.Cause.REDUCTION: (-1, first_row(in_summed), in_summed),
        scaling.Cause.UNSCALING: (-1, first_true(overflowing), in_unscaled),
    }
    rows = {
        cause: tf.stack([replica, variable, *tf.unstack(at(counts, variable))])
        for cause, (replica, variable, counts) in places.items()
    }
    replica = first_true(table.loss > 0)
    losses = tf.cast(at(table.losses, replica), tf.int32)
    rows[scaling.Cause.FORWARD] = tf.stack([replica, -1, *tf.unstack(losses)])
    return rows


def at(values: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
    """Returns the row at a position, or the first one for -1.

    XLA takes the index of a slice for a constant of the program: it would compile the step again
    whenever the index depends on other numbers. The index of `tf.gather` may be any number.
    """
    return tf.gather(values, tf.maximum(position, 0))


def count_by_variable(values: list[Gradient], *, in_xla: bool = False) -> tf.Tensor:
    """Returns the numbers of inf and NaN in each tensor: shape (variables, 2), int32.

    Args:
        values: the tensors.
        in_xla: whether XLA compiles the count.
    """
    dense = [gradient_values(value) for value in values]
    floats = all(value.dtype in (tf.float32, tf.float64) for value in dense)
    if in_xla or not floats:
        return tf.stack([count_nonfinite(value) for value in dense])
    # One operation for each variable, where the count above has eight: they are traced before the
    # first step, and most runs never call them. XLA has no kernel for it.
    health = tf.stack(
        [
            tf.raw_ops.DebugNumericSummaryV2(
                input=value, output_dtype=tf.float64, tensor_debug_mode=CONCISE_HEALTH
            )
            for value in dense
        ]
    )
    health.set_shape([len(dense), 5])  # a row is (id, size, -inf, inf, NaN)
    return tf.cast(tf.stack([health[:, 2] + health[:, 3], health[:, 4]], axis=1), tf.int32)


def squares_overflow(values: list[Gradient]) -> tf.Tensor:
    """Returns whether each tensor's sum of squares overflows float32: shape (variables,), bool."""
    return ~tf.math.is_finite(tf.stack([half_squared_norm(value) for value in values]))


def first_row(counts: tf.Tensor) -> tf.Tensor:
    """Returns the index of the first row that is not all 0, or -1: shape (), int32."""
    return first_true(tf.reduce_any(counts > 0, axis=1))


def first_true(flags: tf.Tensor) -> tf.Tensor:
    """Returns the position of the first true flag, or -1: shape (), int32."""
    position = tf.argmax(tf.cast(flags, tf.int32), output_type=tf.int32)
    return tf.where(tf.reduce_any(flags), position, -1)
