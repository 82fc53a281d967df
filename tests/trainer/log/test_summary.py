"""The numbers of intervals and runs, and the text that is printed."""

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scaling
from trainer import StepReport, Totals, TrainSummary
from trainer.log.summary import (
    BestResult,
    History,
    check_metric_names,
    format_number,
    power_of_two,
    summarize,
)
from trainer.log.writers import RunWriters
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
        "at step 12 after 4 steps in 1.2 s: 12 applied, 0 skipped, loss_scale 2^0; learning-rate "
        "schedule 2 steps behind: skipped steps do not advance it; best loss 0.1000 at step 8; "
        "checkpoint runs/ckpt-12 (2.0 kB, including 500 B for the data position)"
    )


@given(st.integers(-126, 127))
def test_every_power_of_two_is_shown_exactly(exponent):
    """A loss scale is shown as a power of two, fractions included; any other, of NumPy, as it is."""
    assert power_of_two(2.0**exponent) == f"2^{exponent}"
    assert power_of_two(np.float32(1000.0)) == "1000.0"


@pytest.mark.parametrize("value", [1e-30, 3.3e-6, 0.0042, 0.5, 12.5, 999.5, 123456.0, 1e30])
def test_a_number_can_be_read_back(value):
    """No number becomes 0 or loses more than a percent, and none is long."""
    for signed in (value, -value):
        assert float(format_number(signed)) == pytest.approx(signed, rel=0.01)
        assert len(format_number(signed)) <= 10


@pytest.mark.parametrize(
    "name", ["loss", "step", "learning_rate", "learning_rate/sgd", "val_loss", "val_accuracy"]
)
def test_a_metric_may_not_hide_another_number(name):
    """A metric named like a number of the log, or like another metric's evaluation, is refused."""
    check_metric_names(["accuracy", "val", "loss_2"])
    with pytest.raises(ValueError, match="`metrics`"):
        check_metric_names(["accuracy", name])


# The history of a run.

LINES = [
    {"step": 0, "split": "run", "settings": {}},
    {"step": 2, "split": "train", "loss": 3.0, "accuracy": None},
    {"step": 3, "split": "validation", "loss": 2.0},
    {"step": 4, "split": "train", "loss": 9.0, "accuracy": 0.5},
    {"step": 4, "split": "recovery", "restored": 3},
    {"step": 4, "split": "train", "loss": 1.0, "accuracy": 0.75},
    {"step": 4, "split": "validation", "loss": 1.5},
]


def summary_of(history):
    """A summary that holds a history as it is now."""
    return TrainSummary(4, 4, Totals(4, {}), 1.0, 0.1, None, snapshot=history.snapshot())


def history_of(tmp_path, step=9):
    """The history in a file with `LINES` and an incomplete line."""
    text = "".join(json.dumps(line) + "\n" for line in LINES) + '{"step": 4'
    (tmp_path / "metrics.jsonl").write_text(text)
    history = History()
    history.read(RunWriters(tmp_path).rewind(step))
    return history


def test_inf_is_nan_as_in_the_file():
    """L12: the history, and the best result, are those of a run that was resumed from the file."""
    history = History()
    history.add("validation", 1, {"loss": math.inf})
    history.add("validation", 2, {"loss": 3.0})
    snapshot = history.snapshot()

    assert np.isnan(snapshot.arrays()["val_loss"]).tolist() == [True, False]
    assert snapshot.best("loss", -1).step == 2


def test_a_history_is_a_dict_of_arrays(tmp_path):
    """Each name has an array as long as its steps; what a line lacks is NaN; a step that was
    repeated after a rollback counts once.
    """
    history = summary_of(history_of(tmp_path)).history

    assert [*history] == ["step", "loss", "accuracy", "val_step", "val_loss"]
    assert {name: column.dtype.name for name, column in history.items()} == {
        name: "int64" if name.endswith("step") else "float64" for name in history
    }
    assert [history[name].tolist() for name in ("step", "loss")] == [[2, 4], [3.0, 1.0]]
    assert [history[name].tolist() for name in ("val_step", "val_loss")] == [[3, 4], [2.0, 1.5]]
    np.testing.assert_array_equal(history["accuracy"], [math.nan, 0.75])


def test_a_summary_keeps_its_history(tmp_path):
    """A summary is not changed by what the run does later, and can be pickled."""
    history = history_of(tmp_path, step=3)
    summary = summary_of(history)
    history.add("train", 5, {"loss": 0.5})
    history.rewind(0)
    history.add("train", 1, {"loss": 7.0})

    assert summary.history["loss"].tolist() == [3.0]
    assert pickle.loads(pickle.dumps(summary)).history["val_loss"].tolist() == [2.0]  # noqa: S301
    assert summary_of(history).history["loss"].tolist() == [7.0]


def test_a_run_without_log_lines_has_an_empty_history():
    """Without steps there are no arrays."""
    assert summary_of(History()).history == {}
    assert TrainSummary(0, 0, Totals(0, {}), 1.0, 0.1, None).history == {}


@pytest.mark.parametrize(("sign", "step"), [(1.0, 4), (-1.0, 2)])
def test_the_best_evaluation(sign, step):
    """The best value wins, and the first of several; NaN never does, and neither does a missing one."""
    history = History()
    rows = {1: {"loss": math.nan}, 2: {"loss": 2.0}, 3: {"other": 0.0}, 4: {"loss": 0.5}}
    assert history.snapshot().best("loss", sign) is None
    for each, results in {**rows, 5: {"loss": 0.5}, 6: {"loss": 2.0}}.items():
        history.add("validation", each, results)
    best = history.snapshot().best("loss", sign)

    assert best == BestResult("loss", rows[step]["loss"], step, rows[step])
    assert str(best) == f"loss {rows[step]['loss']:.4f} at step {step}"


@pytest.mark.extras
def test_a_history_as_a_table(tmp_path):
    """The table has a row for each step with numbers, in order, and is NaN where there are none."""
    pytest.importorskip("pandas", reason="pandas is in the extra pandas")
    table = summary_of(history_of(tmp_path)).to_pandas()

    assert [*table.columns] == ["loss", "accuracy", "val_loss"]
    assert (table.index.name, [*table.index]) == ("step", [2, 3, 4])
    expected = [[3.0, math.nan, math.nan], [math.nan, math.nan, 2.0], [1.0, 0.75, 1.5]]
    np.testing.assert_array_equal(table.to_numpy(), expected)
    assert TrainSummary(0, 0, Totals(0, {}), 1.0, 0.1, None).to_pandas().empty


def test_the_best_on_other_data_does_not_count():
    """Once a run evaluates on other data, its best result is one on that data; also in a program that
    was started again after some steps on it.
    """
    for step in (20, 35):
        history = History()
        history.evaluate_on("first", 0, 20)
        for at, loss in ((10, 1.0), (20, 0.5), (30, 3.0), (35, 2.0)):
            if at <= step:
                history.add("validation", at, {"loss": loss})
        assert history.snapshot().best("loss", 1).step == 20
        before = history.snapshot()
        history.evaluate_on("second", step, 40)
        assert before.best("loss", 1).step == 20
        best = history.snapshot().best("loss", 1)
        assert (best and best.step) == (None if step == 20 else 35)
        history.evaluate_on("second", step, 50)
        history.add("validation", 40, {"loss": 1.5})
        assert history.snapshot().best("loss", 1).step == 40
