"""A small byte-level transformer that learns to write Python, in bfloat16.

    python examples/language_model.py
    python examples/language_model.py --precision=mixed_float16
    python examples/language_model.py --steps=5000 --model_dir=runs/python

It reads the source files of Python's standard library in alphabetical order, up to --bytes. The
model predicts each byte of a window from the bytes before it; the last windows are held out.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import pathlib
import sysconfig

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS
BYTES = flags.DEFINE_integer("bytes", 1_000_000, "Number of bytes to read.", lower_bound=10_000)
PROMPT = flags.DEFINE_string("prompt", "    def ", "The text that the model continues.")
WINDOW, WIDTH, HEADS, BLOCKS = 64, 128, 4, 2


class Writer(Trainer):
    """A decoder: each byte attends to the bytes before it."""

    def build_model(self):
        """Returns the model; the trainer sets the precision."""
        text = keras.Input([WINDOW], dtype="int32")
        positions = layers.Embedding(WINDOW, WIDTH)(keras.ops.arange(WINDOW))
        hidden = layers.Embedding(256, WIDTH)(text) + positions
        for _ in range(BLOCKS):
            hidden = block(hidden)
        return keras.Model(text, layers.Dense(256)(layers.LayerNormalization()(hidden)))

    def build_optimizer(self):
        """Returns AdamW; its learning rate warms up and then decays along a cosine."""
        warmup = FLAGS.steps // 10
        schedule = keras.optimizers.schedules.CosineDecay(
            0.0, FLAGS.steps - warmup, warmup_target=3e-3, warmup_steps=warmup
        )
        return keras.optimizers.AdamW(schedule, weight_decay=0.01)

    def compute_loss(self, batch, training):
        """Returns the mean cross entropy over the bytes of each window, in float32."""
        logits = tf.cast(self.model(batch[:, :-1], training=training), tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch[:, 1:], logits)
        return tf.reduce_mean(losses, axis=1)


def block(hidden):
    """Returns causal attention and a perceptron, each with a residual connection."""
    normed = layers.LayerNormalization()(hidden)
    attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
    hidden = hidden + attention(normed, normed, use_causal_mask=True)
    wide = layers.Dense(4 * WIDTH, activation="relu")(layers.LayerNormalization()(hidden))
    return hidden + layers.Dense(WIDTH)(wide)


def read_windows():
    """Returns training and held-out windows, one byte longer than the model's input."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: BYTES.value]
    count = len(text) // (WINDOW + 1)
    windows = np.frombuffer(text, np.uint8, count * (WINDOW + 1)).reshape(count, -1)
    windows = windows.astype(np.int32)
    return windows[: -count // 20], windows[-count // 20 :]


def write(model, prompt, count=80):
    """Returns the prompt and the model's continuation, drawn with a fixed seed."""
    random, text = np.random.default_rng(0), list(prompt.encode())
    for _ in range(count):
        seen = text[-WINDOW:]
        padded = np.array([seen + [0] * (WINDOW - len(seen))], np.int32)
        logits = np.asarray(keras.ops.cast(model(padded), "float32"))[0, len(seen) - 1]
        # A temperature below 1 prefers likely bytes.
        weights = np.exp((logits - logits.max()) / 0.7)
        text.append(int(random.choice(256, p=weights / weights.sum())))
    return bytes(text).decode(errors="replace")


def main(_):
    """Trains, writes a sample, and prints the bits per byte; 8 would be chance."""
    writer = make_trainer(Writer)
    results = run_mode(writer, *read_windows())
    if results and writer.is_chief:
        print(f"it writes: {write(writer.model, PROMPT.value)!r}")
        print(f"held out: {results['loss'] / np.log(2):.2f} bits per byte")


if __name__ == "__main__":
    define_flags(precision="mixed_bfloat16", steps=400, global_batch=32)
    app.run(main)
