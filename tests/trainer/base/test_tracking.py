"""What TensorFlow and Keras track is found, each object once, and nothing else."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import copies

from trainer.base.tracking import (
    copies_of,
    leaves,
    read_copies,
    tracked,
    tracked_variables,
    write_copies,
)


class Plain:
    """An object that nothing tracks."""

    def __init__(self, inside):
        """Stores what is inside."""
        self.inside = inside


def test_every_tracked_variable_is_found_once():
    """Variables in modules, layers, metrics, generators and containers are found, the nearest first;
    those in plain objects and closures are not. A Keras variable stands for its `tf.Variable`.
    """
    module, layer, metric = tf.Module(), keras.layers.Dense(1), keras.metrics.Mean()
    layer.build([None, 2])
    generator, seeds = tf.random.Generator.from_seed(1), keras.random.SeedGenerator(2)
    own, hidden, listed = tf.Variable(1.0), tf.Variable(2.0), keras.Variable(3.0)
    module.kept, module.own = {"a": [(own, listed.value)]}, own
    module.plain, module.function = Plain(hidden), lambda: hidden
    module.rest = [listed, layer, metric, generator, seeds]
    found = tracked_variables([module, own], but=[layer.bias])

    expected = [own, listed, layer.kernel, *metric.variables, generator.state, seeds.state]
    assert {id(variable) for variable in found} == {id(variable) for variable in expected}
    assert len(found) == len(expected)
    assert found[0] is own
    assert found[1] is listed


def test_circles_end():
    """An object that holds itself is found once."""
    module = tf.Module()
    module.own = [module]
    assert sum(item is module for item in tracked(module)) == 1


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


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (1, [1]),
        ([1, (2, {"a": 3, "b": [4]})], [1, 2, 3, 4]),
        ({"a": {}}, []),
        ("text", ["text"]),
    ],
)
def test_leaves(root, expected):
    """Containers are flattened to any depth; anything else is a leaf."""
    assert leaves(root) == expected


def test_a_container_that_holds_itself_ends():
    """It is entered once, and one that stands in two places is entered twice."""
    around, twice = [1], [2]
    around += [{"again": around}, twice, (twice,)]

    assert leaves(around) == [1, 2, 2]


def test_an_array_is_not_a_container():
    """A NumPy array is one item."""
    array = np.zeros(3)

    assert leaves([array])[0] is array
