"""Cases that Keras's own loss scaling gets wrong and ours gets right."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, attempt, copies, linear_model, slopes

import scaling


@pytest.mark.thorough
@pytest.mark.parametrize("bad_replica", [0, 1])
def test_an_infinity_on_one_replica_alone(mirrored, bad_replica):
    """L5: Keras's LossScaleOptimizer checks only replica 0's gradients. An infinity on replica 1
    reaches the weights of both replicas, and its scale does not even move. Ours skips the step,
    whichever replica it is.
    """
    strategy = mirrored(2)
    values = np.ones(2, np.float32)
    values[bad_replica] = 1e38

    with strategy.scope():
        model = linear_model()
        theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
        theirs.build(model.trainable_variables)

    def replica(slope):
        slope = slope[tf.distribute.get_replica_context().replica_id_in_sync_group]
        with tf.GradientTape() as tape:
            loss = theirs.scale_loss(model(tf.ones([1, 1]))[0, 0] * slope)
        theirs.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    tf.function(lambda: strategy.run(replica, (tf.constant(values),)))()
    poisoned = [copy.item() for copy in copies(model.trainable_variables[0])]

    ours = Linear(strategy=strategy, loss_scale=scaling.DynamicLossScale(initial_scale=8.0))
    [report] = attempt(ours, [slopes(*values)])
    good = [copy.item() for copy in copies(ours.model.trainable_variables[0])]

    if bad_replica == 1:
        assert poisoned == [-np.inf, -np.inf]
        assert float(theirs.dynamic_scale.numpy()) == 8.0
    else:
        assert poisoned == [1.0, 1.0]
    assert (report.grads_finite, report.cause) == (False, scaling.Cause.BACKWARD)
    assert np.isfinite(report.loss)
    assert ours.loss_scale == 4.0
    assert good == [1.0, 1.0]


@pytest.mark.thorough
def test_a_weight_that_the_forward_pass_writes():
    """SpectralNormalization assigns its kernel and is then differentiated at the assigned value:
    four steps in float32 reach the same weights as Keras's own layer in a bare loop.
    """

    class Spectral(Linear):
        def build_model(self):
            inner = keras.layers.Dense(4, activation="tanh")
            layers = [keras.layers.SpectralNormalization(inner), keras.layers.Dense(1)]
            return keras.Sequential([keras.Input([3]), *layers])

        def build_optimizer(self):
            return keras.optimizers.SGD(0.1)

    batch = {
        "x": np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3),
        "slope": np.linspace(1, 2, 5, dtype=np.float32),
    }
    ours = Spectral(seed=5)
    assert all(report.grads_finite for report in attempt(ours, [batch] * 4))

    keras.utils.set_random_seed(5)
    theirs, optimizer = Spectral().build_model(), keras.optimizers.SGD(0.1)
    for _ in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(theirs(batch["x"], training=True)[:, 0] * batch["slope"])
        variables = theirs.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    for mine, other in zip(ours.model.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
