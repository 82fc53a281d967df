"""The report of a step: its fields, and the description of a skip."""

import numpy as np
import pytest
import tensorflow as tf

from scaling import Cause
from trainer.step.report import (
    Outcome,
    StepReport,
    describe_skip,
    outcome_spec,
    report_spec,
    step_of,
)

NAMES = ["a/kernel", "b/kernel"]


def skipped(cause, replica=-1, variable=-1, infs=0, nans=0):
    """The report of a skipped step."""
    numbers = dict.fromkeys(StepReport._fields, 0) | {
        "cause": int(cause),
        "bad_replica": replica,
        "bad_variable": variable,
        "inf_count": infs,
        "nan_count": nans,
    }
    return StepReport(**numbers)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (
            skipped(Cause.WEIGHTS, variable=1, nans=2),
            "weights, in the weights of b/kernel: 0 inf, 2 NaN",
        ),
        (
            skipped(Cause.FORWARD, replica=2, infs=1),
            "forward, in the losses on replica 2: 1 inf, 0 NaN",
        ),
        (
            skipped(Cause.FORWARD),
            "forward, in model.losses or a value that a layer would assign: 0 inf, 0 NaN",
        ),
        (
            skipped(Cause.BACKWARD, replica=0, variable=0, infs=3),
            "backward, in a/kernel on replica 0: 3 inf, 0 NaN",
        ),
        (
            skipped(Cause.MODEL, replica=0, variable=0, infs=3),
            "model, in a/kernel on replica 0: 3 inf, 0 NaN",
        ),
        (
            skipped(Cause.REDUCTION, variable=1, infs=1),
            "reduction, in b/kernel: 1 inf, 0 NaN",
        ),
        (
            skipped(Cause.UNSCALING, variable=0, infs=1),
            "unscaling, in the unscaled gradient of a/kernel: 1 inf, 0 NaN",
        ),
        (
            skipped(Cause.UNSCALING),
            "unscaling, in the global norm of the gradients: 0 inf, 0 NaN",
        ),
    ],
)
def test_describe_skip(report, expected):
    """L17: the text names the cause, the variable, the replica and the counts."""
    assert describe_skip(report, NAMES) == expected


def test_a_report_ends_with_the_fields_of_an_outcome():
    """An outcome fills the last fields of a report, in the same order."""
    assert StepReport._fields[-len(Outcome._fields) :] == Outcome._fields
    assert report_spec(3, 2)[-len(Outcome._fields) :] == outcome_spec(3, 2)
    assert all(isinstance(spec, tf.TensorSpec) for spec in report_spec())


@pytest.mark.parametrize("recorded", [0, 3])
def test_recorded_fields_have_rows_only_if_asked_for(recorded):
    """Magnitudes are counted for every variable, or the fields are empty."""
    spec = outcome_spec(recorded, float8=2)

    assert spec.float8_amax.shape == spec.float8_scale.shape == [2]
    assert spec.float8_saturated.shape == spec.float8_flushed.shape == [2 if recorded else 0]
    assert spec.underflow.shape == [recorded]
    assert (spec.magnitude_counts.shape[0] > 0) == bool(recorded)
    assert all(tf.TensorShape([]) == field.shape for field in spec[:10])


def test_step_of():
    """One report is taken out of those of many steps."""
    steps = StepReport(*(np.arange(4) + place for place, _ in enumerate(StepReport._fields)))

    assert list(step_of(steps, 2)) == [2 + place for place, _ in enumerate(StepReport._fields)]
