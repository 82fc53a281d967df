"""An encoder and a decoder with masks, in float16: it learns to write numbers backwards.

    python examples/seq2seq.py
    python examples/seq2seq.py --strategy=mirrored --logical_cpus=2

The sequences have 1 to 8 digits and are padded with zeros. `Embedding(mask_zero=True)` makes the
mask, Keras's layers carry it to the output, and the trainer takes the mean over the tokens that
are there, counted over the global batch: no subclass, and the same on any number of replicas.
"""

from trainer import Trainer, Updates  # isort: skip  # import first: it configures TensorFlow

import keras
import numpy as np
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS
LENGTH, PAD, START, DIGIT = 8, 0, 1, 2  # a digit d is the token DIGIT + d
TOKENS = DIGIT + 10


def translator(width=96):
    """Returns a model of (source, target so far) to the logits of each next token."""
    source, target = (keras.Input([LENGTH], dtype="int32") for _ in range(2))
    _, state = layers.GRU(width, return_state=True)(embedded(source, width))
    decoder = layers.GRU(width, return_sequences=True)
    return keras.Model(
        (source, target),
        layers.Dense(TOKENS)(decoder(embedded(target, width), initial_state=state)),
    )


def embedded(tokens, width):
    """Returns vectors that carry the mask of the padding."""
    return layers.Embedding(TOKENS, width, mask_zero=True)(tokens)


def make_loss():
    """Returns the cross entropy of each token."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def numbers(count, seed):
    """Returns ((source, target so far), next tokens), each of shape (count, LENGTH)."""
    random = np.random.default_rng(seed)
    there = np.arange(LENGTH) < random.integers(1, LENGTH + 1, [count, 1])
    source = np.where(there, random.integers(DIGIT, TOKENS, [count, LENGTH]), PAD)
    # Sorting by presence moves the padding of the reversed rows to the end.
    order = np.argsort(~there[:, ::-1], axis=1, kind="stable")
    after = np.take_along_axis(source[:, ::-1], order, axis=1)
    so_far = np.where(there, np.roll(after, 1, axis=1), PAD)
    so_far[:, 0] = START
    source, so_far, after = (tokens.astype(np.int32) for tokens in (source, so_far, after))
    return (source, so_far), after


def write(model, source):
    """Returns the tokens that the model writes, each the likeliest after those before it."""
    written = np.full([len(source), LENGTH + 1], START, np.int32)
    for place in range(LENGTH):
        logits = keras.ops.convert_to_numpy(model((source, written[:, :-1])))
        written[:, place + 1] = logits[:, place, DIGIT:].argmax(axis=1) + DIGIT
    return np.where(source != PAD, written[:, 1:], PAD)


def main(_):
    """Trains, and prints how many held-out numbers are written backwards without an error."""
    writer = make_trainer(
        Trainer,
        model=translator,
        optimizer=lambda: keras.optimizers.Adam(5e-3),
        loss_fn=make_loss(),
    )
    (source, so_far), after = numbers(500, seed=2)
    results = run_mode(writer, numbers(20_000, seed=1), ((source, so_far), after))
    if results and writer.is_chief:
        right = np.all(write(writer.model, source) == after, axis=1)
        print(f"loss {results['loss']:.4f} per token, {np.mean(right):.1%} of the numbers right")


if __name__ == "__main__":
    define_flags(
        precision="mixed_float16", steps=600, global_batch=128, updates=Updates(global_clipnorm=1.0)
    )
    app.run(main)
