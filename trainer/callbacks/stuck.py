"""Raises an error if a run must not continue; the error says why, and what to try."""

import pathlib

import numpy as np
from absl import logging

import scaling
from trainer.log.summary import power_of_two
from trainer.step.report import StepReport, describe_skip, step_of
from trainer.step.settings import Skips

# What to try after skipped steps of a cause.
DIVERGING = "the run diverges: lower the learning rate, or clip the gradients"
HINTS = {
    scaling.Cause.WEIGHTS: "go on from an earlier checkpoint, with a lower learning rate",
    scaling.Cause.FORWARD: (
        "look for inf or NaN in the data, the logarithm of 0, a division by 0, a label that is no "
        "class and, in float16, activations above 65504"
    ),
    scaling.Cause.BACKWARD: (
        "look for an infinite derivative, as of a square root at 0, or allow a lower loss scale"
    ),
    scaling.Cause.REDUCTION: DIVERGING,
    scaling.Cause.UNSCALING: DIVERGING,
    scaling.Cause.MODEL: (
        "look for an infinite derivative, as of a square root at 0, or compute that layer in "
        "float32: no loss scale helps"
    ),
}


class TrainingStuckError(RuntimeError):
    """Raised after too many consecutive skipped steps, or for non-finite weights or loss."""


def check_not_stuck(
    steps: StepReport,
    settings: Skips,
    variable_names: list[str],
    record: pathlib.Path | None = None,
) -> None:
    """Raises TrainingStuckError if the run must not continue after these steps.

    Args:
        steps: the latest reports; each field is a NumPy array of shape (steps,).
        settings: which skipped steps, and how many in a row, end the run.
        variable_names: the names of `model.trainable_variables`.
        record: the folder of the latest recorded overflow, or None.
    """
    if steps.grads_finite.all():
        return
    halting = np.isin(steps.cause, [int(cause) for cause in settings.halting_causes])
    too_many_yet = steps.consecutive_skips >= settings.max_skips
    ends = np.flatnonzero(halting | too_many_yet)
    if not ends.size:  # warns if a series of skips begins with a bad loss, or goes on
        starts_row = steps.consecutive_skips == 1
        if np.any(starts_row & (steps.cause == int(scaling.Cause.FORWARD))):
            logging.warning("step skipped, cause forward: %s", HINTS[scaling.Cause.FORWARD])
        skips = int(steps.consecutive_skips[-1])
        if settings.on_stuck == "hold" and skips >= settings.max_consecutive:
            logging.warning(
                "%d steps in a row were skipped; the run ends at %d", skips, settings.max_skips
            )
        return
    # Parameter servers have taken further steps by then.
    steps = StepReport(*(field[: ends[0] + 1] for field in steps))
    last = step_of(steps, ends[0])
    cause = scaling.Cause(int(last.cause))
    if cause is scaling.Cause.WEIGHTS:
        problem = f"the weights were not finite at step {last.step}"
    elif too_many_yet[ends[0]]:
        problem = f"{last.consecutive_skips} steps in a row were skipped by step {last.step}"
    else:
        problem = f"the loss was not finite at step {last.step}"
    replay = f"; Trainer.replay({str(record)!r}) repeats one" if record else ""
    raise TrainingStuckError(
        f"{problem}, cause {describe_skip(last, variable_names)}; loss scales {scale_path(steps)}: "
        f"{HINTS[cause]}{replay}"
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
