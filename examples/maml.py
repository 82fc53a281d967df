"""MAML in float16: a start from which one step of gradient descent learns a new task.

    python examples/maml.py
    python examples/maml.py --strategy=mirrored --logical_cpus=2

An example is a task: a sine wave of its own amplitude and phase, of which ten points are shown.
The network takes a step of gradient descent on them, and the loss is its error on ten other
points, so the outer gradient goes through the inner one.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import itertools

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS
POINTS, WIDTH, INNER_RATE = 10, 40, 0.02


class Learner(keras.Model):
    """Learns each task of a batch from its support points, and predicts its query points."""

    def __init__(self, width=WIDTH):
        """Creates the start, which all tasks share."""
        super().__init__()
        sizes = [1, width, width, 1]
        self.kernels = [self.add_weight(shape=pair) for pair in itertools.pairwise(sizes)]
        self.biases = [self.add_weight(shape=[size], initializer="zeros") for size in sizes[1:]]

    def call(self, batch, inner_rate=INNER_RATE):
        """Returns predictions for batch["x_query"], shape (tasks, points), in float32."""
        tasks = tf.shape(batch["x"])[0]
        start = [
            tf.repeat(tf.convert_to_tensor(each)[None], tasks, axis=0)
            for each in self.kernels + self.biases
        ]
        with tf.GradientTape() as tape:
            tape.watch(start)
            errors = predict(start, batch["x"]) - tf.cast(batch["y"], tf.float32)
            losses = tf.reduce_mean(errors**2, axis=1)
        slopes = tape.gradient(losses, start)
        adapted = [
            old - tf.cast(inner_rate, old.dtype) * slope
            for old, slope in zip(start, slopes, strict=True)
        ]
        return predict(adapted, batch["x_query"])


def predict(weights, x):
    """Returns each task's own network at its points x, shape (tasks, points), in float32."""
    half = len(weights) // 2
    hidden = tf.cast(x, weights[0].dtype)[..., None]
    for number, (kernel, bias) in enumerate(zip(weights[:half], weights[half:], strict=True)):
        hidden = tf.matmul(hidden, kernel) + bias[:, None]
        hidden = tf.nn.relu(hidden) if number < half - 1 else hidden
    return tf.cast(hidden[..., 0], tf.float32)


def maml_losses(model, batch):
    """Returns the loss of each task after its step (Finn et al., arXiv:1703.03400, algorithm 2)."""
    return tf.reduce_mean((model(batch) - batch["y_query"]) ** 2, axis=1)


class Maml(Trainer):
    """Finds the start."""

    def compute_loss(self, batch, training):  # noqa: ARG002  # no layer asks for it
        """Returns one loss per task."""
        return maml_losses(self.model, batch)


def tasks(number, count):
    """Returns a batch of sine waves that depends only on its number and --seed."""
    seeds = tf.random.split(tf.stack([tf.cast(FLAGS.seed, tf.int64), number]), 3)
    height = tf.random.stateless_uniform([count, 1], seeds[0], 0.5, 2.0)
    phase = tf.random.stateless_uniform([count, 1], seeds[1], 0.0, np.pi)
    x = tf.random.stateless_uniform([count, 2 * POINTS], seeds[2], -3.0, 3.0)
    y = height * tf.sin(x + phase)
    return {
        "x": x[:, :POINTS],
        "y": y[:, :POINTS],
        "x_query": x[:, POINTS:],
        "y_query": y[:, POINTS:],
    }


def main(_):
    """Trains, and compares the error on new tasks before and after the inner step."""
    maml = make_trainer(Maml, model=Learner, optimizer=lambda: keras.optimizers.Adam(2e-3))
    run_mode(maml, tf.data.Dataset.counter().map(lambda number: tasks(number, FLAGS.global_batch)))
    new = tasks(tf.constant(-1, tf.int64), 500)
    unadapted, adapted = (
        float(tf.reduce_mean((maml.model(new, inner_rate=rate) - new["y_query"]) ** 2))
        for rate in (0.0, INNER_RATE)
    )
    print(f"error on new tasks: {unadapted:.3f} at the start, {adapted:.3f} after one step")


if __name__ == "__main__":
    define_flags(precision="mixed_float16", steps=3000, global_batch=64)
    app.run(main)
