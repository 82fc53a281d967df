"""Summaries of intervals and runs: the numbers, and the text that is printed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scaling
from trainer import StepReport, Totals
from trainer.log.history import BestResult
from trainer.log.summary import (
    TrainSummary,
    check_metric_names,
    power_of_two,
    summarize,
)
from trainer.step import TrainState


def reports(**fields):
    """The reports of two steps, or more if `loss` has more; each field that is not given is 1."""
    ones = {name: np.ones(len(fields.get("loss", [0, 0]))) for name in StepReport._fields}
    given_fields = {name: np.array(values) for name, values in fields.items()}
    return StepReport(**ones | {"grads_finite": np.array([True, True])} | given_fields)


def test_totals_add_up():
    """L10: attempted = applied + skipped, by construction."""
    state = TrainState(scaling.NoLossScale())
    state.outcomes.assign([5, 0, 1, 0, 2, 0, 0])
    totals = Totals.from_state(state)

    assert (totals.attempted, totals.applied, totals.skipped) == (8, 5, 3)
    assert str(totals) == "3 skipped (1 forward, 2 reduction)"
    assert math.isclose(totals.applied / totals.attempted, 0.625)


def test_totals_mention_retries_and_float32_steps():
    """Retries and float32 steps are in the text only if there were any."""
    assert str(Totals(4, {})) == "0 skipped"
    assert str(Totals(4, {}, retries=2, float32_steps=1)) == "0 skipped, 2 retries, 1 in float32"


def test_means_are_over_applied_steps():
    """The loss of a skipped step is not in the mean; the last loss scale is."""
    steps = reports(
        step=[7, 8], loss=[3.0, math.inf], grads_finite=[True, False], loss_scale=[4.0, 2.0]
    )
    interval = summarize(steps, Totals(7, {"backward": 1}), {"accuracy": 0.5}, None, 1.0)

    assert (interval.step, interval.loss, interval.loss_scale) == (8, 3.0, 2.0)
    assert (interval.applied, interval.skipped) == (7, 1)
    assert interval.metrics == {"accuracy": 0.5}
    assert math.isnan(interval.examples_per_second)


def test_means_are_over_examples():
    """The loss counts each step with the weight of its batch, and `model.losses` with its number of
    examples. The gradient norm counts every step once. Where no batch has weight, the loss is the applied 0.
    """
    numbers = {"loss": [1.0, 3.0, 9.0], "regularization_loss": [2.0, 4.0, 9.0]}
    numbers |= {"gradient_norm": [1.0, 2.0, 9.0], "grads_finite": [True, True, False]}
    sizes = {"examples": np.int64([80, 20, 50]), "weight": np.float32([10.0, 30.0, 50.0])}
    interval = summarize(reports(**numbers | sizes), Totals(2, {}), {}, None, 1.0)
    without = {"loss": [0.0, 0.0, 9.0], "weight": np.float32([0, 0, 50])}
    weightless = summarize(reports(**numbers | sizes | without), Totals(2, {}), {}, None, 1.0)

    assert interval.loss == (10 * 1.0 + 30 * 3.0) / 40
    assert interval.regularization_loss == pytest.approx((80 * 2.0 + 20 * 4.0) / 100)
    assert interval.gradient_norm == 1.5
    assert weightless.loss == 0.0


def test_an_interval_without_an_update_has_no_means():
    """If every step of an interval was skipped, its means and metrics are NaN."""
    steps = reports(loss=[1.0, 2.0], grads_finite=[False, False])
    interval = summarize(steps, Totals(0, {"backward": 2}), {"accuracy": 0.5}, None, 1.0)
    scalars = interval.scalars()
    means = ("loss", "regularization_loss", "gradient_norm", "accuracy")

    assert all(math.isnan(scalars[name]) for name in means)
    assert "step" not in scalars


def test_the_speed_is_that_of_the_timed_steps():
    """Examples, steps and waiting are divided by the seconds that the timed steps took."""
    timed = reports(examples=[30, 10], data_wait_secs=[0.5, 0.5])
    interval = summarize(reports(), Totals(2, {}), {}, timed, 4.0)

    assert interval.examples_per_second == 10.0
    assert interval.steps_per_second == 0.5
    assert interval.data_wait == 0.25


def test_the_last_line_of_a_run():
    """The summary names the step, the duration, the checkpoint and its size, and what is notable."""
    summary = TrainSummary(12, 4, Totals(9, {"backward": 3}), 2.0**14, 1.25, checkpoint=None)
    long = TrainSummary(
        *(12, 4, Totals(12, {}), 1.0, 1.25, "runs/ckpt-12"),
        checkpoint_bytes=2000,
        position_bytes=500,
        best=BestResult("loss", 0.1, 8, {"loss": 0.1}),
        schedule_lag=2,
    )

    assert str(summary) == (
        "at step 12 after 4 steps in 1.2 s: 9 applied, 3 skipped (3 backward), loss_scale 2^14"
    )
    assert str(long) == (
        "at step 12 after 4 steps in 1.2 s: 12 applied, 0 skipped, loss_scale 2^0; the schedule is "
        "2 updates behind the steps; best loss 0.1000 at step 8; checkpoint runs/ckpt-12 (2.0 kB, "
        "including 500 B for the data position)"
    )


@given(st.integers(-126, 127))
def test_every_power_of_two_is_shown_exactly(exponent):
    """A loss scale is shown as a power of two, fractions included."""
    assert power_of_two(2.0**exponent) == f"2^{exponent}"


def test_a_scale_between_powers_is_a_plain_number():
    """Reports hold numbers of NumPy."""
    assert power_of_two(np.float32(1000.0)) == "1000.0"


@pytest.mark.parametrize(
    "name", ["loss", "step", "learning_rate", "learning_rate/sgd", "val_loss", "val_accuracy"]
)
def test_a_metric_may_not_hide_another_number(name):
    """A metric named like a number of the log, or like another metric's evaluation, is refused."""
    check_metric_names(["accuracy", "val", "loss_2"])
    with pytest.raises(ValueError, match="`metrics`"):
        check_metric_names(["accuracy", name])
