"""What the step makes of its summed gradients: their norm, the verdict, and the clip."""

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


def largest_magnitude(gradients: list[Any]) -> tf.Tensor:
    """Returns the largest absolute value in any gradient: shape (), float32."""
    largest = [tf.reduce_max(tf.abs(values)) for values in values_of(gradients)]
    return tf.reduce_max(tf.stack(largest))


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
                gradient.values * tf.cast(factor, gradient.dtype),
                gradient.indices,
                gradient.dense_shape,
            )
        return gradient * tf.cast(factor, gradient.dtype)

    return [scaled(gradient) for gradient in gradients]
