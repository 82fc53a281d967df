"""The private names of Keras that we use: each of these fails when Keras moves it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.base.keras_private import all_layers, computing_in_float32, gradients_already_reduced


def test_apply_takes_reduced_gradients_as_they_are(mirrored):
    """Within the context apply does not sum over replicas; afterwards it does again."""
    strategy = mirrored(3)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    def apply():
        optimizer.apply([tf.constant(1.0)], [weight])

    with gradients_already_reduced(optimizer):
        tf.function(lambda: strategy.run(apply))()
    assert float(weight.numpy()) == -1.0
    tf.function(lambda: strategy.run(apply))()
    assert float(weight.numpy()) == -4.0


def test_the_name_is_still_there_to_replace():
    """An attribute that Keras no longer reads would be set without effect."""
    assert callable(keras.optimizers.SGD()._all_reduce_sum_gradients)


def nested_model():
    """Layers inside layers, attention and a recurrent layer among them."""
    inner = keras.Sequential([keras.Input([4, 8]), keras.layers.Dense(8), keras.layers.LSTM(5)])
    inputs = keras.Input([4, 8])
    attended = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
    return keras.Model(inputs, keras.layers.Dense(3)(inner(attended)))


def test_all_layers_are_found():
    """Also the layers inside a model inside a model, and a cell inside a recurrent layer."""
    kinds = {type(layer).__name__ for layer in all_layers(nested_model())}

    assert {"Functional", "Sequential", "Dense", "LSTM", "LSTMCell", "MultiHeadAttention"} <= kinds


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_half_model_computes_exactly_in_float32(policy):
    """Within the context a mixed model gives the bits of a float32 model with the same weights."""
    keras.config.set_dtype_policy(policy)
    try:
        half = nested_model()
    finally:
        keras.config.set_dtype_policy("float32")
    full = nested_model()
    full.set_weights(half.get_weights())
    x = np.random.default_rng(0).standard_normal([2, 4, 8]).astype(np.float32)
    with computing_in_float32(half):
        ours = tf.function(half)(x)

    assert ours.dtype == tf.float32
    np.testing.assert_array_equal(ours, tf.function(full)(x))
    assert half.layers[-1].dtype_policy.name == policy
