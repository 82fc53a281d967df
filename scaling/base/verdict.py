"""What a step found out about its gradients, and which findings may move the loss scale."""

import enum
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from scaling.base.argument_checks import as_flag


class Cause(enum.IntEnum):
    """Where a step first met an inf or a NaN, in the order in which it looks. `NONE`: nowhere.

    Only `BACKWARD` and `REDUCTION` say something about the loss scale: at a smaller
    scale the same numbers might have fitted. A loss that was infinite before it was
    scaled, or a gradient that overflows when it is divided by a small scale, would not
    be cured by backing off, so the other causes leave a rule's state as it is.

    Example:
        >>> Cause(3).name
        'BACKWARD'
    """

    NONE = 0
    WEIGHTS = 1  # the weights were not finite before the step began
    FORWARD = 2  # the unscaled loss was not finite: the data or the model
    BACKWARD = 3  # the loss was finite, a scaled gradient on some replica was not: the scale
    REDUCTION = 4  # every replica's gradients were finite, their sum was not
    UNSCALING = 5  # the sum was finite, the unscaled gradient or its global norm was not
    MODEL = 6  # as BACKWARD or REDUCTION, but at the smallest scale: no scale can help


def find_cause(
    *,
    weights_finite: tf.Tensor | bool = True,
    loss_finite: tf.Tensor | bool,
    local_gradients_finite: tf.Tensor | bool,
    summed_gradients_finite: tf.Tensor | bool,
    unscaled_gradients_finite: tf.Tensor | bool,
    at_min_scale: tf.Tensor | bool = False,
) -> tf.Tensor:
    """Returns the cause of a step from what was finite in it: the first place that was not.

    Pure, and the same on every replica if its arguments are.

    Args:
        weights_finite: shape (), bool, as all others: before the step.
        loss_finite: the unscaled loss, on every replica.
        local_gradients_finite: each replica's own scaled gradients, before any sum.
        summed_gradients_finite: the sum over replicas, still scaled.
        unscaled_gradients_finite: the gradients to apply, their global norm included.
        at_min_scale: whether the step ran at the rule's smallest scale, so that no backoff
            is left: overflows are then the model's.

    Returns:
        A `Cause`: shape (), int32.

    Raises:
        TypeError, ValueError: if one is not one bool.

    Example:
        >>> cause = find_cause(loss_finite=True, local_gradients_finite=False,
        ...     summed_gradients_finite=False, unscaled_gradients_finite=False)
        >>> Cause(int(cause)).name
        'BACKWARD'
    """
    for_want_of_range = tf.where(
        as_flag(
            "at_min_scale",
            at_min_scale,
            "It says whether no smaller scale is left.",
            "Pass state.loss_scale <= rule.min_scale",
        ),
        [int(Cause.MODEL)] * 2,
        [int(Cause.BACKWARD), int(Cause.REDUCTION)],
    )
    places = {
        "unscaled_gradients_finite": (unscaled_gradients_finite, int(Cause.UNSCALING)),
        "summed_gradients_finite": (summed_gradients_finite, for_want_of_range[1]),
        "local_gradients_finite": (local_gradients_finite, for_want_of_range[0]),
        "loss_finite": (loss_finite, int(Cause.FORWARD)),
        "weights_finite": (weights_finite, int(Cause.WEIGHTS)),
    }
    cause = tf.constant(int(Cause.NONE))
    for name, (finite, place) in places.items():  # from the last place to the first, which wins
        flag = as_flag(
            name,
            finite,
            "It says whether all numbers were finite at that place.",
            "Pass scaling.all_finite() of them",
        )
        cause = tf.where(flag, cause, place)
    return cause


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
    max_magnitude: tf.Tensor | None = None  # shape=(), float32: unscaled, for rules that need it

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
        ValueError: if grads_finite is not a scalar, or the cause is a number that none has.
        TypeError: if grads_finite is not a bool.

    Example:
        >>> bool(as_verdict(False).overflowed)
        True
    """
    name = "verdict.grads_finite" if isinstance(verdict, Verdict) else "verdict"
    verdict = verdict if isinstance(verdict, Verdict) else Verdict(verdict)
    grads_finite = as_flag(
        name,
        verdict.grads_finite,
        "It answers whether every gradient was finite.",
        "Pass scaling.all_finite(gradients)",
    )
    if not tf.is_tensor(verdict.cause) and verdict.cause not in list(Cause):
        raise ValueError(
            f"`verdict.cause` must be a scaling.Cause; got {verdict.cause!r}. It says where the "
            "step was first not finite. Pass what scaling.find_cause() returned, or leave it out."
        )
    return verdict._replace(grads_finite=grads_finite)
