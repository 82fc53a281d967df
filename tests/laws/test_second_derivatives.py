"""Losses that contain derivatives: right on replicas, in microbatches, in half and under a scale."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import scaling
from trainer import Trainer

pytestmark = pytest.mark.sampled

RATE = 0.5
GENERATOR = np.random.default_rng(0)
INPUTS = GENERATOR.normal(size=[24, 3]).astype(np.float32)
PARTS = [(1, 1, False), (3, 2, False), (3, 2, True), (1, 2, "elementwise"), (1, 1, "update")]
SLOW = pytest.mark.slow
BOUNDS = {"float32": 1e-4, "mixed_float16": 0.03, "mixed_bfloat16": 0.15}


class Normalize(keras.layers.Layer):
    """BatchNormalization with a scale and a shift, written out: the reference."""

    def build(self, shape):
        """Creates the scale and the shift, in Keras's order."""
        self.gamma = self.add_weight(shape=shape[-1:], initializer="ones")
        self.beta = self.add_weight(shape=shape[-1:], initializer="zeros")

    def call(self, inputs):
        """Normalizes over everything but the channels."""
        axes = list(range(inputs.shape.rank - 1))
        centered = inputs - tf.reduce_mean(inputs, axes)
        variance = tf.reduce_mean(centered**2, axes)
        return centered * tf.math.rsqrt(variance + 1e-3) * self.gamma + self.beta


def network(norm=None, images=False):
    """A small network whose second derivatives are not 0."""
    reshape = [keras.layers.Reshape([3, 1, 1])] if images else []
    first = [*reshape, keras.layers.Dense(6, activation="tanh")]
    last = [keras.layers.Flatten()] if images else []
    layers = [*first, *([norm()] if norm else []), *last, keras.layers.Dense(1, activation="tanh")]
    return keras.Sequential([keras.Input([3]), *layers])


def summed_outputs(model, x, wide):
    """The sum of the outputs: its derivative by an input is that of the input's own output."""
    return tf.reduce_sum(tf.cast(model(x, training=True), wide))


def derivative(function, x):
    """The derivative of a scalar function, itself differentiable."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x)


def gradient_penalty(model, x, wide):
    """WGAN-GP: the norms of the derivatives by the inputs are drawn towards 1."""
    slopes = derivative(lambda x: summed_outputs(model, x, wide), x)
    output = tf.cast(model(x, training=True), wide)[:, 0]
    return output + 10.0 * (tf.sqrt(tf.reduce_sum(slopes**2, -1) + 1e-4) - 1.0) ** 2


def r1(model, x, wide):
    """R1: the squared norms of the derivatives by the inputs."""
    return tf.reduce_sum(derivative(lambda x: summed_outputs(model, x, wide), x) ** 2, -1)


def equation(model, x, wide):
    """A physics-informed network: u'' + u = 0 in the first input."""
    first = functools.partial(derivative, lambda x: summed_outputs(model, x, wide))
    second = derivative(lambda x: tf.reduce_sum(first(x)[:, 0]), x)[:, 0]
    return (second + tf.cast(model(x, training=True), wide)[:, 0]) ** 2


def curvature(model, x, wide):
    """A Hessian-vector product by the inputs, forward over backward."""
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
        slopes = derivative(lambda x: summed_outputs(model, x, wide), x)
    return tf.reduce_sum(forward.jvp(slopes) ** 2, -1)


def one_inner_step(model, x, wide):
    """MAML: the loss after a step on the weights, differentiated through that step."""
    weights = model.trainable_variables
    with tf.GradientTape() as tape:
        inner = tf.reduce_mean(tf.cast(model(x, training=True), wide) ** 2)
    slopes = tape.gradient(inner, weights)
    first, bias, last, shift = (
        tf.cast(weight, wide) - 0.3 * tf.cast(slope, wide)
        for weight, slope in zip(weights, slopes, strict=True)
    )
    hidden = tf.tanh(tf.cast(x, wide) @ first + bias)
    return (tf.tanh(hidden @ last + shift)[:, 0] - 0.5) ** 2


LOSSES = {
    each.__name__: each for each in (gradient_penalty, r1, equation, curvature, one_inner_step)
}


def updated(loss, build, *, strategy=None, replicas=1, microbatches=1, mode=False, **settings):
    """The change of the weights in one step of a trainer, and the weights before it."""

    class Task(Trainer):
        def build_model(self):
            return build()

        def build_optimizer(self):
            return keras.optimizers.SGD(RATE)

        def compute_loss(self, batch, training):
            del training
            return loss(self.model, batch, tf.float32)

    trainer = Task(
        strategy=strategy(replicas) if replicas > 1 else "default",
        num_microbatches=microbatches,
        jit_compile=mode,
        verbose=False,
        **settings,
    )
    start = []

    class Remember:
        def __call__(self, *_):
            start[:] = [variable.numpy() for variable in trainer.model.trainable_variables]

    trainer.on_train_begin = Remember()
    summary = trainer.train(tf.data.Dataset.from_tensors(INPUTS).repeat(), steps=1)
    assert summary.totals.applied == 1
    after = [variable.numpy() for variable in trainer.model.trainable_variables]
    return start, [new - old for old, new in zip(start, after, strict=True)]


def expected(loss, build, start, parts):
    """The same change by a plain loop in float64 over the same parts of the batch."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        model = build()
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    for variable, value in zip(model.trainable_variables, start, strict=True):
        variable.assign(value)
    total = [0.0] * len(start)
    for part in np.split(INPUTS.astype(np.float64), parts):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(loss(model, tf.constant(part), tf.float64)) / len(INPUTS)
        found = tape.gradient(value, model.trainable_variables, unconnected_gradients="zero")
        total = [before + np.asarray(each) for before, each in zip(total, found, strict=True)]
    return [-RATE * each for each in total]


