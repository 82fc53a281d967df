"""The step, from a global batch to a report: read `attempt_step`, then `replica_step`.

Weigh, cast, run forward, scale, run backward, sum over replicas, unscale, judge, clip; then
apply on every replica or on none, and move the loss scale. Up to the verdict nothing changes,
and the verdict is computed from nothing but sums over all replicas: none can decide alone.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import scaling
import strategies
from trainer.accumulate import accumulate, real_rows
from trainer.checks import check_weights
from trainer.differentiate import Contribution, Microbatch, Values, Whole
from trainer.judge import clip, global_norm, judge, measure
from trainer.keras_private import gradients_already_reduced
from trainer.report import StepReport
from trainer.state import TrainState


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What is the same in every step of a run."""

    strategy: tf.distribute.Strategy
    model: Any  # a keras.Model or a tf.Module
    optimizer: keras.optimizers.Optimizer
    rule: scaling.LossScaleRule
    example_weights: Callable[[Any], tf.Tensor]  # of a global batch
    update_metrics: Callable[[Any, Any], None]  # with a replica's (batch, aux)
    differentiate: Any  # a tf.function of (share, whole, state, values), returning a Microbatch
    num_microbatches: int
    global_clipnorm: float | None
    record_gradients: bool  # whether every report counts its gradients' magnitudes


class StepResult(NamedTuple):
    """What a step has found out; the same on every replica, but for integers written, and rows."""

    gradients: list[Any]  # summed, unscaled, clipped: ready to apply
    written: dict[str, tf.Tensor]  # the model's own writes, held back; floats: mean over replicas
    verdict: scaling.Verdict
    loss: tf.Tensor  # shape=(), float32: the weighted mean over the global batch
    regularization_loss: tf.Tensor  # shape=(), float32
    gradient_norm: tf.Tensor  # shape=(), float32: global, unscaled, before clipping
    magnitude_counts: tf.Tensor  # shape=(COUNTS,), float32, or (0,): see `StepReport`
    batch: Any  # this replica's real examples; none in an empty share
    aux: Any  # what `compute_loss` returned for them beside the losses


def attempt_step(batch: Any, plan: StepPlan, run: TrainState) -> StepReport:
    """Attempts one update. Call it in cross-replica context, in a graph.

    Args:
        batch: the global batch; each replica takes its share.
        plan: the run's constants.
        run: the run's loss scale and counts, which move.

    Returns:
        The step's report, each field of shape ().
    """
    weights = check_weights(plan.example_weights(batch), batch)
    state = run.loss_scaler.state  # the one scale of this step: it multiplies, and it divides
    replica = functools.partial(replica_step, plan=plan)
    result = plan.strategy.run(replica, args=(batch, weights, state))
    agreed = on_first_replica(result._replace(gradients=[], batch=(), aux=()), plan.strategy)
    # The condition stands outside the replicas: what is behind it may be a collective.
    tf.cond(
        agreed.verdict.grads_finite,
        lambda: apply_update(result, agreed.written, plan),
        lambda: False,  # a skip moves nothing
    )
    run.loss_scaler.assign(plan.rule.advance(state, agreed.verdict))
    run.count(agreed.verdict)
    return StepReport(
        step=run.step,
        loss=agreed.loss,
        regularization_loss=agreed.regularization_loss,
        gradient_norm=agreed.gradient_norm,
        loss_scale=state.loss_scale,
        grads_finite=agreed.verdict.grads_finite,
        cause=agreed.verdict.cause,
        examples=tf.shape(weights, tf.int64)[0],
        max_magnitude=agreed.verdict.max_magnitude,
        magnitude_counts=agreed.magnitude_counts,
    )


