"""A byte-level transformer in float32, bfloat16 and float8, from the same weights and batches.

    python examples/float8.py
    python examples/float8.py --seeds=5 --steps=600

It learns the source of Python's argparse module; the last tenth is held out. On a CPU, float8 is
emulated: it shows what float8 does to the loss, and is slower than bfloat16.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import argparse
import pathlib

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

FLAGS = flags.FLAGS
flags.DEFINE_integer("steps", 300, "Number of steps of each run.", lower_bound=1)
flags.DEFINE_integer("seeds", 1, "Number of runs in each precision.", lower_bound=1)
WINDOW, WIDTH, HEADS, BLOCKS = 32, 64, 4, 2
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float8")


def decoder():
    """Returns a model in which each byte attends to the bytes before it."""
    text = keras.Input([WINDOW], dtype="int32")
    positions = layers.Embedding(WINDOW, WIDTH)(keras.ops.arange(WINDOW))
    hidden = layers.Embedding(256, WIDTH)(text) + positions
    for _ in range(BLOCKS):
        normed = layers.LayerNormalization()(hidden)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        hidden = hidden + attention(normed, normed, use_causal_mask=True)
        wide = layers.Dense(4 * WIDTH, activation="relu")(layers.LayerNormalization()(hidden))
        hidden = hidden + layers.Dense(WIDTH)(wide)
    return keras.Model(
        text, layers.Dense(256, dtype="float32")(layers.LayerNormalization()(hidden))
    )


def cross_entropy(next_bytes, logits):
    """Returns each window's mean cross entropy."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(next_bytes, tf.cast(logits, tf.float32))
    return tf.reduce_mean(losses, axis=1)


def read_windows():
    """Returns training and held-out windows: pairs of a window and the bytes that follow."""
    text = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
    count = (len(text) - 1) // WINDOW
    windows = text[: count * WINDOW].reshape(count, WINDOW)
    following = text[1 : count * WINDOW + 1].reshape(count, WINDOW)
    held_out = count // 10
    return (windows[:-held_out], following[:-held_out]), (
        windows[-held_out:],
        following[-held_out:],
    )


def held_out_loss(precision, seed, train_data, held_out):
    """Trains a model, and returns its loss on held-out windows in bits per byte."""
    trainer = Trainer(
        model=decoder,
        optimizer=lambda: keras.optimizers.Adam(2e-3),
        loss_fn=cross_entropy,
        precision=precision,
        seed=seed,
        verbose=False,
    )
    trainer.train(train_data, steps=FLAGS.steps, global_batch=32)
    # In the precision of the training: float8 layers stay in float8.
    loss = trainer.evaluate(held_out, global_batch=32, precision="train")["loss"]
    return loss / np.log(2)


def main(_):
    """Trains in each precision and prints the losses."""
    data = read_windows()
    for precision in PRECISIONS:
        losses = [held_out_loss(precision, seed, *data) for seed in range(FLAGS.seeds)]
        spread = f" +- {np.std(losses, ddof=1):.3f}" if len(losses) > 1 else ""
        print(f"{precision:16s} {np.mean(losses):.3f}{spread} bits per byte", flush=True)


if __name__ == "__main__":
    app.run(main)
