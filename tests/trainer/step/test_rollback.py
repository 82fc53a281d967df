"""Variables that a step cannot hold back are read before it and written back after a skip."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import copies

from trainer.step.rollback import copies_of, read_copies, variables_in_reach, write_copies


class Nested(tf.Module):
    """Variables in attributes, containers and a module."""

    def __init__(self):
        """Creates them."""
        super().__init__()
        self.own = tf.Variable(1.0)
        self.listed = [{"a": tf.Variable(2.0)}, keras.Variable(3.0)]
        self.inner = tf.Module()
        self.inner.shared = self.own
        self.text = "nothing"


def test_every_variable_in_reach_is_found_once():
    """Variables of TensorFlow and Keras are found in attributes, containers, modules and generators,
    each once; those that are held back are left out.
    """
    root, generator = Nested(), tf.random.Generator.from_seed(1)
    free = tf.Variable(4.0)
    found = variables_in_reach([root, {"b": [free, generator]}, free, 3, None], held_back=[])
    expected = [root.own, root.listed[0]["a"], root.listed[1], free, generator.state]
    ids = [id(variable) for variable in found]

    assert len(ids) == len(set(ids))
    assert set(map(id, expected)) <= set(ids)
    assert {id(v) for v in variables_in_reach([root], held_back=[root.own])} & {
        id(root.own)
    } == set()


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
