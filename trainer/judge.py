"""What the step makes of its summed gradients: their norm, the verdict, and the clip."""

import math
from typing import Any

import tensorflow as tf

import scaling
from trainer.differentiate import Contribution


def global_norm(gradients: list[Any]) -> tf.Tensor:
    """Returns the 2-norm of all gradients together, in float32: shape ().

    It is finite only if every element is. In bfloat16, elements of 1e30 are finite while
    their squares, which Adam would keep, are not: then it is infinite.
    """
    return tf.sqrt(2.0 * tf.add_n([tf.nn.l2_loss(values) for values in values_of(gradients)]))


def measure(
    gradients: list[Any], state: Any, *, magnitude: bool, counts: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Measures the unscaled gradients as far as somebody has asked for it.

    Args:
        gradients: coalesced; a missing one has no numbers.
        state: the loss-scale rule's.
        magnitude: whether the largest magnitude is wanted: a pass over the gradients.
        counts: whether the magnitudes shall be counted too: a few more passes.

    Returns:
        The largest magnitude, shape (), float32, or NaN; and the counts of
        `scaling.GradientStats`, summed over variables, shape (COUNTS,), or (0,).
    """
    if counts:
        stats = scaling.gradient_stats(gradients, state)
        return tf.reduce_max(stats.max_magnitude), tf.reduce_sum(stats.counts, axis=0)
    if magnitude:
        largest = [tf.reduce_max(tf.abs(values)) for values in values_of(gradients)]
        return tf.reduce_max(tf.stack(largest)), tf.zeros([0])
    return tf.constant(math.nan), tf.zeros([0])


def values_of(gradients: list[Any]) -> list[tf.Tensor]:
    """Returns the numbers in coalesced gradients, in float32; a missing gradient has none."""
    leaves = [leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf for leaf in gradients]
    return [tf.cast(leaf, tf.float32) for leaf in leaves if leaf is not None]


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
        return scaling.find_cause(
            loss_finite=~bad_forward,
            local_gradients_finite=~bad_backward,
            # Only a step that went wrong pays for another pass over its gradients.
            summed_gradients_finite=scaling.all_finite(total.gradients),
            unscaled_gradients_finite=False,
        )

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
                gradient.values * tf.cast(factor, gradient.dtype),
                gradient.indices,
                gradient.dense_shape,
            )
        return gradient * tf.cast(factor, gradient.dtype)

    return [scaled(gradient) for gradient in gradients]
