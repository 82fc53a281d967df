"""A custom strategy: mirrored on every device except the first, which stays free for the desktop.

    python examples/own_strategy.py
    python examples/own_strategy.py --strategy=mirrored

A strategy is registered as a function of the requested devices, under a name that
`--strategy`, `Trainer` and `strategies.create` then accept. Here it fits a line.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import keras
import numpy as np
import tensorflow as tf
from absl import app

import strategies
from trainer.flags import define_flags, make_trainer, run_mode


def spare_first(devices):
    """Returns a mirrored strategy on the named devices, or on all devices except the first."""
    if devices is None:
        found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        devices = [device.name.removeprefix("/device:") for device in found[1:]]
    return strategies.create("mirrored", devices)


class Line(Trainer):
    """A line with a slope and an intercept."""

    def build_model(self):
        """Returns a model with one dense layer."""
        return keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])

    def build_optimizer(self):
        """Returns plain SGD."""
        return keras.optimizers.SGD(0.5)

    def compute_loss(self, batch, training):
        """Returns the squared error of each example."""
        x, y = batch
        return keras.losses.mean_squared_error(y, self.model(x, training=training))


def main(_):
    """Fits y = 3 x + 1."""
    strategies.split_cpu(4)
    line = make_trainer(Line)
    x = np.random.default_rng(0).uniform(-1, 1, [256, 1]).astype(np.float32)
    run_mode(line, (x, 3 * x + 1))
    slope, intercept = (float(weight.ravel()[0]) for weight in line.model.get_weights())
    replicas = line.strategy.num_replicas_in_sync
    print(f"y = {slope:.2f} x + {intercept:.2f}, found by {replicas} replicas")


if __name__ == "__main__":
    strategies.register("spare_first", spare_first)
    define_flags(strategy="spare_first", steps=200, log_interval=100)
    app.run(main)
