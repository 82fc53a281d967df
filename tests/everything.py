"""A model with every kind of state that a step can move, and batches that poison it at
any place.
"""

import keras
import numpy as np
import tensorflow as tf
from helpers import copies

from trainer import Trainer

EXAMPLES = 6  # divisible by 1, 2 and 3 replicas
PLACES = [
    "input",
    "loss",
    "backward",
    "reduction",
    "unscaling",
]  # where an inf or NaN first appears
OPTIMIZERS = ["momentum", "adamw"]


def on_read_variable():
    """A variable of which each replica may write its own copy."""
    return tf.Variable(
        0.0,
        trainable=False,
        name="raw",
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
    )


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
        self.raw = on_read_variable()

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


class State:
    """The model, the optimizer, a metric, and a random generator and a counter of the user's. It is
    made in the strategy's scope.

    Attributes:
        noise: the losses are multiplied by random numbers that are at most so far from 1.
    """

    noise = 0.0

    def create(self):
        """Creates the user's variables."""
        self.generator = tf.random.Generator.from_seed(1)
        self.seen = {1: [on_read_variable()]}

    def compute_loss(self, batch, training):
        """Draws random numbers and counts, in addition to the model's writes."""
        del training
        drawn = self.generator.uniform(tf.shape(batch["x"])[:1], -self.noise, self.noise or 1.0)
        self.seen[1][0].assign_add(drawn[0])
        factor = 1.0 + drawn if self.noise else 1.0
        return losses(self.model, batch) * factor, batch["x"][:, 0]

    def update_metrics(self, batch, aux):
        """Updates the mean."""
        del batch
        self.metrics["mean"].update_state(aux)

    def moving(self):
        """Every variable a step could move, except the loss scale and the counts."""
        return [
            *self.model.variables,
            *self.optimizer.variables,
            *self.metrics["mean"].variables,
            self.model.layers[2].raw,
            self.generator.state,
            self.seen[1][0],
        ]


class Everything(State, Trainer):
    """A trainer of it."""

    def __init__(self, optimizer_name, **arguments):
        """Creates the user's variables in the strategy's scope."""
        super().__init__(verbose=False, **arguments)
        self.optimizer_name = optimizer_name
        with self.strategy.scope():
            self.create()

    def build_model(self):
        """See above."""
        return build_model()

    def build_optimizer(self):
        """See above."""
        return build_optimizer(self.optimizer_name)

    def build_metrics(self):
        """Returns a mean."""
        return {"mean": keras.metrics.Mean()}


def bits(variables):
    """Every copy of every variable, by place and name."""
    return {
        f"{place} {getattr(variable, 'path', variable.name)} copy {copy}": value.tobytes()
        for place, variable in enumerate(variables)
        for copy, value in enumerate(copies(variable))
    }


def moved(before, after):
    """The names whose bits differ."""
    assert before.keys() == after.keys()
    return [name for name in before if before[name] != after[name]]


def restore(variables, values):
    """Restores the values of variables, copy by copy."""
    for variable, old in zip(variables, values, strict=True):
        inner = variable.value if isinstance(variable, keras.Variable) else variable
        for copy, value in zip(getattr(inner, "values", [inner]), old, strict=True):
            copy.assign(value)


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
