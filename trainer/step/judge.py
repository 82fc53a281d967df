"""The verdict: whether a step may be applied. It is the same on every replica, by construction."""

import tensorflow as tf

import scaling
from trainer.step.types import Values


def judge(
    *,
    losses_finite: tf.Tensor,
    statistics_finite: tf.Tensor,
    gradient_norm: tf.Tensor,
    max_magnitude: tf.Tensor,
) -> scaling.Verdict:
    """Decides whether a step is applied: only if everything in it was finite on every replica.

    One inf or NaN in any gradient makes the global norm non-finite, so testing the norm tests
    every element. The norm is computed in float32 from the unscaled sum over replicas, so it also
    covers an overflow in the sum, in the unscaling, and in the squares that Adam would keep.

    Every argument is a result of the all-reduce, so every replica reaches the same verdict
    without another collective.

    Args:
        losses_finite: whether the unscaled loss was finite on every replica: shape (), bool.
        statistics_finite: whether the variables that the step assigns, but for the weights, stay
            finite; see `stay_finite`: shape (), bool.
        gradient_norm: global norm of the summed, unscaled gradients, before clipping: shape (),
            float32.
        max_magnitude: largest magnitude in these gradients: shape (), float32; NaN if it was not
            measured.

    Returns:
        The verdict. Its `cause` is the default; after a skip, `diagnose` finds the cause.

    Source:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2, for skipping an
        update whose gradients are not finite.

    Example:
        >>> def verdict(norm):
        ...     return judge(
        ...         losses_finite=tf.constant(True), statistics_finite=tf.constant(True),
        ...         gradient_norm=tf.constant(norm), max_magnitude=tf.constant(float("nan")))
        >>> bool(verdict(2.5).grads_finite), bool(verdict(float("inf")).grads_finite)
        (True, False)
    """
    grads_finite = losses_finite & statistics_finite & tf.math.is_finite(gradient_norm)
    return scaling.Verdict(grads_finite, max_magnitude=max_magnitude)


def stay_finite(written: Values, before: Values) -> tf.Tensor:
    """Returns whether every variable that is finite now would stay finite: shape (), bool.

    A moving average that becomes inf or NaN would never become finite again.

    Args:
        written: what would be assigned; floats are already those of all replicas.
        before: the values of the same variables before the step.
    """
    floats = {position: value for position, value in written.items() if value.dtype.is_floating}
    if not floats:
        return tf.constant(True)
    now = tf.stack([scaling.all_finite(value) for value in floats.values()])
    earlier = tf.stack([scaling.all_finite(before[position]) for position in floats])
    return tf.reduce_all(now | ~earlier)
