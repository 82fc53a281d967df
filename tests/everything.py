"""A model in which everything moves that a step can move, and batches that poison it anywhere."""

import keras
import numpy as np
import tensorflow as tf

EXAMPLES = 6  # divisible by 1, 2 and 3 replicas
PLACES = ["input", "loss", "backward", "reduction", "unscaling"]
OPTIMIZERS = ["momentum", "adamw"]


class OwnAverage(keras.layers.Layer):
    """A user's layer that keeps statistics of what passes through it, in every way there is."""

    def build(self, shape):
        """A moving average, a mean-aggregated variable, a counter, and one of TensorFlow's own."""
        zero = {"shape": (), "initializer": "zeros", "trainable": False}
        self.average = self.add_weight(name="own_average", **zero)
        self.mean = self.add_weight(name="mean_aggregated", aggregation="mean", **zero)
        self.calls = self.add_weight(name="calls", dtype="int32", **zero)
        self.raw = tf.Variable(
            0.0,
            trainable=False,
            name="raw",
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )

    def call(self, inputs):
        """Writes all of them."""
        level = keras.ops.mean(inputs)
        self.average.assign(0.9 * self.average + 0.1 * level)
        self.mean.assign(level)
        self.calls.assign(self.calls + 1)
        self.raw.assign_add(level)
        return inputs


def build_model():
    """BatchNorm, Dropout, SpectralNormalization, the layer above, and a dense layer."""
    return keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.SpectralNormalization(keras.layers.Dense(4)),
            keras.layers.BatchNormalization(),
            OwnAverage(),
            keras.layers.Dropout(0.25, seed=1),
            keras.layers.Dense(1),
        ]
    )


def build_optimizer(name):
    """SGD with momentum; or AdamW with a schedule, weight decay and a moving average."""
    if name == "momentum":
        return keras.optimizers.SGD(0.1, momentum=0.9)
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    return keras.optimizers.AdamW(rate, use_ema=True, ema_momentum=0.9)


def losses(model, batch):
    """One per example; (b - b) * poison is 0, but the last bias's gradient is the poison's."""
    outputs = tf.cast(model(batch["x"], training=True), tf.float32)[:, 0]
    bias = tf.convert_to_tensor(model.layers[-1].bias)
    return outputs + (bias - tf.stop_gradient(bias)) * batch["gradient"] + batch["loss"]


def batch(place=None, replica=0, replicas=1, seed=0, scale=2.0**15):
    """A batch in which one replica's share, or for a sum that overflows all, goes wrong.

    At a scale of around 2^15 an example's gradient of 1e38 overflows where it is computed, and one of
    1e25 only when it is squared. If every example's is 1.5 times the largest that fits, a
    replica's share of the mean fits, and the sum over replicas does not.
    """
    rng = np.random.default_rng(seed)
    poison = {name: np.zeros(EXAMPLES, np.float32) for name in ("loss", "gradient")}
    row = replica * EXAMPLES // replicas
    if place == "loss":
        poison["loss"][row] = np.nan
    elif place == "backward":
        poison["gradient"][row] = 1e38
    elif place == "unscaling":
        poison["gradient"][row] = 1e25
    elif place == "reduction":
        poison["gradient"][:] = 1.5 * 3.4e38 / scale
    x = rng.normal(size=[EXAMPLES, 3]).astype(np.float32)
    if place == "input":
        x[row] = np.inf  # and so every statistic that a layer takes of it
    return {"x": x, **poison}
