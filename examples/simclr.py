"""SimCLR in float16: a contrastive loss, which compares all examples of a batch with each other.

    python examples/simclr.py
    python examples/simclr.py --strategy=mirrored --logical_cpus=2

No label is used: two distorted views of one digit should be alike, and views of different digits
should not. `Losses(reduction="global")` says that the loss is one number of the whole batch, and
`all_gather` brings the rows of all replicas together, so two replicas compute the loss of one.
"""

from trainer import Losses, Trainer  # isort: skip  # import first: it configures TensorFlow

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS
KNOWN, TEMPERATURE, SIDE = 30, 0.5, 8


def nt_xent(one, other, temperature):
    """Returns SimCLR's loss (Chen et al., arXiv:2002.05709), a number.

    Args:
        one, other: the views, shape (examples, width); rows of the same number are alike.
        temperature: a small one looks at the hardest comparisons.
    """
    rows = tf.math.l2_normalize(tf.concat([one, other], axis=0), axis=1)
    count = tf.shape(rows)[0]
    similar = tf.matmul(rows, rows, transpose_b=True) / temperature - 1e9 * tf.eye(count)
    positives = tf.math.floormod(tf.range(count) + count // 2, count)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(positives, similar))


class SimClr(Trainer):
    """Compares the views of all examples."""

    def compute_loss(self, batch, training):
        """Returns the loss of the global batch."""
        views = [tf.cast(self.model(view, training=training), tf.float32) for view in batch]
        one, other = self.all_gather(views)
        return nt_xent(one, other, TEMPERATURE)


def network():
    """Returns an encoder with a head, which only the loss uses."""
    shape = [SIDE, SIDE, 1]
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu", name="embedding"),
            layers.Dense(32),
        ]
    )


def two_views(images):
    """Returns endless batches of two views; a batch depends only on its number and --seed."""

    def draw(number):
        seeds = tf.random.split(tf.stack([tf.cast(FLAGS.seed, tf.int64), number]), 3)
        rows = tf.random.stateless_uniform([FLAGS.global_batch], seeds[0], 0, len(images), tf.int32)
        chosen = tf.gather(images, rows)
        return distorted(chosen, seeds[1]), distorted(chosen, seeds[2])

    return tf.data.Dataset.counter().map(draw)


def distorted(images, seed):
    """Returns images that are moved by up to a pixel, with other contrast, and with noise."""
    seeds, count = tf.random.split(seed, 3), FLAGS.global_batch
    padded = tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]])
    corner = tf.random.stateless_uniform([count, 2], seeds[0], 0, 3, tf.int32)
    inside = tf.range(SIDE)
    moved = tf.gather(padded, corner[:, :1] + inside, batch_dims=1)
    moved = tf.gather(
        moved,
        (corner[:, 1:] + inside)[:, None] + tf.zeros([1, SIDE, 1], tf.int32),
        axis=2,
        batch_dims=2,
    )
    contrast = tf.random.stateless_uniform([count, 1, 1, 1], seeds[1], 0.6, 1.4)
    return contrast * moved + 0.1 * tf.random.stateless_normal(tf.shape(moved), seeds[2])


def accuracy(model, known, asked):
    """Returns how often the nearest known embedding, by angle, has the right label."""
    encoder = keras.Model(model.inputs, model.get_layer("embedding").output)
    codes = [np.asarray(encoder(images), np.float32) for images, _ in (known, asked)]
    one, other = (code / np.linalg.norm(code, axis=1, keepdims=True) for code in codes)
    return np.mean(known[1][np.argmax(other @ one.T, axis=1)] == asked[1])


def main(_):
    """Trains without labels, and classifies by the nearest of a few labeled digits."""
    from datasets import load

    (images, labels), test = load("digits")
    simclr = make_trainer(
        SimClr,
        model=network,
        optimizer=lambda: keras.optimizers.Adam(1e-3),
        losses=Losses(reduction="global"),
    )
    known = images[:KNOWN], labels[:KNOWN]
    before = accuracy(simclr.model, known, test)
    run_mode(simclr, two_views(images))
    after = accuracy(simclr.model, known, test)
    print(f"nearest of {KNOWN} labeled digits: {before:.1%} right before, {after:.1%} after")


if __name__ == "__main__":
    define_flags(precision="mixed_float16", steps=500, global_batch=128)
    app.run(main)
