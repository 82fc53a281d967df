"""Raises an error if a run must not continue; the error says why, and what to try."""

import pathlib
from typing import Protocol

import numpy as np
from absl import logging

import scaling
from trainer.log.summary import power_of_two
from trainer.step.report import StepReport, describe_skip, step_of

HINTS = {
    scaling.Cause.WEIGHTS: (
        "The weights contained inf or NaN before the step began, so no later step can repair them. "
        "Continue from an earlier checkpoint, with a lower learning rate or with gradient clipping."
    ),
    scaling.Cause.FORWARD: (
        "The loss was not finite before it was scaled, so no loss scale can help. Check the data "
        "and the model for inf or NaN in the inputs, the logarithm of 0, a division by 0, and "
        "activations above 65504 in float16. Under XLA, a label outside the model's classes gives "
        "a NaN loss where TensorFlow would raise an error."
    ),
    scaling.Cause.BACKWARD: (
        "The loss was finite but its scaled gradients overflowed, even at the lowest loss scale "
        "that was tried. Look for a function with an infinite derivative at a finite value (a "
        "square root or a norm at 0), or allow a lower loss scale."
    ),
    scaling.Cause.REDUCTION: (
        "Each replica's gradients were finite but their sum was not, even at the lowest loss scale "
        "that was tried. The model is diverging: lower the learning rate, or allow a lower loss "
        "scale."
    ),
    scaling.Cause.UNSCALING: (
        "The gradients overflowed when they were divided by the loss scale, or their norm is "
        "beyond float32's range. The model is diverging: lower the learning rate, or clip the "
        "gradients."
    ),
    scaling.Cause.MODEL: (
        "The gradients are not finite even at the lowest loss scale allowed. Look for a function "
        "with an infinite derivative at a finite value (a square root or a norm at 0), and for an "
        "inf in the forward pass that leaves the loss finite (1 / inf is 0). Compute that layer "
        'with dtype="float32", or allow a lower loss scale.'
    ),
}

# Hints for rules whose scale never moves; {scale} is the loss scale.
FIXED_HINTS = {
    scaling.Cause.BACKWARD: (
        "The loss was finite but its gradients were not, at a fixed loss scale of {scale}. Look "
        "for a function with an infinite derivative at a finite value (a square root or a norm at "
        "0), and for an inf in the forward pass that leaves the loss finite (1 / inf is 0). If the "
        "gradients overflow because of the scale, pass a lower loss_scale, or "
        'loss_scale="dynamic".'
    ),
    scaling.Cause.REDUCTION: (
        "Each replica's gradients were finite but their sum was not, at a fixed loss scale of "
        "{scale}. The model is diverging: lower the learning rate, or pass a lower loss_scale."
    ),
}
UNSCALED_HINTS = {
    scaling.Cause.BACKWARD: (
        "The loss was finite but its gradients were not, although no loss scale was used. Look for "
        "a function with an infinite derivative at a finite value (a square root or a norm at 0), "
        "and for an inf in the forward pass that leaves the loss finite (1 / inf is 0). In half "
        'precision the gradients may also overflow: compute that layer with dtype="float32", or '
        'pass loss_scale="dynamic", which can go below 1.'
    ),
    scaling.Cause.REDUCTION: (
        "Each replica's gradients were finite but their sum was not, although no loss scale was "
        "used. The model is diverging: lower the learning rate."
    ),
}


class SkipLimits(Protocol):
    """The settings of `config.skip_policy.SkipPolicy` that decide when skipped steps end a run."""

    @property
    def max_skips(self) -> int:
        """Number of consecutive skips that ends the run."""

    @property
    def max_consecutive_skips(self) -> int:
        """Number of consecutive skips after which the run counts as stuck."""

    @property
    def on_stuck(self) -> str:
        """What to do with a stuck run: "raise", "hold" or "float32"."""

    @property
    def halting_causes(self) -> tuple[scaling.Cause, ...]:
        """Causes of a skip that end the run at once."""


