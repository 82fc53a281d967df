"""Computes one replica's part of a step: from its share of the batch to clipped gradients.

Nothing is assigned here. The verdict is computed only from sums over all replicas, so all
replicas reach the same verdict.
"""

import contextlib
from typing import NamedTuple

import tensorflow as tf

import scaling
import strategies
from trainer.step.accumulate import accumulate, microbatch_inputs, real_examples
from trainer.step.clip import clip
from trainer.step.diagnose import Evidence, count_by_variable, no_finding
from trainer.step.float8 import with_own_scales
from trainer.step.float8_counts import measure_float8
from trainer.step.held_back import read_values
from trainer.step.judge import judge, stay_finite
from trainer.step.measure import global_norm, measure
from trainer.step.microbatch import GlobalBatchSize, Microbatch, PassInputs, Rows
from trainer.step.plan import StepPlan, UpdateGroup
from trainer.step.randomness import make_keys
from trainer.step.reduce import sum_over_replicas
from trainer.step.report import Outcome
from trainer.step.types import Batch, Gradient, ScaleState, StepInputs, Values
from trainer.step.xla import adds_in_rows


class ReplicaResult(NamedTuple):
    """One replica's results. Only `batch`, `rows` and integers in `written` differ by replica."""

    outcome: Outcome  # cause and place are those of a finite step until `diagnose` fills them in
    evidence: Evidence  # what `diagnose` examines after a skip
    gradients: list[Gradient]  # summed, unscaled, clipped: ready to apply
    written: Values  # what the forward pass would have assigned; floats: mean over replicas
    batch: Batch  # this replica's real examples; none in an empty share
    rows: Rows  # of these examples


def replica_step(inputs: StepInputs, *, group: UpdateGroup, plan: StepPlan) -> ReplicaResult:
    """Computes one replica's part of an update, ready to apply. Assigns nothing.

    Args:
        inputs: the step's inputs, in which `random` is the result of `randomness.key_source`.
        group: the update group whose gradients to compute.
        plan: the run's constants.
    """
    values = read_values(plan.held_back, positions_by_value(plan))
    local, share = run_share(inputs, values, group, plan)
    updates = plan.updates
    reduced = sum_over_replicas(local, share, updates.reduce_dtype, updates.reduce_bucket_bytes)
    unscaled = scaling.unscale_gradients(reduced.total.gradients, inputs.scale_state)
    in_rows = adds_in_rows(plan.jit_compile, plan.strategy)
    gradient_norm = global_norm(unscaled, in_rows=in_rows)
    measured = measure(
        unscaled,
        inputs.scale_state,
        group.positions,
        magnitude=plan.rule.needs_magnitude,
        recorded=plan.recorded,
    )
    unread = [position for position in reduced.written if position not in values]
    before = values | read_values(plan.held_back, unread)
    # The maxima that float8 remembers are of scaled gradients too: a smaller scale can help them.
    assigned = {at: value for at, value in reduced.written.items() if at not in local.replaced}
    replaced = {at: value for at, value in reduced.written.items() if at in local.replaced}
    statistics_finite = stay_finite(assigned, before)
    verdict = judge(
        losses_finite=reduced.table.losses_finite,
        statistics_finite=statistics_finite & stay_finite(replaced, before),
        gradient_norm=gradient_norm,
        max_magnitude=measured.max_magnitude,
    )
    outcome = Outcome(
        loss=reduced.total.loss,
        regularization_loss=reduced.total.regularization_loss,
        gradient_norm=gradient_norm,
        grads_finite=verdict.grads_finite,
        **no_finding()._asdict(),
        **measured._asdict(),
        **measure_float8(reduced, before, plan.float8)._asdict(),
    )
    batch, rows = real_examples(share, local.rows)
    return ReplicaResult(
        outcome=outcome,
        evidence=Evidence(reduced.table, statistics_finite, reduced.total.gradients, unscaled),
        gradients=clip(unscaled, gradient_norm, plan.updates),
        written=with_own_scales(reduced.written, before, plan.float8),
        batch=batch,
        rows=rows,
    )


def recompute_in_branch(
    result: ReplicaResult, scale_state: ScaleState, plan: StepPlan
) -> ReplicaResult:
    """Returns the same result for a branch after the verdict; the gradients have the same bits.

    Where one program of XLA holds the whole step, what a branch takes is written to memory. One
    branch would take the gradients as they were summed, the other as they are to be applied, and
    both copies would be written. So the branches take the sums alone, and unscale and clip them
    where they use them.

    Args:
        result: this replica's result.
        scale_state: the loss-scale rule's state that the step used.
        plan: the run's constants.
    """
    if not plan.one_program:
        return result
    unscaled = scaling.unscale_gradients(result.evidence.summed, scale_state)
    return result._replace(
        evidence=result.evidence._replace(unscaled=unscaled),
        gradients=clip(unscaled, result.outcome.gradient_norm, plan.updates),
    )


