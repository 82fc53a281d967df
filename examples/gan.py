"""A small GAN in float16: two networks, each with its own optimizer.

    python examples/gan.py
    python examples/gan.py --alternate
    python examples/gan.py --strategy=mirrored --logical_cpus=2 --precision=float32

The generator turns noise into points in the plane, and the discriminator distinguishes them from
a ring of eight Gaussians. A step updates both networks or neither, so that an overflow in one
does not let the other get ahead. Each batch, including its noise, is a function of its number.
The loss scale starts at 2^24, which is far too high, so the first steps are skipped.
"""

from trainer import Trainer, Updates  # isort: skip  # import first: it configures TensorFlow

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS
ALTERNATE = flags.DEFINE_boolean("alternate", False, "Update one network after the other.")
SPREAD, LATENT = 0.1, 8


class Pair(keras.Model):
    """Both networks; the optimizers have the same names as these attributes."""

    def __init__(self):
        """Builds two networks of three dense layers."""
        super().__init__()
        self.discriminator = network(2, 1)
        self.generator = network(LATENT, 2)


def network(inputs, outputs):
    """Returns a small network; the trainer sets the precision."""
    hidden = [layers.Dense(128, activation="leaky_relu") for _ in range(2)]
    return keras.Sequential([keras.Input([inputs]), *hidden, layers.Dense(outputs)])


class Gan(Trainer):
    """Trains the two networks against each other."""

    def build_model(self):
        """Returns both networks as one model."""
        return Pair()

    def build_optimizer(self):
        """Returns one Adam for each network; with --alternate they are updated in this order."""
        names = ["discriminator", "generator"]
        return {name: keras.optimizers.Adam(1e-3, beta_1=0.5) for name in names}

    def compute_loss(self, batch, training):
        """Returns two losses per example, one for each network."""
        fake = self.model.generator(batch["noise"], training=training)
        on_real, on_fake = (
            tf.cast(self.model.discriminator(points, training=training)[:, 0], tf.float32)
            for points in (batch["real"], fake)
        )
        return {
            "discriminator": tf.nn.softplus(-on_real) + tf.nn.softplus(on_fake),
            "generator": tf.nn.softplus(-on_fake),
        }

    def predict_batch(self, batch):
        """Returns the points that the generator makes from the batch's noise."""
        return self.model.generator(batch["noise"], training=False)


def draw(number, count):
    """Returns a batch of points and noise that depends only on its number and --seed."""
    seeds = tf.random.split(tf.stack([tf.cast(FLAGS.seed, tf.int64), number]), 3)
    corner = tf.random.stateless_uniform([count], seeds[0], 0, 8, tf.int32)
    angle = tf.cast(corner, tf.float32) * np.float32(np.pi / 4)
    center = tf.stack([tf.cos(angle), tf.sin(angle)], axis=1)
    real = center + SPREAD * tf.random.stateless_normal([count, 2], seeds[1])
    return {"real": real, "noise": tf.random.stateless_normal([count, LATENT], seeds[2])}


def energy_distance(first, second):
    """Returns the energy distance of two samples, which is 0 for equal samples."""
    pairs = [(first, second), (first, first), (second, second)]
    between, *within = [np.mean(np.linalg.norm(a[:, None] - b, axis=-1)) for a, b in pairs]
    return np.sqrt(max(2 * between - sum(within), 0.0))


def main(_):
    """Trains, and compares the generator's points with the ring before and after."""
    gan = make_trainer(Gan, updates=Updates(alternate_optimizers=ALTERNATE.value))
    sample = tf.nest.map_structure(np.array, draw(-1, 2000))
    before = energy_distance(gan.predict(sample, global_batch=500), sample["real"])
    numbers = tf.data.Dataset.counter()
    run_mode(gan, numbers.map(lambda number: draw(number, FLAGS.global_batch)))
    after = energy_distance(gan.predict(sample, global_batch=500), sample["real"])
    noise = energy_distance(np.array(draw(-2, 2000)["real"]), sample["real"])  # two ring samples
    print(f"distance from the ring: {before:.3f} before, {after:.3f} after; noise {noise:.3f}")


if __name__ == "__main__":
    define_flags(
        precision="mixed_float16",
        loss_scale="dynamic:initial_scale=2^24",
        steps=2000,
        global_batch=256,
        seed=1,  # adversarial training does not converge with every seed
    )
    app.run(main)
