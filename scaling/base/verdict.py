"""The verdict on a step's gradients: whether they were finite and, if not, the cause."""

import enum
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from scaling.base.argument_checks import as_flag


class Cause(enum.IntEnum):
    """The first stage of a step at which an inf or NaN appeared; `NONE` if none did.

    Only `BACKWARD` and `REDUCTION` suggest that the loss scale is too large: at a smaller
    scale, the same gradients might have been finite. Backing off cures neither a loss that was
    infinite before it was scaled nor a gradient that overflows when it is divided by a
    small scale, so the other causes leave a rule's state unchanged.

    Example:
        >>> Cause(3).name
        'BACKWARD'
    """

    NONE = 0
    WEIGHTS = 1  # the weights were not finite before the step began
    FORWARD = 2  # the unscaled loss was not finite: the data or the model is at fault
    BACKWARD = 3  # the loss was finite, but a replica's scaled gradients were not: scale too large
    REDUCTION = 4  # every replica's gradients were finite, but their sum was not
    UNSCALING = 5  # the sum was finite, but an unscaled gradient or the global norm was not
    MODEL = 6  # like BACKWARD or REDUCTION, but at the smallest scale: no scale can help


def find_cause(
    *,
    weights_finite: tf.Tensor | bool = True,
    loss_finite: tf.Tensor | bool,
    local_gradients_finite: tf.Tensor | bool,
    summed_gradients_finite: tf.Tensor | bool,
    unscaled_gradients_finite: tf.Tensor | bool,
    at_min_scale: tf.Tensor | bool = False,
) -> tf.Tensor:
    """Returns the cause of a non-finite step: the first stage at which a value was not finite.

    Pure. If the arguments are the same on every replica, so is the result.

    Args:
        weights_finite: whether the weights were finite before the step. All arguments have
            shape () and dtype bool.
        loss_finite: whether the unscaled loss was finite on every replica.
        local_gradients_finite: whether the scaled gradients of every replica were finite before
            they were summed.
        summed_gradients_finite: whether the sum over replicas, still scaled, was finite.
        unscaled_gradients_finite: whether the gradients to apply and their global norm were
            finite.
        at_min_scale: whether the step ran at the rule's smallest scale. The scale cannot be
            lowered any further then, so the cause of an overflow is `MODEL`.

    Returns:
        A `Cause`: shape (), int32.

    Raises:
        ValueError: if an argument is not a single bool.

    Example:
        >>> cause = find_cause(loss_finite=True, local_gradients_finite=False,
        ...     summed_gradients_finite=False, unscaled_gradients_finite=False)
        >>> Cause(int(cause)).name
        'BACKWARD'
    """
    overflow_causes = tf.where(
        as_flag("at_min_scale", at_min_scale),
        [int(Cause.MODEL)] * 2,
        [int(Cause.BACKWARD), int(Cause.REDUCTION)],
    )
    stages = {
        "unscaled_gradients_finite": (unscaled_gradients_finite, int(Cause.UNSCALING)),
        "summed_gradients_finite": (summed_gradients_finite, overflow_causes[1]),
        "local_gradients_finite": (local_gradients_finite, overflow_causes[0]),
        "loss_finite": (loss_finite, int(Cause.FORWARD)),
        "weights_finite": (weights_finite, int(Cause.WEIGHTS)),
    }
    cause = tf.constant(int(Cause.NONE))
    # Go from the last stage to the first, so that the earliest failure wins.
    for name, (finite, stage_cause) in stages.items():
        cause = tf.where(as_flag(name, finite), cause, stage_cause)
    return cause


class Verdict(NamedTuple):
    """The outcome of one step, as passed to a rule's `advance`.

    Example:
        >>> int(Verdict(tf.constant(False)).cause) == Cause.BACKWARD
        True
        >>> bool(Verdict(tf.constant(True)).moves_scale)
        True
    """

    grads_finite: tf.Tensor  # shape=(), bool: whether everything was finite, on every replica
    cause: tf.Tensor | Cause = Cause.BACKWARD  # shape=(), int32: ignored on finite steps
    # shape=(), float32: the largest unscaled gradient magnitude, for rules that need it
    max_magnitude: tf.Tensor | None = None

    @property
    def overflowed(self) -> tf.Tensor:
        """Shape (), bool: whether the step was not finite and a smaller scale may help."""
        cause = tf.convert_to_tensor(self.cause)
        curable = (cause == int(Cause.BACKWARD)) | (cause == int(Cause.REDUCTION))
        return ~tf.convert_to_tensor(self.grads_finite) & curable

    @property
    def moves_scale(self) -> tf.Tensor:
        """Shape (), bool: whether this step may change a rule's state."""
        return tf.convert_to_tensor(self.grads_finite) | self.overflowed


# What `advance` accepts. A bare False counts as an overflow, as in systems that do not
# distinguish causes.
VerdictLike: TypeAlias = Verdict | tf.Tensor | bool


def as_verdict(verdict: VerdictLike) -> Verdict:
    """Returns `verdict` as a `Verdict`; a bool becomes `Verdict(grads_finite)`.

    Args:
        verdict: a `Verdict`, or just grads_finite: a Python bool or a bool tensor, shape ().

    Raises:
        ValueError: if grads_finite is not a single bool.

    Example:
        >>> bool(as_verdict(False).overflowed)
        True
    """
    name = "verdict.grads_finite" if isinstance(verdict, Verdict) else "verdict"
    verdict = verdict if isinstance(verdict, Verdict) else Verdict(verdict)
    return verdict._replace(grads_finite=as_flag(name, verdict.grads_finite))
