"""A variational autoencoder in float16: digits as two numbers, and new ones from noise.

    python examples/vae.py
    python examples/vae.py --precision=float32
    python examples/vae.py --strategy=mirrored --logical_cpus=2

The noise of the code is part of the batch, and a batch is a function of its number: a run that is
resumed, retried or divided among replicas sees the same noise.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS
PIXELS, CODE = 64, 2


class Autoencoder(keras.Model):
    """Returns the logits of the pixels, and the mean and log-variance of the code."""

    def __init__(self):
        """Builds both halves."""
        super().__init__()
        self.encoder, self.decoder = network(PIXELS, 2 * CODE), network(CODE, PIXELS)

    def call(self, batch):
        """Encodes images, shape (examples, PIXELS), adds the noise, and decodes."""
        # float32: exp overflows in float16 from 11.1 on.
        mean, variance = tf.split(tf.cast(self.encoder(batch["image"]), tf.float32), 2, axis=1)
        code = mean + tf.exp(0.5 * variance) * tf.cast(batch["noise"], tf.float32)
        return tf.cast(self.decoder(code), tf.float32), mean, variance


def network(inputs, outputs):
    """Returns two dense layers; the trainer sets the precision."""
    hidden = layers.Dense(128, activation="relu")
    return keras.Sequential([keras.Input([inputs]), hidden, layers.Dense(outputs)])


def vae_losses(model, batch):
    """Returns the negative evidence bound of each example (Kingma and Welling, arXiv:1312.6114)."""
    logits, mean, variance = model(batch)
    pixels = tf.nn.sigmoid_cross_entropy_with_logits(batch["image"], logits)
    divergence = 0.5 * (tf.exp(variance) + mean**2 - 1.0 - variance)
    return tf.reduce_sum(pixels, axis=1) + tf.reduce_sum(divergence, axis=1)


class Vae(Trainer):
    """Maximizes the evidence bound."""

    def compute_loss(self, batch, training):  # noqa: ARG002  # no layer asks for it
        """Returns one loss per example."""
        return vae_losses(self.model, batch)


def batches(images):
    """Returns batches of images and noise that depend only on their number and --seed."""

    def draw(number):
        seeds = tf.random.split(tf.stack([tf.cast(FLAGS.seed, tf.int64), number]), 2)
        rows = tf.random.stateless_uniform([FLAGS.global_batch], seeds[0], 0, len(images), tf.int32)
        noise = tf.random.stateless_normal([FLAGS.global_batch, CODE], seeds[1])
        return {"image": tf.gather(images, rows), "noise": noise}

    return tf.data.Dataset.counter().map(draw)


def picture(image):
    """Returns a digit as eight lines of text."""
    return "\n".join("".join(" .:*#"[int(4.99 * x)] for x in row) for row in image.reshape(8, 8))


def main(_):
    """Trains, prints a digit drawn from noise, and the held-out bound."""
    from datasets import load

    (images, _), (held_out, _) = load("digits")
    vae = make_trainer(Vae, model=Autoencoder, optimizer=lambda: keras.optimizers.Adam(2e-3))
    noise = np.random.default_rng(0).normal(size=[len(held_out), CODE]).astype(np.float32)
    test = {"image": held_out.reshape(-1, PIXELS), "noise": noise}
    results = run_mode(vae, batches(images.reshape(-1, PIXELS)), test)
    if results and vae.is_chief:
        print(picture(keras.ops.convert_to_numpy(tf.sigmoid(vae.model.decoder(noise[:1])))))
        print(f"held out: {results['loss']:.2f} nats per digit")


if __name__ == "__main__":
    define_flags(precision="mixed_float16", steps=2000, global_batch=128)
    app.run(main)
