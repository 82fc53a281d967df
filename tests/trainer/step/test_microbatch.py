"""Rows leave loops and branches of the graph by variables."""

import numpy as np
import pytest
import tensorflow as tf

from trainer.step.microbatch import Kept, Rows


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_leave_a_loop_and_a_branch(compiled):
    """The rows of the last attempt are returned; losses of several groups come together."""
    kept = Kept()
    strategy = tf.distribute.get_strategy()

    def attempts(x):
        size = x.shape[0] if compiled else None

        def attempt(index):
            kept.keep(Rows({"x": x, "odd": x > 1}, {"first": x * 2}), strategy, size)
            return index + 1

        def later():
            kept.keep(Rows({"x": x + 5, "odd": x > 1}, {"second": x * 3}), strategy, size)
            return 0

        tf.while_loop(lambda index: index < 2, attempt, (0,))
        tf.cond(x[0] > 0, later, lambda: 1)
        return x

    @tf.function(autograph=False, reduce_retracing=not compiled)
    def run(x):
        tf.function(attempts, autograph=False, jit_compile=compiled or None)(x)
        return kept.take()

    for size in (2, 4, 3):
        x = np.arange(1, size + 1, dtype=np.float32)
        aux, losses = run(tf.constant(x))
        assert aux["x"].numpy().tolist() == (x + 5).tolist()
        assert aux["odd"].numpy().tolist() == (x > 1).tolist()
        assert losses["first"].numpy().tolist() == (x * 2).tolist()
        assert losses["second"].numpy().tolist() == (x * 3).tolist()


def test_ragged_rows():
    """Ragged tensors are kept, too."""
    kept = Kept()

    @tf.function(autograph=False)
    def run(x):
        kept.keep(Rows(x, {}), tf.distribute.get_strategy(), None)
        return kept.take().aux

    assert run(tf.ragged.constant([[1, 2], [3]])).to_list() == [[1, 2], [3]]
