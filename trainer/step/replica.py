"""One replica's way from its share of the batch to gradients that are ready to apply.

Nothing is assigned here. Whether the update may be applied is computed from nothing but
sums over all replicas: none can decide alone.
"""

import contextlib
from typing import Any, NamedTuple

import tensorflow as tf

import scaling
import strategies
from trainer.step.accumulate import accumulate, real_rows
from trainer.step.clip import clip
from trainer.step.diagnose import Table, no_finding, own_row
from trainer.step.differentiate import Contribution, Microbatch, Whole
from trainer.step.measure import global_norm, measure
from trainer.step.plan import Phase, StepPlan
from trainer.step.randomness import make_keys
from trainer.step.report import Outcome


class ReplicaResult(NamedTuple):
    """What a replica has found out; the same on all, but for integers written, and rows."""

    outcome: Outcome  # as if nothing were wrong: `locate` says what is
    table: Table
    statistics_finite: tf.Tensor  # shape=(), bool: of `written`
    gradients: list[Any]  # summed, unscaled, clipped: ready to apply
    summed: list[Any]  # the same before they were unscaled
    unscaled: list[Any]  # and before they were clipped
    written: dict[str, tf.Tensor]  # the model's own writes, held back; floats: mean over replicas
    batch: Any  # this replica's real examples; none in an empty share
    aux: Any  # what `compute_loss` returned for them beside the losses


def replica_step(
    batch: Any,
    weights: tf.Tensor,
    state: Any,
    source: tf.Tensor,
    in_float32: tf.Tensor | None,
    *,
    phase: Phase,
    plan: StepPlan,
) -> ReplicaResult:
    """Takes one replica up to the point where the update would be applied. Changes nothing.

    Args:
        batch: the global batch.
        weights: shape (global_batch,), float32: the examples' weights.
        state: the loss-scale rule's state. Its scale multiplies the loss and divides the
            gradients; nobody reads the scale a second time.
        source: of random numbers: shape (2,), int64: see `randomness.key_source`.
        in_float32: whether to compute in float32: shape (), bool; None never does.
        phase: whose losses, and which gradients.
        plan: the run's constants.
    """
    share = my_share(batch, weights)
    whole = Whole(tf.reduce_sum(weights), tf.shape(weights)[0])
    values = [tf.convert_to_tensor(variable.value) for variable in plan.held_back]
    context = tf.distribute.get_replica_context()
    keys = make_keys(
        source,
        context.replica_id_in_sync_group,
        context.num_replicas_in_sync,
        plan.num_microbatches,
        len(plan.seeds),
    )
    local = run_model(share, whole, state, values, keys, in_float32, phase, plan)
    total, table, written = sum_over_replicas(local, share)
    unscaled = scaling.unscale_gradients(total.gradients, state)
    gradient_norm = global_norm(unscaled)
    measured = measure(
        unscaled,
        state,
        phase.positions,
        magnitude=plan.rule.needs_magnitude,
        recorded=plan.recorded,
    )
    statistics_finite = stay_finite(written, values)
    outcome = Outcome(
        loss=total.loss,
        regularization_loss=total.regularization_loss,
        gradient_norm=gradient_norm,
        # A gradient that is not finite anywhere leaves no finite sum, and that no finite norm.
        grads_finite=table.loss_finite & statistics_finite & tf.math.is_finite(gradient_norm),
        **no_finding()._asdict(),
        **measured._asdict(),
    )
    return ReplicaResult(
        outcome=outcome,
        table=table,
        statistics_finite=statistics_finite,
        gradients=clip(unscaled, gradient_norm, plan.clip),
        summed=total.gradients,
        unscaled=unscaled,
        written=written,
        batch=real_rows(share.batch, share),
        aux=real_rows(local.aux, share),
    )


def my_share(batch: Any, weights: tf.Tensor) -> strategies.Share:
    """Returns this replica's part of the global batch."""
    context = tf.distribute.get_replica_context()
    # Cut on the host, or every accelerator would be sent the whole batch first. A TPU's program
    # has no host in it.
    on_host = not strategies.decides_inside(context.strategy)
    with tf.device("/device:CPU:0") if on_host else contextlib.nullcontext():
        return strategies.take(
            strategies.whole(batch, weights),
            context.replica_id_in_sync_group,
            context.num_replicas_in_sync,
        )


