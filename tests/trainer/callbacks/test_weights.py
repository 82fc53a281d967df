"""Copies of weights in memory, and the callback that keeps the best ones."""

import pytest
from helpers import Linear, slopes

from trainer.callbacks import BestWeights


def test_best_weights_are_kept_in_memory():
    """The weights of the best value can be put back after the run."""
    best = BestWeights("loss", mode="max")
    line = Linear(callbacks=[best], log_interval=1, verbose=False)
    with pytest.raises(RuntimeError) as error:
        best.restore()
    assert str(error.value) == (
        "BestWeights has no weights yet: 'loss' has had no value that is not NaN. Train first, "
        "with eval_data= for a result of evaluations."
    )
    line.train(slopes(1.0), 3, global_batch=1)  # losses 1, 0, -1, each before its update
    assert (best.best, best.best_step, line.weight) == (1.0, 1, -2.0)
    best.restore()
    assert line.weight == 0.0
