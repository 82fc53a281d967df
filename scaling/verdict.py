"""What a step found out about its gradients, and which findings may move the loss scale."""

import enum
from typing import NamedTuple, TypeAlias

import tensorflow as tf


class Cause(enum.IntEnum):
    """Where a step first met an inf or a NaN. A step that met none has `NONE`.

    Only `BACKWARD` and `REDUCTION` say something about the loss scale: at a smaller
    scale the same numbers might have fitted. A loss that was infinite before it was
    scaled, or a gradient that overflows when it is divided by a small scale, would not
    be cured by backing off, so the other causes leave a rule's state as it is.
    """

    NONE = 0
    FORWARD = 1  # the unscaled loss was not finite: the data or the model
    BACKWARD = 2  # the loss was finite, a scaled gradient on some replica was not
    REDUCTION = 3  # every replica's gradients were finite, their sum was not
    UNSCALING = 4  # the sum was finite, the unscaled gradient or its global norm was not


class Verdict(NamedTuple):
    """What `advance` is told of one step.

    Example:
        >>> int(Verdict(tf.constant(False)).cause) == Cause.BACKWARD
        True
        >>> bool(Verdict(tf.constant(True)).moves_scale)
        True
    """

    grads_finite: tf.Tensor  # shape=(), bool: the same on every replica
    cause: tf.Tensor | Cause = Cause.BACKWARD  # shape=(), int32: read only when not finite
    max_magnitude: tf.Tensor | None = None  # shape=(), float32: for rules that need it

    @property
    def overflowed(self) -> tf.Tensor:
        """Shape (), bool: not finite, and for a cause that a smaller scale may cure."""
        cause = tf.convert_to_tensor(self.cause)
        curable = (cause == int(Cause.BACKWARD)) | (cause == int(Cause.REDUCTION))
        return ~tf.convert_to_tensor(self.grads_finite) & curable

    @property
    def moves_scale(self) -> tf.Tensor:
        """Shape (), bool: whether a rule's state may change at all after this step."""
        return tf.convert_to_tensor(self.grads_finite) | self.overflowed


# What `advance` takes: a bare bool means "not finite for want of range", as in systems
# that tell no causes apart.
VerdictLike: TypeAlias = Verdict | tf.Tensor | bool


def as_verdict(verdict: VerdictLike) -> Verdict:
    """Returns `verdict` as a `Verdict`; a bool becomes `Verdict(grads_finite)`.

    Args:
        verdict: a `Verdict`, or grads_finite alone: a Python bool or a bool tensor, shape ().

    Raises:
        ValueError: if grads_finite is not a scalar.
        TypeError: if grads_finite is not a bool.
    """
    verdict = verdict if isinstance(verdict, Verdict) else Verdict(verdict)
    grads_finite = tf.convert_to_tensor(verdict.grads_finite)
    if grads_finite.dtype != tf.bool:
        raise TypeError(
            f"`grads_finite` must be a bool; got {grads_finite.dtype.name}. It answers whether "
            "every gradient was finite. Pass scaling.all_finite(gradients)."
        )
    if grads_finite.shape.rank not in (0, None):
        raise ValueError(
            f"`grads_finite` must be a scalar; got shape {tuple(grads_finite.shape)}. There is one "
            "verdict per step. Pass scaling.all_finite(gradients)."
        )
    return verdict._replace(grads_finite=grads_finite)