def run_model(
    share: strategies.Share,
    whole: Whole,
    state: Any,
    values: list[tf.Tensor],
    keys: tf.Tensor,
    in_float32: tf.Tensor | None,
    phase: Phase,
    plan: StepPlan,
) -> Microbatch:
    """Runs a replica's share forward and backward, in half precision or in float32."""
    rest = (share, whole, state, values, keys)
    if in_float32 is None:
        return accumulate(phase.differentiate, *rest)

    def wide() -> Microbatch:
        result = accumulate(phase.differentiate_in_float32, *rest)
        # What a half-precision pass returned beside its losses may have been half.
        first = strategies.take(share, 0, plan.num_microbatches)
        usual = phase.differentiate.get_concrete_function(first, whole, state, values, keys[0])
        aux = usual.structured_outputs.aux
        cast = tf.nest.map_structure(lambda new, spec: tf.cast(new, spec.dtype), result.aux, aux)
        return result._replace(aux=cast)

    # No collective is behind this condition: the replicas have not met yet.
    return tf.cond(in_float32, wide, lambda: accumulate(phase.differentiate, *rest))


def sum_over_replicas(
    local: Microbatch, share: strategies.Share
) -> tuple[Contribution, Table, dict[str, tf.Tensor]]:
    """Sums the contributions, and takes the mean of what the replicas' forward passes wrote.

    One all-reduce carries all of it. A replica whose share was empty has written nothing and
    has no part in the mean. Integers (counters, say) have no mean: all replicas will take the
    first one's, whose share is never empty.

    Returns:
        The total contribution; who met what was not finite; and the values to write if the step
        is applied.
    """
    context = tf.distribute.get_replica_context()
    took_part = tf.cast(share.examples > 0, tf.float32)
    statistics = {
        position: tf.where(took_part > 0, value, tf.zeros_like(value))
        for position, value in local.written.items()
        if value.dtype.is_floating
    }
    row = own_row(local.trouble, context)
    total, table, replicas, sums = strategies.sum_gradients(
        (local.contribution, row, took_part, statistics)
    )
    # Rows of several replicas may share an index, and overflow only when they are added.
    total = total._replace(gradients=[scaling.coalesce(gradient) for gradient in total.gradients])
    means = {position: value / tf.cast(replicas, value.dtype) for position, value in sums.items()}
    written = local.written | means
    apart = strategies.has_workers(context.strategy) or strategies.decides_inside(context.strategy)
    if apart:
        written |= integers_of_first(local.written, context)
    return total, table, written


def integers_of_first(
    written: dict[str, tf.Tensor], context: tf.distribute.ReplicaContext
) -> dict[str, tf.Tensor]:
    """Returns the integers among some values as the job's first replica has them.

    A sum of their own, since they are kept on the host; the other sums may be on accelerators.
    In int32, which a TPU can add.
    """
    is_first = context.replica_id_in_sync_group == 0
    mine = {
        position: tf.where(is_first, tf.cast(value, tf.int32), 0)
        for position, value in written.items()
        if not value.dtype.is_floating
    }
    sums = strategies.sum_gradients(mine)
    return {position: tf.cast(value, written[position].dtype) for position, value in sums.items()}


def stay_finite(written: dict[str, tf.Tensor], before: list[tf.Tensor]) -> tf.Tensor:
    """Returns whether nothing that was finite is about to become inf or NaN: shape (), bool.

    A statistic that has become so would stay so. Means over replicas are everybody's, so this
    needs no agreement.
    """
    floats = {position: value for position, value in written.items() if value.dtype.is_floating}
    flags = [
        scaling.all_finite(value) | ~scaling.all_finite(before[int(position)])
        for position, value in floats.items()
    ]
    return tf.reduce_all(flags) if flags else tf.constant(True)
