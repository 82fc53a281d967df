"""EarlyStopping: ends a run that no longer improves, and restores the best weights."""

import numpy as np
import pytest
from helpers import Linear, copies, slopes

from trainer import Callback, Updates
from trainer.callbacks import EarlyStopping

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
def test_replicas_stop_alike(mirrored):
    """On three replicas the run ends at the same step, with the same weights on each."""
    stopping = EarlyStopping(patience=1, restore_best_weights=True)
    line = Linear(callbacks=[stopping], strategy=mirrored(3), verbose=False)
    line.train(slopes(1.0, 1.0, 1.0), 9, global_batch=3, eval_data=WORSE, eval_interval=1)

    assert line.totals.attempted == 2
    assert [copy.item() for copy in copies(line.model.trainable_variables[0])] == [0.0] * 3


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
