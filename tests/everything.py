"""A model with every kind of state that a step can move, and batches that poison it at
any place.
"""

import keras
import numpy as np
import tensorflow as tf

EXAMPLES = 6  # divisible by 1, 2 and 3 replicas
PLACES = [
    "input",
    "loss",
    "backward",
    "reduction",
    "unscaling",
]  # where an inf or NaN first appears
OPTIMIZERS = ["momentum", "adamw"]


class OwnAverage(keras.layers.Layer):
    """A user's layer that keeps statistics of its inputs in every kind of variable."""

    def build(self, shape):
        """Creates a moving average, a mean-aggregated variable, a counter, and a variable of
        TensorFlow's own.
        """
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
        """Updates all of them; returns the inputs."""
        level = keras.ops.mean(inputs)
        self.average.assign(0.9 * self.average + 0.1 * level)
        self.mean.assign(level)
        self.calls.assign(self.calls + 1)
        self.raw.assign_add(level)
        return inputs


def build_model():
    """BatchNorm, Dropout, SpectralNormalization, the layer above, and dense layers."""
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
    """SGD with momentum, or AdamW with a schedule, weight decay and a moving average."""
    if name == "momentum":
        return keras.optimizers.SGD(0.1, momentum=0.9)
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    return keras.optimizers.AdamW(rate, use_ema=True, ema_momentum=0.9)


def losses(model, batch):
    """One loss per example. The term (b - b) * gradient is 0, but its gradient reaches the last
    bias.
    """
    outputs = tf.cast(model(batch["x"], training=True), tf.float32)[:, 0]
    bias = tf.convert_to_tensor(model.layers[-1].bias)
    return outputs + (bias - tf.stop_gradient(bias)) * batch["gradient"] + batch["loss"]


def batch(place=None, replica=0, replicas=1, seed=0, scale=2.0**15):
    """A batch that poisons one replica's share, or for "reduction" every share.

    At a scale of about 2^15, an example's gradient of 1e38 overflows in the backward pass, and one
    of 1e25 only when it is squared. If every example's gradient is 1.5 times the largest that fits,
    each replica's share of the mean is finite but the sum over replicas is not.
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
        x[row] = np.inf  # so are the statistics that the layers compute
    return {"x": x, **poison}
