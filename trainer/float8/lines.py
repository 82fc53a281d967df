"""The line of `metrics.jsonl` about float8 tensors: what they held, and what their casts lost."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from scaling.float8.cast import FORMATS, saturates
from trainer.step.float8 import Float8Tensor
from trainer.step.report import StepReport

SPLIT = "float8"  # the kind of line


def float8_line(steps: StepReport, tensors: Sequence[Float8Tensor]) -> dict[str, Any] | None:
    """Returns a line about float8 tensors in the applied steps since the line before.

    Args:
        steps: the reports of these steps, each field a NumPy array of shape (steps, ...).
        tensors: the tensors, in the order of the reports' float8 fields.

    Returns:
        The last step, and for each tensor its format; the largest magnitude that it had; the scale
        that the last applied step used; the number of steps in which something saturated, which the
        largest magnitudes tell; and the shares of its numbers that saturated and that became 0, on
        average, which are None if they were not counted. None if no step was applied, or if there
        are no such tensors.
    """
    applied = steps.grads_finite
    if not tensors or not applied.any():
        return None
    amax, scale = steps.float8_amax[applied], steps.float8_scale[applied]
    shares = [
        field[applied].mean(axis=0) if field.size else np.full(len(tensors), math.nan)
        for field in (steps.float8_saturated, steps.float8_flushed)
    ]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = amax / scale
    found = {
        each.name: {
            "format": each.form,
            "amax": number_or_none(amax[:, at].max()),
            "scale": number_or_none(scale[-1, at]),
            "saturated": number_or_none(shares[0][at]),
            "flushed": number_or_none(shares[1][at]),
            "saturated_steps": int(np.sum(saturates(ratio[:, at], FORMATS[each.form]))),
        }
        for at, each in enumerate(tensors)
        if scale[-1, at] > 0  # else no update has reached it
    }
    return {"step": int(steps.step[-1]), "split": SPLIT, "float8": found} if found else None


def number_or_none(value: np.floating[Any]) -> float | None:
    """Returns a number for a JSON file, in which NaN and inf are null."""
    return float(value) if np.isfinite(value) else None
