"""No run is silently stuck: too many skipped steps in a row end it, and say why."""

import numpy as np
from absl import logging

import scaling
from trainer.report import StepReport

HINTS = {
    scaling.Cause.FORWARD: (
        "The loss itself was not finite before it was scaled, so no loss scale can help. Look at "
        "the data and the model: inf or NaN in the inputs, a log or a division of 0, activations "
        "beyond 65504 in float16. Under XLA a label outside the model's classes gives a NaN loss, "
        "where TensorFlow would raise."
    ),
    scaling.Cause.BACKWARD: (
        "The loss was finite, but its scaled gradients overflow, at the lowest scale tried too. "
        "Look for a derivative that is infinite where the function is not (a square root or a norm "
        "at 0), or lower `min_scale`."
    ),
    scaling.Cause.REDUCTION: (
        "Each replica's gradients were finite, their sum was not, at the lowest scale tried too. "
        "The model is diverging: lower the learning rate, or lower `min_scale`."
    ),
    scaling.Cause.UNSCALING: (
        "The gradients were finite until they were divided by the loss scale, or their norm is "
        "beyond float32. The model is diverging: lower the learning rate, or clip."
    ),
}


class TrainingStuckError(RuntimeError):
    """Too many steps in a row were skipped."""


def skips_in_a_row(before: int, grads_finite: np.ndarray) -> tuple[int, int]:
    """Counts skipped steps in a row.

    Args:
        before: how many steps had been skipped in a row before these.
        grads_finite: shape (steps,), bool.

    Returns:
        The longest run that any of these steps belongs to, and the run they end in.

    Example:
        >>> skips_in_a_row(2, np.array([False, True, False]))
        (3, 1)
    """
    longest = run = before
    for finite in grads_finite:
        run = 0 if finite else run + 1
        longest = max(longest, run)
    return longest, run


def check_alive(steps: StepReport, before: int, bound: int) -> int:
    """Raises TrainingStuckError if `bound` steps in a row were skipped.

    Args:
        steps: the latest reports, each field a NumPy array of shape (steps,).
        before: how many steps had been skipped in a row before these.
        bound: the user's `max_consecutive_skips`.

    Returns:
        How many steps have been skipped in a row now.
    """
    longest, now = skips_in_a_row(before, steps.grads_finite)
    skipped = np.flatnonzero(~steps.grads_finite)
    if not skipped.size:
        return now
    cause = scaling.Cause(int(steps.cause[skipped[-1]]))
    if cause is scaling.Cause.FORWARD and before == 0:
        logging.warning("A step was skipped, cause forward. %s", HINTS[cause])
    if longest >= bound:
        raise TrainingStuckError(
            f"`max_consecutive_skips` must not be reached; got {longest} skipped steps in a row by "
            f"step {steps.step[-1]}, the last at loss scale {steps.loss_scale[-1]:g}, cause "
            f"{cause.name.lower()}. {HINTS[cause]}"
        )
    return now