def replica_step(batch: Any, weights: tf.Tensor, state: Any, plan: StepPlan) -> StepResult:
    """Takes one replica up to the point where the update would be applied. Changes nothing.

    Args:
        batch: the global batch.
        weights: shape (global_batch,), float32: the examples' weights.
        state: the loss-scale rule's state. Its scale multiplies the loss and divides the
            gradients; nobody reads the scale a second time.
        plan: the run's constants.
    """
    share = my_share(batch, weights)
    whole = Whole(tf.reduce_sum(weights), tf.shape(weights)[0])
    values = read_values(plan.model)
    local = accumulate(plan.differentiate, share, whole, state, values, plan.num_microbatches)
    total, written = sum_over_replicas(local, share)
    gradients = scaling.unscale_gradients(total.gradients, state)
    gradient_norm = global_norm(gradients)
    verdict = judge(total, gradient_norm)
    max_magnitude, magnitude_counts = measure(
        gradients, state, magnitude=plan.rule.needs_magnitude, counts=plan.record_gradients
    )
    return StepResult(
        gradients=clip(gradients, gradient_norm, plan.global_clipnorm),
        written=written,
        verdict=verdict._replace(max_magnitude=max_magnitude),
        loss=total.loss,
        regularization_loss=total.regularization_loss,
        gradient_norm=gradient_norm,
        magnitude_counts=magnitude_counts,
        batch=real_rows(share.batch, share),
        aux=real_rows(local.aux, share),
    )


def my_share(batch: Any, weights: tf.Tensor) -> strategies.Share:
    """Returns this replica's part of the global batch."""
    context = tf.distribute.get_replica_context()
    # Cut on the host, or every accelerator would be sent the whole batch first.
    with tf.device("/device:CPU:0"):
        return strategies.take(
            strategies.whole(batch, weights),
            context.replica_id_in_sync_group,
            context.num_replicas_in_sync,
        )


def read_values(model: Any) -> Values:
    """Reads a Keras model's variables, once for the whole step."""
    if not isinstance(model, keras.Model):
        return Values([], [])
    return Values(
        [tf.convert_to_tensor(variable.value) for variable in model.trainable_variables],
        [tf.convert_to_tensor(variable.value) for variable in model.non_trainable_variables],
    )


def sum_over_replicas(
    local: Microbatch, share: strategies.Share
) -> tuple[Contribution, dict[str, tf.Tensor]]:
    """Sums the contributions, and takes the mean of what the replicas' forward passes wrote.

    One all-reduce carries all of it. A replica whose share was empty has written nothing and
    has no part in the mean. Integers (random seeds, counters) have no mean: all replicas will
    take the first one's, whose share is never empty.

    Returns:
        The total contribution, and the values to write if the step is applied.
    """
    took_part = tf.cast(share.examples > 0, tf.float32)
    statistics = {
        position: value * tf.cast(took_part, value.dtype)
        for position, value in local.written.items()
        if value.dtype.is_floating
    }
    total, replicas, sums = strategies.sum_gradients((local.contribution, took_part, statistics))
    # Rows of several replicas may share an index, and overflow only when they are added.
    total = total._replace(gradients=[scaling.coalesce(gradient) for gradient in total.gradients])
    means = {position: value / tf.cast(replicas, value.dtype) for position, value in sums.items()}
    return total, local.written | means


def apply_update(result: StepResult, written: dict[str, tf.Tensor], plan: StepPlan) -> bool:
    """Applies a step on every replica. Call it in cross-replica context; returns True.

    Args:
        result: of each replica.
        written: what the model's forward pass would have written: the same on all replicas.
        plan: the run's constants.
    """

    def replica_apply(gradients: list[Any], batch: Any, aux: Any) -> None:
        pairs = zip(gradients, plan.model.trainable_variables, strict=True)
        reached = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        plan.optimizer.apply(*zip(*reached, strict=True))
        plan.update_metrics(batch, aux)

    with gradients_already_reduced(plan.optimizer):
        plan.strategy.run(replica_apply, args=(result.gradients, result.batch, result.aux))
    for position, value in written.items():
        plan.model.non_trainable_variables[int(position)].assign(value)
    return True


def on_first_replica(structure: Any, strategy: tf.distribute.Strategy) -> Any:
    """Returns the first replica's values of what `strategy.run` returned."""
    return tf.nest.map_structure(
        lambda value: strategy.experimental_local_results(value)[0], structure
    )
