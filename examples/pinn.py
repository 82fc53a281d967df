"""A physics-informed network in float16: it solves u'' + u = 0 from the equation alone.

    python examples/pinn.py
    python examples/pinn.py --precision=float32
    python examples/pinn.py --strategy=mirrored --logical_cpus=2

The data are points without labels. The loss at a point is the residual of the equation there, with
two derivatives in x, plus the errors of u(0) = 0 and u'(0) = 1, which leave u = sin as the only
solution.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS


def network(width=32):
    """Returns a smooth network of one number; the trainer sets the precision."""
    hidden = [layers.Dense(width, activation="tanh") for _ in range(2)]
    return keras.Sequential([keras.Input([1]), *hidden, layers.Dense(1)])


def pinn_losses(model, x):
    """Returns the loss at each point of x, shape (points, 1) (Raissi et al., arXiv:1711.10561)."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        value, slope = value_and_slope(model, x)
    residual = tape.gradient(slope, x) + value
    at_zero, slope_at_zero = value_and_slope(model, tf.zeros_like(x))
    return (residual**2 + at_zero**2 + (slope_at_zero - 1.0) ** 2)[:, 0]


def value_and_slope(model, x):
    """Returns u and u' in float32."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.cast(model(x), tf.float32)
    return value, tape.gradient(value, x)


class Oscillator(Trainer):
    """Learns the equation."""

    def compute_loss(self, batch, training):  # noqa: ARG002  # no layer asks for it
        """Returns one loss per point."""
        return pinn_losses(self.model, batch)


def points(number):
    """Returns points between 0 and pi that depend only on their number and --seed."""
    seed = tf.stack([tf.cast(FLAGS.seed, tf.int64), number])
    return tf.random.stateless_uniform([FLAGS.global_batch, 1], seed, 0.0, np.pi)


def main(_):
    """Trains, and prints the largest distance from the sine."""
    schedule = keras.optimizers.schedules.CosineDecay(5e-3, FLAGS.steps)
    oscillator = make_trainer(
        Oscillator, model=network, optimizer=lambda: keras.optimizers.Adam(schedule)
    )
    run_mode(oscillator, tf.data.Dataset.counter().map(points))
    x = np.linspace(0, np.pi, 100, dtype=np.float32)[:, None]
    error = np.max(np.abs(oscillator.predict(x, global_batch=100) - np.sin(x)))
    print(f"largest distance from the sine: {error:.4f}")


if __name__ == "__main__":
    define_flags(precision="mixed_float16", steps=2000, global_batch=64)
    app.run(main)
