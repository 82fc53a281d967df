"""No run is silently stuck: one that must not go on ends, and says why and what to try."""

from typing import Any

import numpy as np
from absl import logging

import scaling
from trainer.config.skip_policy import SkipPolicy
from trainer.log.summary import power_of_two
from trainer.step.report import StepReport, describe_skip, step_of

HINTS = {
    scaling.Cause.WEIGHTS: (
        "The weights were inf or NaN before the step began, so no step can mend them. Go on from "
        "a checkpoint before that, with a lower learning rate or with clipping."
    ),
    scaling.Cause.FORWARD: (
        "The loss itself was not finite before it was scaled, so no loss scale can help. Look at "
        "the data and the model: inf or NaN in the inputs, a log or a division of 0, activations "
        "beyond 65504 in float16. Under XLA a label outside the model's classes gives a NaN loss, "
        "where TensorFlow would raise."
    ),
    scaling.Cause.BACKWARD: (
        "The loss was finite, but its scaled gradients overflow, at the lowest scale tried too. "
        "Look for a derivative that is infinite where the function is not (a square root or a norm "
        "at 0), or allow a lower scale."
    ),
    scaling.Cause.REDUCTION: (
        "Each replica's gradients were finite, their sum was not, at the lowest scale tried too. "
        "The model is diverging: lower the learning rate, or allow a lower scale."
    ),
    scaling.Cause.UNSCALING: (
        "The gradients were finite until they were divided by the loss scale, or their norm is "
        "beyond float32. The model is diverging: lower the learning rate, or clip."
    ),
    scaling.Cause.MODEL: (
        "The gradients overflow at `min_scale` too, so no loss scale can help. Look for a "
        "derivative that is infinite where the function is not (a square root or a norm at 0), "
        'compute that layer with dtype="float32", or allow a lower scale.'
    ),
}


class TrainingStuckError(RuntimeError):
    """The run must not go on: too many skipped steps in a row, or a loss or weights not finite."""


def check_alive(
    steps: StepReport, skip_policy: SkipPolicy, variable_names: list[str], record: Any = None
) -> None:
    """Raises TrainingStuckError if the last of these steps was one after which to stop.

    Args:
        steps: the latest reports, each field a NumPy array of shape (steps,).
        skip_policy: the user's choices.
        variable_names: of `model.trainable_variables`.
        record: where the last recorded overflow is kept, or None.
    """
    skipped = np.flatnonzero(~steps.grads_finite)
    if not skipped.size:
        return
    last = step_of(steps, skipped[-1])
    cause = scaling.Cause(int(last.cause))
    stuck = last.consecutive_skips >= skip_policy.max_skips
    if not stuck and cause not in skip_policy.halting_causes:
        warn(steps, skip_policy)
        return
    if cause is scaling.Cause.WEIGHTS:
        rule = "`weights` must be finite"
    elif stuck:
        rule = "`max_consecutive_skips` must not be reached"
    else:
        rule = "`compute_loss` must return finite losses"
    kept = f" The batch is kept in {record}: run it again with --mode=replay." if record else ""
    raise TrainingStuckError(
        f"{rule}; got {last.consecutive_skips} skipped steps in a row by step {last.step}, "
        f"the last one {describe_skip(last, variable_names)}. The loss scale went "
        f"{scale_path(steps)}.{kept} {HINTS[cause]}"
    )


def warn(steps: StepReport, skip_policy: SkipPolicy) -> None:
    """Says once per row that losses are not finite, and at every log that a run only waits."""
    first_of_row = steps.consecutive_skips == 1
    if np.any(first_of_row & (steps.cause == int(scaling.Cause.FORWARD))):
        hint = HINTS[scaling.Cause.FORWARD]
        logging.warning("A step was skipped, cause forward. %s", hint)
    in_a_row = int(steps.consecutive_skips[-1])
    if skip_policy.on_stuck == "hold" and in_a_row >= skip_policy.max_consecutive_skips:
        logging.warning(
            "%d steps in a row were skipped; the run ends at %d.", in_a_row, skip_policy.max_skips
        )


def scale_path(steps: StepReport, longest: int = 8) -> str:
    """Returns the loss scales of the latest steps, each once for as long as it stayed.

    Example:
        >>> reports = StepReport(*[np.array([4.0, 2.0, 2.0, 1.0])] * len(StepReport._fields))
        >>> scale_path(reports)
        '2^2, 2^1, 2^0'
    """
    scales = steps.loss_scale
    changed = np.flatnonzero(np.diff(scales, prepend=0.0))[-longest:]
    return ", ".join(power_of_two(scales[place]) for place in changed)