def assert_close(found, wanted, bound):
    """Raises unless the norm of the difference is at most this part of the norm."""
    found, wanted = (np.concatenate([each.ravel() for each in group]) for group in (found, wanted))
    assert np.linalg.norm(found - wanted) <= bound * np.linalg.norm(wanted)


# Forward over backward takes the longest to trace.
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "curvature"])
@pytest.mark.parametrize(("replicas", "microbatches", "mode"), PARTS[:2])
def test_derivatives_in_a_loss(name, replicas, microbatches, mode, mirrored):
    """L19: a loss that contains derivatives trains as in a plain float64 loop, on one device and
    on three replicas with two microbatches.
    """
    settings = {"replicas": replicas, "microbatches": microbatches, "mode": mode}
    start, found = updated(LOSSES[name], network, strategy=mirrored, **settings)

    assert_close(found, expected(LOSSES[name], network, start, replicas * microbatches), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("replicas", "microbatches", "mode"), PARTS)
def test_derivatives_in_every_mode(name, precision, replicas, microbatches, mode, mirrored):
    """L19: the same in every compile mode and precision, under a loss scale: the penalty sees
    unscaled derivatives.
    """
    settings = {"replicas": replicas, "microbatches": microbatches, "mode": mode}
    scale = None if precision == "float32" else 1024.0
    settings |= {"precision": precision, "loss_scale": scale, "strategy": mirrored}
    start, found = updated(LOSSES[name], network, **settings)

    wanted = expected(LOSSES[name], network, start, replicas * microbatches)
    assert_close(found, wanted, BOUNDS[precision])


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [False, True, pytest.param("elementwise", marks=SLOW)])
@pytest.mark.parametrize("images", [False, True])
def test_derivatives_through_batch_norm(mode, images):
    """L19: a gradient penalty through BatchNormalization is right in every compile mode, with the
    fused kernel and without it.
    """
    build = functools.partial(network, images=images)
    start, found = updated(
        gradient_penalty, lambda: build(keras.layers.BatchNormalization), mode=mode
    )

    assert_close(found, expected(gradient_penalty, lambda: build(Normalize), start, 1), 1e-4)


def steep(model, x, wide, state=None):
    """A penalty on derivatives that are too small for float16."""

    def function(x):
        value = summed_outputs(model, x, wide) * 1e-8
        return value if state is None else scaling.scale_loss(value, state)

    slopes = derivative(function, x)
    slopes = slopes if state is None else scaling.unscale_gradients([slopes], state)[0]
    return tf.reduce_sum((1e8 * tf.cast(slopes, wide)) ** 2, -1)


@pytest.mark.slow
def test_an_inner_derivative_can_have_a_scale_of_its_own():
    """In float16 an inner derivative underflows, and the loss scale cannot help: the penalty sees
    0. With `scale_loss` and `unscale_gradients` inside the loss it is right.
    """
    state = scaling.FixedLossScale(2.0**24).initial_state()
    settings = {"precision": "mixed_float16", "loss_scale": 1024.0}
    _, naive = updated(steep, network, **settings)
    start, found = updated(functools.partial(steep, state=state), network, **settings)
    wanted = expected(r1, network, start, 1)

    assert not any(np.any(each) for each in naive)
    assert_close(found, wanted, BOUNDS["mixed_float16"])
