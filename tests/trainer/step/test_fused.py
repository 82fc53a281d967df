"""Fused update kernels equal the operations of Keras, to the bit or closer to float64."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, trained_small

from trainer.step.fused import fused_rule, fused_updates

pytestmark = [pytest.mark.sampled, pytest.mark.replicas(1)]

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


@pytest.mark.thorough
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


GENERATOR = np.random.default_rng(0)
SIZES = 10.0 ** GENERATOR.uniform(-4, 2, size=[1, 500])
GRADIENTS = (GENERATOR.normal(size=[30, 500]) * SIZES).astype(np.float32)


def path_of(optimizer, *, fused):
    """Returns 500 weights after each of the updates, initially all 1."""
    weight = keras.Variable(np.ones(500, np.float32))
    optimizer.build([weight])

    @tf.function
    def update(gradient):
        with fused_updates(optimizer) if fused else contextlib.nullcontext():
            optimizer.apply([gradient], [weight])

    path = []
    for gradient in GRADIENTS:
        update(tf.constant(gradient))
        path.append(weight.numpy())
    return np.array(path)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.01}],
)
def test_sgd_has_the_bits_of_keras(arguments):
    """At a learning rate of 1, SGD's kernels give the bits of Keras's operations."""
    one, other = (
        path_of(keras.optimizers.SGD(1.0, **arguments), fused=fused) for fused in (True, False)
    )

    assert one.tobytes() == other.tobytes()


def decaying(step):
    """The learning rate of `RATE`."""
    return 0.9**step


RATE = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.9)


@pytest.mark.parametrize(
    ("make", "rate", "beta_2", "epsilon", "decay"),
    [
        (lambda: keras.optimizers.Adam(1.0), lambda _: 1.0, 0.999, 1e-7, 0.0),
        (lambda: keras.optimizers.Adam(1.0, epsilon=1e-3), lambda _: 1.0, 0.999, 1e-3, 0.0),
        (lambda: keras.optimizers.Adam(1.0, beta_2=0.9999), lambda _: 1.0, 0.9999, 1e-7, 0.0),
        (lambda: keras.optimizers.AdamW(1.0, weight_decay=0.01), lambda _: 1.0, 0.999, 1e-7, 0.01),
        (lambda: keras.optimizers.Adam(RATE), decaying, 0.999, 1e-7, 0.0),
    ],
)
def test_adam_is_closer_to_float64(make, rate, beta_2, epsilon, decay):
    """At a learning rate of about 1, Adam's kernel is at most 6e-8 / (1 - beta_2) off in each update, and
    closer to Adam in float64 than Keras's operations.
    """
    weight, first, second, exact = np.ones(500), np.zeros(500), np.zeros(500), []
    for step, gradient in enumerate(GRADIENTS.astype(np.float64), 1):
        weight = weight - weight * decay * rate(step - 1)
        first += (gradient - first) * (1 - 0.9)
        second += (gradient**2 - second) * (1 - beta_2)
        alpha = rate(step - 1) * np.sqrt(1 - beta_2**step) / (1 - 0.9**step)
        weight = weight - alpha * first / (np.sqrt(second) + epsilon)
        exact.append(weight)
    fused, plain = (np.abs(path_of(make(), fused=fused) - exact) for fused in (True, False))

    assert fused[0].max() <= 2.0**-24 / (1 - beta_2)
    assert fused[0].max() < plain[0].max() / 2
    assert fused.max() < plain.max()


def test_rules_that_assign_in_their_own_way_are_left_to_keras():
    """A kernel would pass over a method, or a constant, that the user has replaced."""

    class Assigning(keras.optimizers.SGD):
        def assign_sub(self, variable, value):
            super().assign_sub(variable, 2.0 * value)

    replaced = keras.optimizers.SGD()
    replaced.update_step = lambda *_: None
    variable = keras.optimizers.Adam(beta_1=tf.Variable(0.9))

    assert [fused_rule(one) for one in (Assigning(), replaced, variable)] == [None] * 3
