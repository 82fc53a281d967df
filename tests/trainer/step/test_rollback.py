"""Variables that a step cannot hold back are read before it and written back after a skip."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import copies

from trainer.step.rollback import copies_of, read_copies, write_copies


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", ["keras", "mean", "on read"])
def test_copies_are_written_back_bit_for_bit(mirrored, replicas, kind):
    """L6: every replica's copy gets its own bits back, although the mean of three equal float32 numbers
    can differ from them.
    """
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    on_read = tf.VariableSynchronization.ON_READ
    with strategy.scope():
        variable = {
            "keras": lambda: keras.Variable(0.9, trainable=False),
            "mean": lambda: tf.Variable(0.9, aggregation=tf.VariableAggregation.MEAN),
            "on read": lambda: tf.Variable(
                0.9,
                trainable=False,
                synchronization=on_read,
                aggregation=tf.VariableAggregation.SUM,
            ),
        }[kind]()
    if kind == "on read":
        for index, copy in enumerate(copies_of(variable, strategy)):
            copy.assign(0.9 + index)
    before = [copy.tobytes() for copy in copies(variable)]

    @tf.function
    def step():
        values = read_copies([variable], strategy)
        for copy in copies_of(variable, strategy):
            copy.assign(np.nan)
        return write_copies([variable], values, strategy)

    assert step()
    assert [copy.tobytes() for copy in copies(variable)] == before
    assert len(before) == replicas
