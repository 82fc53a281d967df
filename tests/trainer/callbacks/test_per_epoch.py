"""Intervals of runs with callbacks that hear of logs and evaluations where epochs end."""

import keras
import numpy as np
import pytest
from helpers import Linear, slopes

from trainer.base.warn_once import warn_once
from trainer.callbacks import KerasCallbacks

# Keras 3.15 converts variables in a way that NumPy 2 warns of, and leaves files to be collected.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_results_belong_to_the_end_of_an_epoch(caplog):
    """Evaluations within epochs alone are refused, a log_interval is named in a warning, and an
    epoch that ends without an evaluation gets no results.
    """
    history = keras.callbacks.History()
    line = Linear(callbacks=[KerasCallbacks([history])], log_interval=3, verbose=False)
    data = slopes(*np.linspace(0, 1, 4))
    with pytest.raises(ValueError, match="`eval_interval`") as error:
        line.train(data, epochs=2, global_batch=2, eval_data=data, eval_interval=3)
    assert str(error.value) == (
        "`eval_interval` must be a multiple of the 2 steps of an epoch, or divide them, with "
        "KerasCallbacks; got 3. Its callbacks get the results where an epoch ends, when the "
        "weights are no longer those that were evaluated. Pass eval_interval=2, or None to "
        "evaluate after each epoch."
    )

    warn_once.cache_clear()
    line.train(data, steps=5, global_batch=2, eval_data=data, eval_interval=4)
    line.train(data, steps=8, global_batch=2, eval_data=data, eval_interval=4)
    assert history.epoch == [0, 1, 2, 3]
    assert len(history.history["val_loss"]) == 2  # not that of step 5
    assert (
        caplog.messages.count(
            "log_interval=3 has no effect with KerasCallbacks: log lines end where epochs end, after "
            "every 2 steps, so that metrics are means over an epoch as in Keras. Leave log_interval "
            "out."
        )
        == 1
    )
