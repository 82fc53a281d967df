"""Callbacks that follow one number: its name, which value is best, and what they do with it."""

import math

import numpy as np
import pytest
from helpers import Linear, slopes

from trainer import Callback, Updates
from trainer.callbacks import BestWeights, EarlyStopping, ReduceLROnPlateau
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


# BestWeights.


def test_best_weights_are_kept_in_memory():
    """The weights of the best value can be restored after the run."""
    best = BestWeights("loss", mode="max")
    line = Linear(callbacks=[best], log_interval=1, verbose=False)
    with pytest.raises(RuntimeError, match="'loss' had no value"):
        best.restore()
    line.train(slopes(1.0), 3, global_batch=1)  # losses 1, 0, -1, each before its update
    assert (best.best, best.best_step, line.weight) == (1.0, 1, -2.0)
    best.restore()
    assert line.weight == 0.0


# EarlyStopping.

# The loss is weight * slope. With slope 1 and a rate of 1 the weight falls by 1 in each step, so
# the loss of evaluation with slope -1 is lowest before the first step that is evaluated.
DATA, WORSE = slopes(1.0), slopes(-1.0)


def run(*targets, folder=None, patience=2, eval_data=WORSE, **arguments):
    """A trainer that has trained to the targets, each in a trainer of its own if it has a folder."""
    line = None
    for target in targets:
        if line is None or folder:
            stopping = EarlyStopping(patience=patience, restore_best_weights=True)
            line = Linear(
                callbacks=[stopping], model_dir=folder, steps_per_loop=1, verbose=False, **arguments
            )
        line.train(DATA, steps=target, global_batch=1, eval_data=eval_data, eval_interval=1)
    return line, stopping


@pytest.mark.thorough
def test_it_ends_a_run_and_restores_the_best_weights():
    """After `patience` evaluations without improvement the run ends with the weights of the best,
    and nothing was evaluated twice.
    """
    evaluations = []

    class Count(Callback):
        def on_evaluate_end(self, step, results):
            evaluations.append((step, results["loss"]))

    stopping, count = EarlyStopping(patience=2, restore_best_weights=True), Count()
    line = Linear(callbacks=[stopping, count], verbose=False)
    line.train(DATA, steps=9, global_batch=1, eval_data=WORSE, eval_interval=1)

    assert evaluations == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert (stopping.best, stopping.best_step, stopping.stopped_step) == (0.0, 1, 3)
    assert line.weight == 0.0


@pytest.mark.slow
def test_a_resumed_run_stops_where_an_uninterrupted_one_does(tmp_path):
    """Its checkpoint has the counts and the best weights. A run that was stopped stops at once,
    and goes on from the last weights with more patience.
    """
    whole, there = run(9)
    resumed, here = run(2, 9, folder=tmp_path)

    assert here.state_dict() == there.state_dict()
    assert resumed.weight == whole.weight == 0.0
    assert resumed.totals.attempted == 3

    again, stopping = run(9, folder=tmp_path)
    assert again.totals.attempted == 3
    assert (again.weight, stopping.stopped_step) == (0.0, 3)

    longer, stopping = run(9, folder=tmp_path, patience=3)
    assert (longer.totals.attempted, stopping.stopped_step) == (4, 4)
    assert stopping._last_weights[0].item() == -3.0  # one more step from the last weight, -2


def test_a_later_call_goes_on_from_the_last_weights():
    """Calls add up to one run, although the best weights were restored in between. Weights that
    were changed in between stay.
    """
    line, stopping = run(2, patience=5)
    assert line.weight == 0.0  # the best, after step 1; the last is -1
    line.train(DATA, steps=3, global_batch=1, eval_data=WORSE, eval_interval=1)
    assert stopping._last_weights[0].item() == -2.0

    line.model.set_weights([np.array([[7.0]])])
    line.train(DATA, steps=4, global_batch=1, eval_data=WORSE, eval_interval=1)
    assert stopping._last_weights[0].item() == 6.0


@pytest.mark.thorough  # takes seconds
def test_the_best_average_is_restored_too():
    """With `ema_momentum`, evaluations use the average: what is evaluated afterwards is the best."""
    line, stopping = run(9, updates=Updates(ema_momentum=0.5), patience=1)

    assert line.evaluate(WORSE, global_batch=1)["loss"] == stopping.best
    assert line.evaluate(WORSE, global_batch=1, averaged=False)["loss"] == -line.weight


def test_log_lines_can_be_monitored():
    """A name without "val_" is that of a number in log lines; NaN counts as no improvement."""
    stopping = EarlyStopping("loss", patience=2)
    line = Linear(callbacks=[stopping], log_interval=1, verbose=False)
    line.train(slopes(np.nan), steps=9, global_batch=1)

    assert (line.totals.attempted, stopping.best) == (2, None)


@pytest.mark.thorough  # takes seconds
def test_two_that_restore_put_back_the_last_weights():
    """The second one restores over what the first one restored; a later call goes on from the end."""
    best = [
        EarlyStopping(name, patience=9, restore_best_weights=True) for name in ("loss", "val_loss")
    ]
    line = Linear(callbacks=best, log_interval=1, verbose=False)
    data = {"global_batch": 1, "eval_data": WORSE, "eval_interval": 1}
    line.train(DATA, 3, **data)
    assert line.weight == 0.0  # of the best evaluation, after step 1
    line.train(DATA, 4, **data)

    assert best[0].best_weights[0].item() == best[0]._last_weights[0].item() == -3.0


# ReduceLROnPlateau.

FLAT = slopes(0.0)  # the loss is 0 in every step, and the weight does not move


@pytest.mark.thorough  # takes seconds
def test_the_rate_falls_as_with_keras(tmp_path):
    """After `patience` values without improvement, again after the cooldown, and not below the
    minimum; a resumed run has the same rates.
    """

    def run(*targets, folder=None):
        for target in targets:
            plateau = ReduceLROnPlateau(factor=0.5, patience=2, cooldown=1, min_lr=0.2)
            line = Linear(callbacks=[plateau], model_dir=folder, log_interval=1, verbose=False)
            summary = line.train(FLAT, target, global_batch=1, eval_data=FLAT, eval_interval=1)
        return summary.history["learning_rate"].tolist(), plateau.state_dict()

    whole = run(12)

    # The best is the first of the values. Each value that is counted comes after a step.
    expected = [1.0] * 3 + [0.5] * 2 + [0.25] * 2 + [0.2] * 5
    assert whole[0] == pytest.approx(expected)
    assert run(4, 12, folder=tmp_path) == whole


@pytest.mark.parametrize("patience", [0, 1])
def test_without_patience_each_value_that_is_no_better_counts(patience):
    """As in Keras, where 0 and 1 are the same."""
    plateau = ReduceLROnPlateau(factor=0.5, patience=patience)
    line = Linear(callbacks=[plateau], log_interval=1, verbose=False)
    summary = line.train(FLAT, 4, global_batch=1, eval_data=FLAT, eval_interval=1)

    assert summary.history["learning_rate"].tolist() == [1.0, 1.0, 0.5, 0.25]
