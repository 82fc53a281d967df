"""Keras's global dtype policy and floatx are the trainer's defaults, float64 included."""

import keras
import numpy as np
import pytest

import scaling
from trainer import Trainer, Updates

TIMES = 1.7e9 + np.arange(8.0)[:, None]  # time stamps, which float32 rounds to multiples of 128
SLOPES = np.arange(8.0)[:, None] / 8


@pytest.fixture
def of_keras():
    """A function that sets Keras's policy and floatx, which are restored after the test."""

    def choose(policy, floatx="float32"):
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)

    yield choose
    choose("float32")


def clock():
    """A linear model of time stamps."""
    scale = keras.layers.Normalization(mean=1.7e9, variance=16.0)
    zeros = keras.layers.Dense(1, kernel_initializer="zeros")
    return keras.Sequential([keras.Input([1]), scale, zeros])


def deep():
    """A model with BatchNormalization, a penalty of activations and one of weights."""
    dense = keras.layers.Dense
    hidden = dense(4, "tanh", activity_regularizer="l2", kernel_regularizer="l2")
    return keras.Sequential([keras.Input([1]), hidden, dense(1)])


def sgd():
    """The optimizer of both loops."""
    return keras.optimizers.SGD(0.1, momentum=0.5)


def trainer_of(model, **arguments):
    """A trainer that prints nothing, and logs each step."""
    given = {"loss_fn": "mse", "verbose": False, "log_interval": 1} | arguments
    return Trainer(model=model, optimizer=sgd, **given)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["mse", pytest.param("object", marks=pytest.mark.thorough)])
def test_float64_trains_as_fit_does(of_keras, loss):
    """Under the global policy "float64" the loss after 50 steps is that of `fit`."""
    of_keras("float64", "float64")
    loss = keras.losses.MeanSquaredError() if loss == "object" else loss
    model = clock()
    model.compile(sgd(), loss)
    fit = model.fit(TIMES, SLOPES, epochs=50, batch_size=8, verbose=0).history["loss"]
    trainer = trainer_of(clock, loss_fn=loss)

    history = trainer.train((TIMES, SLOPES), steps=50, global_batch=8).history

    assert trainer.precision == scaling.Precision("float64")
    np.testing.assert_allclose(history["loss"], fit, rtol=1e-6)
    for ours, theirs in zip(trainer.model.weights, model.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-6)
    np.testing.assert_allclose(
        trainer.predict(TIMES, global_batch=8), model.predict(TIMES, verbose=0), rtol=1e-6
    )
    assert trainer.evaluate((TIMES, SLOPES), global_batch=8)["loss"] == pytest.approx(
        model.evaluate(TIMES, SLOPES, verbose=0), rel=1e-6
    )


@pytest.mark.thorough
def test_float64_without_the_global_policy(of_keras):
    """An explicit "float64" needs nothing but Keras's floatx, by which Keras's losses go."""
    of_keras("float32", "float64")
    trainer = trainer_of(clock, precision="float64")

    losses = trainer.train((TIMES, SLOPES), steps=50, global_batch=8).history["loss"]

    assert losses[-1] < 0.002
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [False, True, "update"])
def test_float64_on_shares(of_keras, mirrored, compiled):
    """Replicas, microbatches, clipping, XLA and a moving average move float64 weights as one device
    does, to float64's rounding of the gradients' sum.
    """
    of_keras("float64", "float64")
    x, y = np.linspace(-1, 1, 8)[:, None], np.linspace(0, 1, 8)[:, None] ** 2
    settings = {"updates": Updates(global_clipnorm=0.5, ema_momentum=0.9), "seed": 0}
    alone = trainer_of(deep, **settings)
    strategy = "one_device" if compiled == "update" else mirrored(2)
    shared = trainer_of(
        deep, strategy=strategy, num_microbatches=2, jit_compile=compiled, **settings
    )

    for trainer in (alone, shared):
        trainer.train((x, y), steps=10, global_batch=8)

    for ours, theirs in zip(shared.model.weights, alone.model.weights, strict=True):
        assert ours.dtype == "float64"
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-6, atol=1e-8)


class Squares(Trainer):
    """Its loss compares large float64 labels with large predictions."""

    def compute_loss(self, batch, training=True):
        """Squared errors, in float64."""
        x, y = batch
        return (self.model(x, training=training)[:, 0] - y) ** 2


def test_a_loss_of_ones_own_may_be_float64(of_keras):
    """`compute_loss` may return float64; what it subtracts is not rounded before."""
    of_keras("float64", "float64")
    x, y = np.ones([4, 1]), 1.7e9 + np.arange(4.0)

    def model():
        constant = keras.initializers.Constant(1.7e9)
        return keras.Sequential(
            [keras.Input([1]), keras.layers.Dense(1, kernel_initializer=constant, use_bias=False)]
        )

    trainer = Squares(model=model, optimizer=lambda: keras.optimizers.SGD(0.5), verbose=False)
    trainer.train((x, y), steps=1, global_batch=4)

    assert trainer.model.get_weights()[0].item() == 1.7e9 + 1.5
    assert trainer_of(model).evaluate((x, y[:, None]), global_batch=4)["loss"] == 3.5


@pytest.mark.parametrize(
    ("policy", "scaled"), [("mixed_float16", True), ("mixed_bfloat16", False), ("float32", False)]
)
def test_the_global_policy_is_the_default(of_keras, policy, scaled):
    """Without `precision`, the model is made under the global policy, with its loss scale."""
    of_keras(policy)
    trainer = trainer_of(deep)
    of_keras("float32")  # what counts is the policy when the trainer is made

    assert trainer.precision == scaling.Precision(policy)
    assert {layer.dtype_policy.name for layer in trainer.model.layers} == {policy}
    assert (trainer.rule != scaling.NoLossScale()) is scaled


def test_lists_have_the_dtype_of_floatx(of_keras):
    """A Python source of lists of numbers is not rounded to float32."""
    of_keras("float64", "float64")

    assert trainer_of(clock).evaluate(iter([(TIMES.tolist(), SLOPES.tolist())])) == pytest.approx(
        trainer_of(clock).evaluate((TIMES, SLOPES), global_batch=8)
    )
