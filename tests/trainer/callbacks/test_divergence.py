"""Divergence: what counts as one, how it is detected, and the errors about it."""

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainer import Divergence
from trainer.callbacks.divergence import LossWatch
from trainer.step.report import StepReport


def reports(losses, first=1, applied=None):
    """Returns the reports of one step per loss."""
    applied = np.ones(len(losses), bool) if applied is None else np.array(applied)
    fields = dict.fromkeys(StepReport._fields, np.zeros(len(losses)))
    fields |= {
        "step": np.arange(first, first + len(losses)),
        "loss": np.array(losses, np.float32),
        "grads_finite": applied,
        "weight": np.ones(len(losses), np.float32),
    }
    return StepReport(**fields)


def test_the_first_divergence_of_applied_steps_is_detected():
    """Skipped steps do not count, and a divergence by `rise` begins with the first step of its window."""
    bound = LossWatch(Divergence(loss_above=2.0))
    assert bound.detect(reports([1.0, 2.0, 9.0], applied=[True, True, False])) is None
    found = bound.detect(reports([1.0, 3.0, 9.0], first=4))
    assert (found.first, found.last, found.what) == (5, 5, "loss 3 above 2 at step 5")

    rise = LossWatch(Divergence(rise=2.0, window=2))
    assert rise.detect(reports([1.0, 1.0, 2.0])) is None
    found = rise.detect(reports([2.5], first=4))
    assert (found.first, found.last) == (3, 4)
    assert found.what == (
        "mean loss 2.25 over steps 3 to 4, above 2: the lowest mean so far is 1, with rise=2"
    )


@given(
    st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=20),
    st.integers(1, 3),
    st.sampled_from([1.5, 2.0, 3.0]),
)
@example([-10.0, -10.0, 10.0, 11.0], 1, 3.0)  # log densities
@example([0.0, 0.5], 1, 2.0)  # a hinge loss that was 0
def test_a_rise_is_measured_from_losses_of_any_sign(losses, window, rise):
    """A run that does not get worse has not diverged, whatever the sign of its losses; it has if the
    mean rises from the lowest by more than rise - 1 times its size.
    """
    sinking = LossWatch(Divergence(rise=rise, window=window))
    assert sinking.detect(reports(sorted(losses, reverse=True))) is None

    means = [np.mean(losses[at : at + window]) for at in range(len(losses) - window + 1)]
    lowest = np.minimum.accumulate(means)
    ends = [
        at
        for at in range(1, len(means))
        if lowest[at - 1] != 0 and means[at] - lowest[at - 1] > (rise - 1) * abs(lowest[at - 1])
    ]
    found = LossWatch(Divergence(rise=rise, window=window)).detect(reports(losses, first=0))
    assert (found and found.last) == (ends[0] + window - 1 if ends else None)


def test_a_restored_watch_continues_where_it_was_saved():
    """Its state survives JSON and holds everything that it remembers."""
    losses = [3.0, 1.0, 1.5, 1.0, 2.5, 2.0, 9.0]
    whole = LossWatch(Divergence(rise=3.0, window=2))
    expected = [whole.detect(reports([loss], first=place)) for place, loss in enumerate(losses)]
    assert expected[-1] is not None
    for cut in range(len(losses)):
        before = LossWatch(Divergence(rise=3.0, window=2))
        found = [before.detect(reports([loss], first=i)) for i, loss in enumerate(losses[:cut])]
        after = LossWatch(Divergence(rise=3.0, window=2))
        after.set_state(json.loads(json.dumps(before.state())))
        found += [
            after.detect(reports([loss], first=i + cut)) for i, loss in enumerate(losses[cut:])
        ]

        assert found == expected


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({}, "loss_above"), ({"rise": 1.0}, "rise"), ({"rise": 2.0, "window": 0}, "window")],
)
def test_what_counts_as_divergence_is_checked(arguments, name):
    """At least one bound is needed, and a rise is above 1."""
    with pytest.raises(ValueError, match=f"`{name}`"):
        Divergence(**arguments)


def test_a_step_without_weight_has_no_mean_loss():
    """Its loss is reported as 0, which is no low mean."""
    watch = LossWatch(Divergence(rise=1.5, window=2))
    steps = reports([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    weights = np.array([1, 0, 1, 1, 0, 1], np.float32)

    assert watch.detect(steps._replace(weight=weights)) is None
