"""What TensorFlow and Keras track is found, each object once, and nothing else."""

import keras
import tensorflow as tf

from trainer.base.tracking import tracked, tracked_variables


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