class TrainingStuckError(RuntimeError):
    """Raised after too many consecutive skipped steps, or for non-finite weights or loss."""


def check_not_stuck(
    steps: StepReport,
    skip_policy: SkipLimits,
    variable_names: list[str],
    record: pathlib.Path | None = None,
    rule: object = None,
) -> None:
    """Raises TrainingStuckError if the run must not continue after these steps.

    Args:
        steps: the latest reports; each field is a NumPy array of shape (steps,).
        skip_policy: which skipped steps, and how many in a row, end the run.
        variable_names: the names of `model.trainable_variables`.
        record: the folder of the latest recorded overflow, or None.
        rule: the loss-scale rule, for what to try; None for a rule whose scale moves.
    """
    skipped = np.flatnonzero(~steps.grads_finite)
    if not skipped.size:
        return
    last = step_of(steps, skipped[-1])
    cause = scaling.Cause(int(last.cause))
    too_many = last.consecutive_skips >= skip_policy.max_skips
    if not too_many and cause not in skip_policy.halting_causes:
        warn_of_skips(steps, skip_policy)
        return
    if cause is scaling.Cause.WEIGHTS:
        problem = f"Training cannot continue: the weights were not finite at step {last.step}."
    elif too_many:
        problem = (
            f"Training is stuck: {last.consecutive_skips} steps in a row were skipped by step "
            f"{last.step}."
        )
    else:
        problem = f"Training cannot continue: the loss was not finite at step {last.step}."
    replay = (
        f" A skipped batch is recorded in {record}: run it again with --mode=replay or "
        "Trainer.replay()."
        if record
        else ""
    )
    raise TrainingStuckError(
        f"{problem} Cause of the last skip: {describe_skip(last, variable_names)}. Latest "
        f"loss scales: {scale_path(steps)}.{replay} {hint_for(cause, rule)}"
    )


def hint_for(cause: scaling.Cause, rule: object) -> str:
    """Returns what to try after skips of a cause; advises a lower scale only if there can be one.

    Args:
        cause: the cause of the last skip.
        rule: the loss-scale rule, or None.
    """
    if isinstance(rule, scaling.NoLossScale):
        return UNSCALED_HINTS.get(cause, HINTS[cause])
    if isinstance(rule, scaling.FixedLossScale):
        scale = power_of_two(rule.loss_scale)
        return FIXED_HINTS.get(cause, HINTS[cause]).format(scale=scale)
    return HINTS[cause]


def warn_of_skips(steps: StepReport, skip_policy: SkipLimits) -> None:
    """Warns if a series of skips begins with a non-finite loss, or a stuck run keeps waiting."""
    starts_row = steps.consecutive_skips == 1
    if np.any(starts_row & (steps.cause == int(scaling.Cause.FORWARD))):
        hint = HINTS[scaling.Cause.FORWARD]
        logging.warning("A step was skipped, cause forward. %s", hint)
    skips = int(steps.consecutive_skips[-1])
    if skip_policy.on_stuck == "hold" and skips >= skip_policy.max_consecutive_skips:
        logging.warning(
            "%d steps in a row were skipped; the run ends at %d.", skips, skip_policy.max_skips
        )


def scale_path(steps: StepReport, longest: int = 8) -> str:
    """Returns the latest loss scales, oldest first; consecutive equal scales appear once.

    Args:
        steps: the latest reports; each field is a NumPy array of shape (steps,).
        longest: the maximum number of scales to return; older scales are left out.

    Example:
        >>> reports = StepReport(*[np.array([4.0, 2.0, 2.0, 1.0])] * len(StepReport._fields))
        >>> scale_path(reports)
        '2^2, 2^1, 2^0'
    """
    scales = steps.loss_scale
    changed = np.flatnonzero(np.diff(scales, prepend=0.0))[-longest:]
    return ", ".join(power_of_two(scales[place]) for place in changed)
