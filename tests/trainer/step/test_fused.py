"""Fused update kernels and the parts that XLA compiles equal the plain step except for rounding."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SmallImages, assert_close, trained_small

from trainer.step.fused import fused_rule, fused_updates
from trainer.step.xla import COMPILE_MODES

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


@pytest.mark.parametrize(
    ("make", "mode"),
    [
        *[(OPTIMIZERS["adam"], mode) for mode in COMPILE_MODES if mode is not False],
        (keras.optimizers.Lion, "update"),
        pytest.param(keras.optimizers.Lion, "elementwise", marks=pytest.mark.slow),
        pytest.param(keras.optimizers.Lion, True, marks=pytest.mark.slow),
    ],
)
def test_every_compile_mode_computes_the_same(make, mode):
    """All compile modes give equal results except for rounding."""
    assert_close(trained_small(make=make), trained_small(make=make, jit_compile=mode))


def test_elementwise_compiles_no_products_or_convolutions():
    """In mode "elementwise", XLA compiles elementwise operations but no product or convolution."""
    trainer = trained_small(jit_compile="elementwise")
    phase = trainer._parts.plan.groups[0]
    [graph] = [each.graph for each in phase.differentiate._list_all_concrete_functions()]
    compiled = set()
    for operation in graph.get_operations():
        if "_XlaCompile" in operation.node_def.attr and operation.get_attr("_XlaCompile"):
            compiled.add(operation.type)

    assert {"AddV2", "Mul"} <= compiled
    assert not {"Conv2D", "MatMul", "Conv2DBackpropFilter"} & compiled


def test_an_update_of_several_replicas_is_not_compiled(mirrored):
    """jit_compile="update" is refused on several replicas, because Keras updates all copies
    together, outside of what XLA compiles.
    """
    with pytest.raises(ValueError, match="jit_compile") as error:
        SmallImages(jit_compile="update", strategy=mirrored(3))

    assert str(error.value) == (
        '`jit_compile` must not be "update" with several replicas, a TPU or parameter servers; got '
        "'update' under MirroredStrategy with 3 replicas. XLA can compile the optimizer's update "
        "only where a variable has one copy, on the device that updates it. Use one of False, "
        "'elementwise', True."
    )
