"""What one step tells of itself."""

from typing import NamedTuple

import tensorflow as tf

import scaling
from scaling.telemetry.stats import COUNTS


class Outcome(NamedTuple):
    """What came of one attempt at an update; the same on every replica."""

    loss: tf.Tensor  # shape=(), float32: weighted mean over the global batch, unscaled
    regularization_loss: tf.Tensor  # shape=(), float32: the sum of `model.losses`, unscaled
    gradient_norm: tf.Tensor  # shape=(), float32: global, unscaled, before clipping
    grads_finite: tf.Tensor  # shape=(), bool: whether the update was applied
    cause: tf.Tensor  # shape=(), int32: a `scaling.Cause`
    bad_replica: tf.Tensor  # shape=(), int32: the first that met an inf or NaN; -1: none alone
    bad_variable: tf.Tensor  # shape=(), int32: the first that one was met in, by its position in
    # `model.trainable_variables`; -1: none (the loss, or only the norm of all together)
    inf_count: tf.Tensor  # shape=(), int32: of its gradient summed over replicas; or of losses
    nan_count: tf.Tensor  # shape=(), int32: the same for NaN
    max_magnitude: tf.Tensor  # shape=(), float32: of the gradients, unscaled; NaN if not asked for
    magnitude_counts: tf.Tensor  # shape=(COUNTS,), float32: elements by exponent, as in
    # `scaling.GradientStats`, over all variables; shape (0,) if not asked for
    underflow: tf.Tensor  # shape=(trainable_variables,), float32: the share of each gradient that
    # float16 underflows, as `scaling.GradientStats.underflow`; shape (0,) if not asked for


class StepReport(NamedTuple):
    """One attempted step. The inner loop returns many at once: then each field is (steps,)."""

    step: tf.Tensor  # shape=(), int64: attempted steps so far, this one included
    loss_scale: tf.Tensor  # shape=(), float32: the scale of this step's last attempt
    retries: tf.Tensor  # shape=(), int32: further attempts with the same batch
    consecutive_skips: tf.Tensor  # shape=(), int64: up to this step; 0 if it was applied
    in_float32: tf.Tensor  # shape=(), bool: whether it was computed in float32, as a way out
    examples: tf.Tensor  # shape=(), int64: in the global batch
    data_wait_secs: tf.Tensor  # shape=(), float32: how long the loop waited for the batch
    # From here on as in `Outcome`, of the last attempt.
    loss: tf.Tensor
    regularization_loss: tf.Tensor
    gradient_norm: tf.Tensor
    grads_finite: tf.Tensor
    cause: tf.Tensor
    bad_replica: tf.Tensor
    bad_variable: tf.Tensor
    inf_count: tf.Tensor
    nan_count: tf.Tensor
    max_magnitude: tf.Tensor
    magnitude_counts: tf.Tensor
    underflow: tf.Tensor


def outcome_spec(recorded: int = 0) -> Outcome:
    """Returns each field's shape and dtype.

    Args:
        recorded: the variables whose gradients' magnitudes are counted; 0 if none are.
    """
    counts = COUNTS if recorded else 0
    number, integer = tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int32)
    return Outcome(
        loss=number,
        regularization_loss=number,
        gradient_norm=number,
        grads_finite=tf.TensorSpec([], tf.bool),
        cause=integer,
        bad_replica=integer,
        bad_variable=integer,
        inf_count=integer,
        nan_count=integer,
        max_magnitude=number,
        magnitude_counts=tf.TensorSpec([counts], tf.float32),
        underflow=tf.TensorSpec([recorded], tf.float32),
    )


def report_spec(recorded: int = 0) -> StepReport:
    """Returns each field's shape and dtype; see `outcome_spec`."""
    whole = tf.TensorSpec([], tf.int64)
    return StepReport(
        step=whole,
        loss_scale=tf.TensorSpec([], tf.float32),
        retries=tf.TensorSpec([], tf.int32),
        consecutive_skips=whole,
        in_float32=tf.TensorSpec([], tf.bool),
        examples=whole,
        data_wait_secs=tf.TensorSpec([], tf.float32),
        **outcome_spec(recorded)._asdict(),
    )


def describe_skip(report: StepReport, variable_names: list[str]) -> str:
    """Returns why a step was skipped, in words.

    Args:
        report: of one skipped step, in plain numbers.
        variable_names: of `model.trainable_variables`.

    Example:
        >>> numbers = dict.fromkeys(StepReport._fields, 0) | {"cause": 3, "inf_count": 12}
        >>> describe_skip(StepReport(**numbers), ["dense/kernel"])
        'backward, in dense/kernel on replica 0: 12 inf, 0 NaN'
    """
    cause = scaling.Cause(int(report.cause))
    places = {
        scaling.Cause.WEIGHTS: "in the weights of {}",
        scaling.Cause.FORWARD: "in the losses",
        scaling.Cause.UNSCALING: "in the unscaled gradient of {}",
    }
    name = variable_names[int(report.bad_variable)] if report.bad_variable >= 0 else None
    place = places.get(cause, "in {}").format(name or "all gradients together")
    if cause is scaling.Cause.FORWARD and not report.inf_count + report.nan_count:
        place = "in model.losses or in what a layer would write"
    replica = f" on replica {int(report.bad_replica)}" if report.bad_replica >= 0 else ""
    counts = f"{int(report.inf_count)} inf, {int(report.nan_count)} NaN"
    return f"{cause.name.lower()}, {place}{replica}: {counts}"


def step_of(steps: StepReport, place: int) -> StepReport:
    """Returns the report of one step out of many."""
    return StepReport(*(field[place] for field in steps))
