"""Fused update kernels equal the operations of Keras except for rounding."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, trained_small

from trainer.step.fused import fused_rule, fused_updates

OPTIMIZERS = {
    "adam": functools.partial(keras.optimizers.Adam, 0.01),
    "adamw": functools.partial(keras.optimizers.AdamW, 0.01, weight_decay=0.1),
    "sgd": functools.partial(keras.optimizers.SGD, 0.01),
    "momentum": functools.partial(keras.optimizers.SGD, 0.01, momentum=0.9),
    "nesterov": functools.partial(keras.optimizers.SGD, 0.01, momentum=0.9, nesterov=True),
}
FUSED = {"ResourceApplyAdam", "ResourceApplyKerasMomentum", "ResourceApplyGradientDescent"}


def general(make):
    """Returns a subclass of an optimizer with the same rule, which the kernels do not recognize."""
    base = type(make())

    class General(base):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)

    return functools.partial(General, *make.args, **make.keywords)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_kernel_is_the_whole_rule(mirrored, replicas, name):
    """The fused kernels move weights and slots as Keras's own operations do."""
    strategy = mirrored(replicas) if replicas > 1 else "default"
    fused = trained_small(make=OPTIMIZERS[name], strategy=strategy)
    plain = trained_small(make=general(OPTIMIZERS[name]), strategy=strategy)

    assert fused_rule(fused.optimizer) is not None
    assert fused_rule(plain.optimizer) is None
    assert_close(fused, plain)


def operations(optimizer, gradient, dtype="float32"):
    """The types of the operations with which an optimizer updates a variable of three rows."""
    variable = keras.Variable(np.ones([3, 2]), dtype=dtype)
    optimizer.build([variable])
    with fused_updates(optimizer):
        traced = tf.function(lambda: optimizer.apply([gradient()], [variable]))
        graph = traced.get_concrete_function().graph
    return {operation.type for operation in graph.get_operations()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_dense_update_is_one_kernel(name):
    """A dense update uses one fused kernel, and the optimizer is restored afterwards."""
    optimizer = OPTIMIZERS[name]()

    assert operations(optimizer, lambda: tf.ones([3, 2])) & FUSED
    assert "update_step" not in vars(optimizer)


def rows():
    """A sparse gradient for one of three rows."""
    return tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2]))


@pytest.mark.parametrize(
    ("make", "gradient", "dtype"),
    [
        (OPTIMIZERS["adam"], rows, "float32"),
        (OPTIMIZERS["adam"], lambda: tf.ones([3, 2], tf.float64), "float64"),
        (functools.partial(keras.optimizers.Adam, amsgrad=True), None, "float32"),
        (keras.optimizers.Lion, None, "float32"),
        (general(OPTIMIZERS["adam"]), None, "float32"),
    ],
)
def test_updates_without_a_kernel_are_left_to_keras(make, gradient, dtype):
    """Sparse gradients, other dtypes and other rules use no fused kernel."""
    assert not operations(make(), gradient or (lambda: tf.ones([3, 2])), dtype) & FUSED