def run_share(
    inputs: StepInputs, values: Values, group: UpdateGroup, plan: StepPlan
) -> tuple[Microbatch, strategies.Share]:
    """Returns the results of the forward and backward passes on this replica, and its share."""
    share = my_share(inputs.batch, inputs.weights)
    context = tf.distribute.get_replica_context()
    own = pass_inputs(inputs, share, values, context.replica_id_in_sync_group, plan)
    return run_model(own, inputs.in_float32, group), share


def run_passes(inputs: StepInputs, *, group: UpdateGroup, plan: StepPlan) -> None:
    """Runs the forward and backward passes on this replica; see `replica_step`."""
    run_share(inputs, read_values(plan.held_back, positions_by_value(plan)), group, plan)


def count_nonfinite_gradients(
    inputs: StepInputs, *, group: UpdateGroup, plan: StepPlan
) -> tf.Tensor:
    """Returns the number of inf and NaN in this replica's scaled gradients: shape (), int32.

    Assigns nothing, and uses no collectives. For the arguments see `replica_step`.
    """
    values = read_values(plan.held_back, positions_by_value(plan))
    local, _ = run_share(inputs, values, group, plan)
    gradients = local.contribution.gradients
    return tf.reduce_sum(count_by_variable(gradients, in_xla=plan.one_program))


def my_share(batch: Batch, weights: tf.Tensor) -> strategies.Share:
    """Returns this replica's part of the global batch."""
    context = tf.distribute.get_replica_context()
    # Cut on the host, so that the whole batch is not sent to every accelerator. A TPU program
    # cannot run operations on the host.
    on_host = not strategies.capabilities(context.strategy).decides_in_replica
    with tf.device("/device:CPU:0") if on_host else contextlib.nullcontext():
        return strategies.take(
            strategies.whole(batch, weights),
            context.replica_id_in_sync_group,
            context.num_replicas_in_sync,
        )


def pass_inputs(
    inputs: StepInputs,
    share: strategies.Share,
    values: Values,
    replica: int | tf.Tensor,
    plan: StepPlan,
) -> PassInputs:
    """Returns the inputs of a replica's forward and backward passes; see `accumulate`.

    Args:
        inputs: the step's inputs.
        share: the replica's part of the global batch.
        values: values of variables in `plan.held_back` before the step, on this replica.
        replica: index of the replica.
        plan: the run's constants.
    """
    keys = make_keys(
        inputs.random,
        replica,
        plan.strategy.num_replicas_in_sync,
        plan.num_microbatches,
        len(plan.seeds),
    )
    size = GlobalBatchSize.of(inputs.weights)
    return PassInputs(share, size, inputs.scale_state, values, keys)


def positions_by_value(plan: StepPlan) -> list[str]:
    """Returns the positions of variables whose values a forward pass is given, in `held_back`.

    These are the variables that are not trained. Weights are read by the model itself, except where
    XLA compiles a pass on a worker while parameter servers hold the variables: a compiled pass
    cannot read from another process.
    """
    remote = strategies.capabilities(plan.strategy).asynchronous
    first = 0 if remote and plan.jit_compile is True else len(plan.weights)
    return [str(position) for position in range(first, len(plan.held_back))]


def run_model(inputs: PassInputs, in_float32: tf.Tensor | None, group: UpdateGroup) -> Microbatch:
    """Runs the forward and backward passes on a replica's share, as usual or in float32."""
    if in_float32 is None:
        return accumulate(group.differentiate, inputs)

    def run_in_float32() -> Microbatch:
        result = accumulate(group.differentiate_in_float32, inputs)
        # Cast aux to the dtypes that the usual branch returns, which may be half precision: both
        # branches of the condition must return the same dtypes.
        first = microbatch_inputs(inputs, 0)
        usual = group.differentiate.get_concrete_function(first).structured_outputs
        rows = tf.nest.map_structure(
            lambda new, spec: tf.cast(new, spec.dtype), result.rows, usual.rows
        )
        return result._replace(rows=rows)

    # The branches contain no collectives: the all-reduce comes later.
    result: Microbatch = tf.cond(
        in_float32,
        run_in_float32,
        lambda: accumulate(group.differentiate, inputs),
    )
    return result
