"""The step: scale, differentiate, sum, unscale, judge, clip. `Trainer.train_step` does the rest.

`replica_step` is the sentence above in its order. It runs in replica context, changes
nothing, and ends in a verdict that is the same on every replica, because it is computed
from nothing but sums over all of them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import scaling
import strategies
from trainer.accumulate import accumulate, real_rows
from trainer.differentiate import Contribution, Microbatch, Values, Whole


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What is the same in every step of a run."""

    model: Any  # a keras.Model or a tf.Module
    differentiate: Callable[..., Microbatch]  # a tf.function of (share, whole, state, values)
    num_microbatches: int
    global_clipnorm: float | None
    needs_magnitude: bool  # whether the loss-scale rule asks for the largest magnitude


class StepResult(NamedTuple):
    """What a step has found out; the same on every replica but for the last two fields."""

    gradients: list[Any]  # summed, unscaled, clipped: ready to apply
    written: dict[str, tf.Tensor]  # the model's own writes, held back; the mean over replicas
    verdict: scaling.Verdict
    loss: tf.Tensor  # shape=(), float32: the weighted mean over the global batch
    regularization_loss: tf.Tensor  # shape=(), float32
    gradient_norm: tf.Tensor  # shape=(), float32: global, unscaled, before clipping
    batch: Any  # this replica's real examples; none in an empty share
    aux: Any  # what `compute_loss` returned for them beside the losses


def replica_step(batch: Any, weights: tf.Tensor, state: Any, plan: StepPlan) -> StepResult:
    """Takes one replica through a step, up to the point where it would be applied.

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
    if plan.needs_magnitude:
        verdict = verdict._replace(max_magnitude=largest_magnitude(gradients))
    return StepResult(
        gradients=clip(gradients, gradient_norm, plan.global_clipnorm),
        written=written,
        verdict=verdict,
        loss=total.loss,
        regularization_loss=total.regularization_loss,
        gradient_norm=gradient_norm,
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
    has no part in the mean. Integers (random seeds, counters) have no mean: they stay each
    replica's own.

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
    means = {position: value / tf.cast(replicas, value.dtype) for position, value in sums.items()}
    return total, local.written | means


def global_norm(gradients: list[Any]) -> tf.Tensor:
    """Returns the 2-norm of all gradients together, in float32: shape ().

    It is finite only if every element is. In bfloat16, elements of 1e30 are finite while
    their squares, which Adam would keep, are not: then it is infinite.
    """
    leaves = [leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf for leaf in gradients]
    squares = [tf.nn.l2_loss(tf.cast(leaf, tf.float32)) for leaf in leaves if leaf is not None]
    return tf.sqrt(2.0 * tf.add_n(squares))


def largest_magnitude(gradients: list[Any]) -> tf.Tensor:
    """Returns the largest absolute value in any gradient: shape (), float32."""
    leaves = [leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf for leaf in gradients]
    largest = [
        tf.reduce_max(tf.abs(tf.cast(leaf, tf.float32))) for leaf in leaves if leaf is not None
    ]
    return tf.reduce_max(tf.stack(largest))


def judge(total: Contribution, gradient_norm: tf.Tensor) -> scaling.Verdict:
    """Returns the verdict on a step, from sums over all replicas.

    Args:
        total: the summed `Contribution`: flags count replicas, gradients are still scaled.
        gradient_norm: of the unscaled gradients.
    """
    bad_forward = total.bad_forward > 0
    bad_backward = total.bad_backward > 0
    grads_finite = ~bad_forward & ~bad_backward & tf.math.is_finite(gradient_norm)

    def cause_of_skip() -> tf.Tensor:
        # Only a step that went wrong pays for another pass over its gradients.
        after_sum = tf.where(
            scaling.all_finite(total.gradients),
            int(scaling.Cause.UNSCALING),
            int(scaling.Cause.REDUCTION),
        )
        after_forward = tf.where(bad_backward, int(scaling.Cause.BACKWARD), after_sum)
        return tf.where(bad_forward, int(scaling.Cause.FORWARD), after_forward)

    cause = tf.cond(grads_finite, lambda: tf.constant(int(scaling.Cause.NONE)), cause_of_skip)
    return scaling.Verdict(grads_finite, cause)


def clip(gradients: list[Any], gradient_norm: tf.Tensor, clipnorm: float | None) -> list[Any]:
    """Scales all gradients down together so that their global norm is at most `clipnorm`.

    Args:
        gradients: summed and unscaled; None survives.
        gradient_norm: their global norm.
        clipnorm: the bound; None leaves the gradients as they are.

    Source:
        Pascanu et al., "On the difficulty of training recurrent neural networks", ICML
        2013, section 3.2, https://arxiv.org/abs/1211.5063.
    """
    if clipnorm is None:
        return gradients
    factor = clipnorm / tf.maximum(gradient_norm, clipnorm)

    def scaled(gradient: Any) -> Any:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(
                gradient.values * factor, gradient.indices, gradient.dense_shape
            )
        return gradient * tf.cast(factor, gradient.dtype)

    return [scaled(gradient) for gradient in gradients]
