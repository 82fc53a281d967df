"""Whatever a trainer tries, every bit of its variables is put back."""

import contextlib

import keras
import pytest
import tensorflow as tf
from helpers import Linear, all_copies, assert_same_bits, slopes

from trainer.run.put_back import put_back


class WithCounter(Linear):
    """Momentum, and a variable of the user's own."""

    def __init__(self, **arguments):
        """Creates the variable."""
        super().__init__(verbose=False, **arguments)
        with self.strategy.scope():
            self.counter = tf.Variable(0.0)

    def build_optimizer(self):
        """SGD with momentum."""
        return keras.optimizers.SGD(0.5, momentum=0.5)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("raises", [False, True])
def test_every_variable_is_put_back(mirrored, replicas, raises):
    """Weights, slots, counts and a user's variables have their bits again, even after an error."""
    trainer = WithCounter(strategy=mirrored(replicas) if replicas > 1 else "default")
    data = slopes(*[1.0] * replicas)
    trainer.train(data, steps=1, global_batch=replicas)
    before, totals = all_copies(trainer), trainer.totals
    expected = pytest.raises(tf.errors.AbortedError) if raises else contextlib.nullcontext()
    with expected, put_back(trainer, trainer._parts):
        trainer._parts.state.outcomes.assign_add(tf.ones_like(trainer._parts.state.outcomes))
        trainer.counter.assign(7.0)
        for variable in [*trainer.model.variables, *trainer.optimizer.variables]:
            variable.assign(tf.ones_like(variable) * 3)
        assert trainer.weight == 3.0
        if raises:
            raise tf.errors.AbortedError(None, None, "stop")

    assert_same_bits(before, all_copies(trainer))
    assert trainer.totals == totals
    assert float(trainer.counter.numpy()) == 0.0
