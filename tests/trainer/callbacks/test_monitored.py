"""Callbacks that follow one number: its name, which value is best, and whether the run has it."""

import math

import pytest
from helpers import Linear, slopes

from trainer.callbacks import EarlyStopping
from trainer.callbacks.monitored import Monitored


def test_the_best_value():
    """Lower or higher by more than `min_delta`, and never NaN."""
    lowest, highest = Monitored(min_delta=0.5), Monitored("val_accuracy")
    for step, value in enumerate([math.nan, 3.0, 2.5, 2.25, math.nan]):
        lowest.took_best(step, value)
        highest.took_best(step, value)

    assert (lowest.best, lowest.best_step) == (2.25, 3)
    assert (highest.best, highest.best_step) == (3.0, 1)


def test_a_name_that_says_nothing_needs_a_mode():
    """Whether low or high is best is not guessed."""
    with pytest.raises(ValueError, match="`mode` must be"):
        EarlyStopping("val_score")


@pytest.mark.parametrize(
    ("monitor", "arguments"), [("val_los", {"eval_data": slopes(1.0)}), ("val_loss", {})]
)
def test_a_number_that_the_run_does_not_have_is_an_error(monitor, arguments):
    """It is found before the first step, and not by a run that never stops."""
    line = Linear(callbacks=[EarlyStopping(monitor, mode="min")], verbose=False)

    with pytest.raises(ValueError, match="`monitor` must be one of loss"):
        line.train(slopes(1.0), 1, global_batch=1, **arguments)


def test_the_best_of_another_number_is_not_taken_over():
    """A run that is resumed with another number, or mode, begins to look for the best anew."""
    before = EarlyStopping("val_accuracy", patience=2)
    before.best, before.best_step, before.wait = 0.5, 3, 1
    same, other = EarlyStopping("val_accuracy", patience=2), EarlyStopping("val_loss", patience=2)
    for callback in (same, other):
        callback.load_state_dict(before.state_dict())

    assert (same.best, same.best_step, same.wait) == (0.5, 3, 1)
    assert (other.best, other.best_step, other.wait) == (None, None, 0)
