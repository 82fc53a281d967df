"""Measures calls that train a little: `train_on_batch`, and `train` called often, beside Keras's.

Run `python benchmarks/online.py` from the root of the repository. It prints the ratios of the time
of a call to that of Keras, measured in turn.
"""

from trainer import Trainer  # isort: skip  # first, because it configures TensorFlow

import keras
import numpy as np
from turns import Contender, in_turn, ratios_of, table, with_interval

STEPS = 20  # steps of one short call of `train` or `fit`
BATCH = 64


def mlp(width):
    """Returns a network with a hidden layer."""
    layers = [keras.layers.Dense(width, "relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input([64]), *layers])


def adam():
    """Returns the optimizer of all contenders."""
    return keras.optimizers.Adam(1e-3)


def loss():
    """Returns the loss of all contenders."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def trainer_of(width):
    """Returns a trainer that prints nothing."""
    return Trainer(
        model=lambda: mlp(width),
        optimizer=adam,
        loss_fn=loss(),
        metrics=["accuracy"],
        verbose=False,
    )


def compiled(width):
    """Returns the same in Keras."""
    network = mlp(width)
    network.compile(adam(), loss(), metrics=["accuracy"])
    return network


def batches_of(width):
    """Returns `train_on_batch` of both, by name."""
    ours, theirs, batch = trainer_of(width), compiled(width), made(BATCH)

    def take(steps):
        for _ in range(steps):
            ours.train_on_batch(batch)

    def fit(steps):
        for _ in range(steps):
            theirs.train_on_batch(*batch, return_dict=True)

    return {"ours": Contender(take), "Keras's": Contender(fit)}


def short_calls_of(width, *, new):
    """Returns calls of `train` and `fit` that take `STEPS` steps, by name.

    Args:
        width: of the hidden layer.
        new: whether each call gets new arrays.
    """
    ours, theirs, arrays = trainer_of(width), compiled(width), made(STEPS * BATCH)
    step = [0]

    def data():
        return tuple(part.copy() for part in arrays) if new else arrays

    def take(calls):
        for _ in range(calls):
            step[0] += STEPS
            ours.train(data(), step[0], global_batch=BATCH)

    def fit(calls):
        for _ in range(calls):
            theirs.fit(*data(), batch_size=BATCH, verbose=0)

    return {"ours": Contender(take), "Keras's": Contender(fit)}


def made(examples):
    """Returns inputs and labels."""
    rng = np.random.default_rng(0)
    return rng.normal(size=[examples, 64]).astype("float32"), rng.integers(0, 10, examples)


def row(name, contenders, rounds=15):
    """Returns a line of the table."""
    turns = in_turn(contenders, rounds, turn_secs=0.3)
    medians = [f"{np.median(turns[each]):.2f}" for each in ("ours", "Keras's")]
    return [name, *medians, with_interval(ratios_of(turns, "ours", "Keras's"))]


def main():
    """Measures and prints a table."""
    rows = [["a call of", "ours, ms", "Keras's, ms", "ratio"]]
    rows.append(row("train_on_batch, 16 units", batches_of(16)))
    rows.append(row("train_on_batch, 512 units", batches_of(512)))
    rows.append(row(f"train, {STEPS} steps, the same arrays", short_calls_of(16, new=False)))
    rows.append(row(f"train, {STEPS} steps, new arrays", short_calls_of(16, new=True)))
    print(table(rows))


if __name__ == "__main__":
    main()
