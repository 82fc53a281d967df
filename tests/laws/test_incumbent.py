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
