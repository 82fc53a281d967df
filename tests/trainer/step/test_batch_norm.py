"""BatchNormalization of images in one fused kernel: the same results as Keras, where it applies."""

import contextlib
import functools

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import adam
from hypothesis import given
from hypothesis import strategies as st

from trainer import Trainer
from trainer.step.batch_norm import fused_batch_norm

pytestmark = pytest.mark.sampled

Norm = keras.layers.BatchNormalization
IMAGES = (4, 3, 3, 2)


def computed(model, images, *, wanted, **arguments):
    """A training call's outputs, gradients and new weights, and the types of its operations."""
    start = model.get_weights()

    @tf.function
    def run(images):
        with tf.GradientTape() as tape:
            tape.watch(images)
            with fused_batch_norm(model, wanted=wanted):
                made = model(images, **{"training": True} | arguments)
            loss = tf.reduce_sum(tf.cast(made, tf.float32) ** 3)
        gradients = tape.gradient(loss, [images, *model.trainable_variables])
        return [made, *[each for each in gradients if each is not None]]

    graph = run.get_concrete_function(images).graph
    found = [np.asarray(tf.cast(each, tf.float32)) for each in run(images)]
    found += model.get_weights()
    model.set_weights(start)
    return found, {operation.type for operation in graph.get_operations()}


def model_of(layer, shape=IMAGES):
    """A model of one layer, with weights other than the initial ones."""
    model = keras.Sequential([keras.Input(shape[1:]), layer])
    generator = np.random.default_rng(0)
    model.set_weights([0.5 + generator.random(weight.shape) for weight in model.get_weights()])
    return model


def random_images(shape, dtype="float32", seed=0):
    """Random images with mean 1 and standard deviation 2."""
    drawn = np.random.default_rng(seed).normal(1.0, 2.0, shape)
    return tf.cast(tf.constant(drawn, tf.float32), dtype)


@pytest.mark.thorough
@given(
    st.tuples(*[st.integers(1, 5)] * 4),
    st.sampled_from(["float32", "mixed_bfloat16", "mixed_float16"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.99, 0.5]),
)
def test_the_kernel_computes_what_keras_computes(shape, policy, scale, center, momentum):
    """Outputs, gradients and moving statistics equal those of Keras to rounding, even for a single
    number.
    """
    policy = keras.DTypePolicy(policy)
    model = model_of(Norm(scale=scale, center=center, momentum=momentum, dtype=policy), shape)
    images = random_images(shape, policy.compute_dtype)
    fused, operations = computed(model, images, wanted=True)
    usual, others = computed(model, images, wanted=False)
    bound = 1e-4 if policy.compute_dtype == "float32" else 4e-2

    assert "FusedBatchNormV3" in operations - others
    for one, other in zip(fused, usual, strict=True):
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound * (1 + np.abs(other).max()))


class Subclassed(Norm):
    """A user's subclass."""


def with_replaced_call():
    """A layer whose `call` was replaced on the instance."""
    layer = Norm()
    layer.call = layer.call
    return layer


# Layers and calls that the kernel does not support, by the reason.
UNSUPPORTED = {
    "another axis": (functools.partial(Norm, axis=1), IMAGES, {}),
    "no images": (Norm, (4, 3), {}),
    "evaluation": (Norm, IMAGES, {"training": False}),
    "a mask": (Norm, IMAGES, {"mask": tf.ones([4, 3, 3], tf.bool)}),
    "frozen": (functools.partial(Norm, trainable=False), IMAGES, {}),
    "renorm": (functools.partial(Norm, renorm=True), IMAGES, {}),
    "synchronized": (functools.partial(Norm, synchronized=True), IMAGES, {}),
    "a small epsilon": (functools.partial(Norm, epsilon=1e-6), IMAGES, {}),
    "float64": (functools.partial(Norm, dtype="float64"), IMAGES, {}),
    "a subclass": (Subclassed, IMAGES, {}),
    "a call of its own": (with_replaced_call, IMAGES, {}),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_anything_else_is_left_to_keras(what):
    """Unsupported layers and calls keep Keras's own operations, to the bit."""
    make, shape, arguments = UNSUPPORTED[what]
    layer = make()
    model = layer if arguments.get("mask") is not None else model_of(layer, shape)
    images = random_images(shape, layer.compute_dtype)
    model(images)
    fused, operations = computed(model, images, wanted=True, **arguments)
    usual, _ = computed(model, images, wanted=False, **arguments)

    assert "FusedBatchNormV3" not in operations
    for one, other in zip(fused, usual, strict=True):
        np.testing.assert_array_equal(one, other)


def test_layers_are_left_as_they_were():
    """Layers have their own `call` again afterwards, even if the model raises."""
    model = model_of(Norm())
    with contextlib.suppress(RuntimeError), fused_batch_norm(model, wanted=True):
        assert "call" in vars(model.layers[0])
        raise RuntimeError
    assert "call" not in vars(model.layers[0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("jit_compile", "fused"), [(False, True), ("elementwise", True), (True, False)]
)
def test_a_step_uses_the_kernel_unless_xla_compiles_it(jit_compile, fused):
    """The training loop uses the kernel unless XLA compiles the whole step and fuses the operations
    itself.
    """
    trainer = Trainer(
        model=lambda: keras.Sequential(
            [
                keras.Input([4, 4, 1]),
                keras.layers.Conv2D(2, 3),
                Norm(),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        ),
        optimizer=adam,
        loss_fn="mse",
        jit_compile=jit_compile,
        verbose=False,
    )
    images = np.ones([8, 4, 4, 1], np.float32)
    dataset = tf.data.Dataset.from_tensors((images, np.ones([8, 1], np.float32)))
    trainer.train(dataset, steps=1)
    loop = access.steps(trainer).get_concrete_function(iter(dataset), tf.constant(1))

    assert ("FusedBatchNormV3" in str(loop.graph.as_graph_def())) == fused
