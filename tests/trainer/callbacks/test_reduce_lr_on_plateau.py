"""ReduceLROnPlateau: a smaller learning rate when a number no longer improves."""

import pytest
from helpers import Linear, slopes

from trainer.callbacks import ReduceLROnPlateau

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


def test_a_factor_is_below_1():
    """A factor of 1 would reduce nothing."""
    with pytest.raises(ValueError, match="`factor`"):
        ReduceLROnPlateau(factor=1)
