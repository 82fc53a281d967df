"""The cases of tf_keras's mixed-precision, optimizer and custom-loop tests."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, attempt
from peer_models import Stepper

import scaling
from trainer import Skips

pytestmark = [pytest.mark.slow, pytest.mark.replicas(2, 3)]

# tf_keras's scale follows every non-finite gradient, whatever its cause.
LIKE_TF_KERAS = {"skips": Skips(attribute_causes=False)}


@pytest.fixture(params=[1, 2])
def replicas(request):
    """The numbers of replicas of tf_keras's cases; --full also runs 1."""
    return request.param


@pytest.fixture
def strategy(replicas, mirrored):
    """The strategies of tf_keras's cases."""
    return mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()


def sgd(rate=1.0, **arguments):
    """A function that returns a new SGD."""
    return lambda: keras.optimizers.SGD(rate, **arguments)


def growing_rule(interval=1):
    """The rule of most cases: starts at 2."""
    return scaling.preset("tf_keras", initial_scale=2.0, growth_interval=interval)


def test_dynamic_loss_scale(strategy):
    """5, 3, 1: the update does not depend on the scale, which doubles after every finite step; a NaN
    moves no weight and halves it (testDynamicLossScale, testDynamicUpdate).
    """
    stepper = Stepper(
        [5.0], optimizer=sgd(2.0), strategy=strategy, rule=growing_rule(), **LIKE_TF_KERAS
    )
    seen = []
    for gradient in (1.0, 1.0, np.nan):
        stepper.step([gradient])
        seen.append((stepper.weight.item(), stepper.loss_scale))

    assert seen == [(3.0, 4.0), (1.0, 8.0), (1.0, 4.0)]


def test_hyperparameters_stay_the_optimizers():
    """The optimizer is not wrapped, so its own attributes are the ones in use: a learning rate that
    is assigned between steps counts (testHyperParametersExposed and others).
    """
    stepper = Stepper([5.0], optimizer=sgd(1.0), rule=growing_rule())
    stepper.step([1.0])
    stepper.optimizer.learning_rate = 2.0
    stepper.step([1.0])

    assert stepper.weight == [2.0]


def test_a_loss_scale_that_is_no_number():
    """The argument is named in the error (testDynamicMustBeBool, testInvalidArgs...)."""
    with pytest.raises(ValueError, match="`loss_scale` must"):
        Linear(loss_scale=True)


def test_a_wrong_optimizer_is_refused():
    """An object that is no Keras 3 optimizer is refused (testErrorWhenWrappingNonOptimizer,
    test_pass_invalid_optimizer_with_loss_scaling).
    """
    with pytest.raises((AttributeError, TypeError), match="optimizer"):
        Stepper([1.0], optimizer=1)


class HalfProduct(Linear):
    """One weight in float16, as tf_keras's MultiplyLayer. The gradient is 1."""

    def compute_loss(self, batch, training):
        """The outputs. Their dtype is asserted."""
        outputs = self.model(batch["x"], training=training)
        assert outputs.dtype == self.precision.compute_dtype
        return tf.cast(outputs, tf.float32)[:, 0] * batch["slope"]


def ones(slope=1.0):
    """Four examples."""
    return {"x": np.ones([4, 1], np.float32), "slope": np.full(4, slope, np.float32)}


def test_model_with_dynamic_loss_scale(strategy):
    """0, -1, -2, then an overflow that moves nothing, then -3. The scale doubles after two finite
    steps and is halved by the overflow (test_dynamic_loss_scaling).
    """
    trainer = HalfProduct(
        strategy=strategy, precision="mixed_float16", loss_scale=growing_rule(interval=2)
    )
    seen = []
    for slope in (1.0, 1.0, 1.0, 1e6, 1.0):
        list(attempt(trainer, [ones(slope)]))
        seen.append((trainer.weight, trainer.loss_scale))

    assert seen == [(0.0, 2.0), (-1.0, 4.0), (-2.0, 4.0), (-2.0, 2.0), (-3.0, 2.0)]


class HalfPenalty(Linear):
    """A float16 model with a loss of its own."""

    def build_model(self):
        """One layer that adds its output to the losses."""
        inputs = keras.Input([1])
        outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs)
        return keras.Model(inputs, keras.layers.ActivityRegularization(l2=1.0)(outputs))


def test_losses_of_a_half_precision_model_are_float32():
    """The square of 300 does not fit float16; the loss is 90000 (test_functional_model_loss_dtype)."""
    trainer = HalfPenalty(precision="mixed_float16", loss_scale=None, optimizer=sgd(0.0))
    [report] = attempt(
        trainer, [{"x": np.full([1, 1], 300.0, np.float32), "slope": np.ones(1, np.float32)}]
    )

    assert report.regularization_loss == 90000.0


@pytest.mark.filterwarnings("ignore:.*CentralStorage")
def test_central_storage():
    """Tf_keras refuses central storage under loss scaling. Here two replicas that share one copy of
    each variable take the same steps as one device (testUnsupportedStrategy,
    test_custom_aggregation_central_storage).
    """
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    stepper = Stepper(
        [2.0],
        optimizer=sgd(momentum=1.0),
        strategy=central,
        rule=growing_rule(interval=2),
        **LIKE_TF_KERAS,
    )
    seen = []
    for factors in ([1.0, 1.0], [0.5, 1.5], [1.0, np.nan]):
        stepper.step([1.0], backward=factors)
        seen.append((stepper.weight.item(), stepper.loss_scale))

    assert seen == [(1.0, 2.0), (-1.0, 4.0), (-1.0, 2.0)]
