"""A Wasserstein GAN with gradient penalty in float16: five updates of the critic in each step.

    python examples/wgan_gp.py
    python examples/wgan_gp.py --strategy=mirrored --logical_cpus=2

The generator turns noise into points in the plane, and the critic tells them from a ring of eight
Gaussians. The loss holds the norm of the critic's gradient near 1, so it is differentiated twice.
All updates of a step use its real points, with new noise each; if one overflows, none is kept.
"""

from trainer import Trainer, Updates  # isort: skip  # import first: it configures TensorFlow

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS
SPREAD, LATENT, PENALTY = 0.1, 8, 1.0


class Pair(keras.Model):
    """Both networks; the optimizers have the same names as these attributes."""

    def __init__(self):
        """Builds two networks of three dense layers, and the source of the noise."""
        super().__init__()
        self.critic, self.generator = network(2, 1), network(LATENT, 2)
        self.noise = keras.random.SeedGenerator(seed=0)


def network(inputs, outputs):
    """Returns a small network; the trainer sets the precision."""
    hidden = [layers.Dense(128, activation="leaky_relu") for _ in range(2)]
    return keras.Sequential([keras.Input([inputs]), *hidden, layers.Dense(outputs)])


def wgan_losses(model, real, noise, mix):
    """Returns the losses of both networks (Gulrajani et al., arXiv:1704.00028, algorithm 1).

    Args:
        model: a `Pair`.
        real: points, shape (examples, 2).
        noise: shape (examples, LATENT).
        mix: where between a real and a generated point the gradient is taken, shape (examples, 1).
    """
    fake = tf.cast(model.generator(noise), tf.float32)
    between = mix * real + (1.0 - mix) * tf.stop_gradient(fake)
    with tf.GradientTape() as tape:
        tape.watch(between)
        scores = judged(model, between)
    slopes = tf.sqrt(tf.reduce_sum(tape.gradient(scores, between) ** 2, axis=1) + 1e-12)
    on_fake = judged(model, fake)
    return {
        "critic": on_fake - judged(model, real) + PENALTY * (slopes - 1.0) ** 2,
        "generator": -on_fake,
    }


def judged(model, points):
    """Returns the critic's score of each point, float32."""
    return tf.cast(model.critic(points)[:, 0], tf.float32)


class Wgan(Trainer):
    """Trains the two networks against each other."""

    def build_optimizer(self):
        """Returns one Adam for each network; they are updated in this order."""
        return {name: keras.optimizers.Adam(5e-4, 0.5, 0.9) for name in ("critic", "generator")}

    def compute_loss(self, batch, training):  # noqa: ARG002  # no layer asks for it
        """Returns two losses per example, with new noise at each call."""
        count, seed = tf.shape(batch)[0], self.model.noise
        noise = keras.random.normal([count, LATENT], dtype="float32", seed=seed)
        mix = keras.random.uniform([count, 1], dtype="float32", seed=seed)
        return wgan_losses(self.model, batch, noise, mix)


def ring(number, count):
    """Returns points that depend only on their number and --seed."""
    seeds = tf.random.split(tf.stack([tf.cast(FLAGS.seed, tf.int64), number]), 2)
    corner = tf.random.stateless_uniform([count], seeds[0], 0, 8, tf.int32)
    angle = tf.cast(corner, tf.float32) * np.float32(np.pi / 4)
    center = tf.stack([tf.cos(angle), tf.sin(angle)], axis=1)
    return center + SPREAD * tf.random.stateless_normal([count, 2], seeds[1])


def distance(model, sample):
    """Returns the energy distance of generated points from a sample; alike ones have 0."""
    noise = np.random.default_rng(0).normal(size=[len(sample), LATENT]).astype(np.float32)
    made = np.asarray(model.generator(noise), np.float32)
    pairs = [(made, sample), (made, made), (sample, sample)]
    between, *within = [np.mean(np.linalg.norm(a[:, None] - b, axis=-1)) for a, b in pairs]
    return np.sqrt(max(2 * between - sum(within), 0.0))


def main(_):
    """Trains, and compares the generator's points with the ring before and after."""
    gan = make_trainer(
        Wgan, model=Pair, updates=Updates(alternate_optimizers=True, updates_per_step={"critic": 5})
    )
    sample = np.array(ring(tf.constant(-1, tf.int64), 2000))
    before = distance(gan.model, sample)
    run_mode(gan, tf.data.Dataset.counter().map(lambda number: ring(number, FLAGS.global_batch)))
    print(f"distance from the ring: {before:.3f} before, {distance(gan.model, sample):.3f} after")


if __name__ == "__main__":
    define_flags(
        precision="mixed_float16",
        steps=1000,
        global_batch=256,
        log_interval=250,
        jit_compile="true",
    )
    app.run(main)
