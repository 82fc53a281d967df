"""Lowers the trainer's step to the program that one core of a TPU runs: python lower.py OUT KIND.

The step is traced under a `TPUStrategy` (see `fake_tpu`). The program of one core is cut out of the
graph, its two kinds of collectives, which have no kernel outside a TPU, are replaced by operations
that XLA can lower for a CPU, and the result is written as HLO with the values of its arguments.

KIND is a precision, or the name of a step that must fail: `prints`, `huge` or `divergent`. This
program uses private names of TensorFlow 2.21, and no package of the project imports it.
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import fake_tpu
import keras
import numpy as np
import tensorflow as tf
from lowered_step import copies, lower_replica, programs_of, started

import strategies
from trainer import Trainer, Updates
from trainer.step.report import Outcome

CORES = 4
BATCH = 16


class Checked(Trainer):
    """A trainer with BatchNorm, Dropout, momentum and a moving average.

    `kind` is a precision, or adds to the step what it must not have.
    """

    def __init__(self, kind, strategy, jit_compile=False):
        """Computes in bfloat16 unless `kind` is another precision."""
        precision = kind if kind.startswith("mixed") else "mixed_bfloat16"
        super().__init__(
            strategy=strategy,
            precision=precision,
            loss_scale=2.0**8,
            updates=Updates(ema_momentum=0.9),
            jit_compile=jit_compile,
            seed=1,
            verbose=False,
        )
        self.kind = kind

    def build_model(self):
        """A small model."""
        return keras.Sequential(
            [
                keras.Input([6]),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ],
            name="checked",
        )

    def build_optimizer(self):
        """SGD, whose update shows every factor in a gradient."""
        return keras.optimizers.SGD(0.1, momentum=0.9, name="sgd")

    def compute_loss(self, batch, training):
        """Squared errors, and the operations that a step of this kind must not have."""
        x, y = batch
        predictions = tf.cast(self.model(x, training=training), tf.float32)
        if self.kind == "prints":
            tf.print(predictions)
        if self.kind == "huge":  # a product of 50 GB
            drawn = tf.random.stateless_normal([112_000, 112_000], [1, 2])
            product = tf.matmul(tf.tanh(tf.matmul(drawn, drawn)), drawn)
            predictions += 1e-9 * tf.reduce_max(product)
        if self.kind == "divergent":  # a collective behind a condition that can differ by replica
            bad = ~tf.math.is_finite(tf.reduce_sum(y))
            mean = tf.stop_gradient(tf.reduce_mean(predictions))
            predictions += tf.cond(bad, lambda: 0.0, lambda: strategies.sum_gradients(mean))
        return tf.square(predictions - y)[:, 0]


def example(poisoned):
    """Returns a global batch; if poisoned, an example of the third replica has an infinite target."""
    x = np.random.default_rng(0).normal(size=[BATCH, 6]).astype(np.float32)
    y = np.tanh(x[:, :1])
    if poisoned:
        y[9] = np.inf
    return x, y


def lower(trainer, out):
    """Writes `OUT/step.hlo`, `OUT/arguments.npz` and `OUT/facts.json`, which describes them."""
    spec = started(trainer, example(poisoned=False))
    lowered, graph = lower_replica(trainer, spec, value_of)
    (out / "step.hlo").write_bytes(lowered.hlo)
    arrays = [*lowered.values, *(variable.numpy() for variable in lowered.variables)]
    np.savez(out / "arguments.npz", *arrays)
    facts = {
        "programs": programs_of(graph),
        "divergent": fake_tpu.divergent_conditions(graph),
        "replica": lowered.inputs.index("replica"),
        "targets": [
            index for index, value in enumerate(lowered.values) if value.shape == (BATCH, 1)
        ],
        "outcome": [*Outcome._fields],
        "paths": [path for path, _ in copies(trainer)],
        # For each variable that is written: its path, and its indices among outputs and arguments.
        "written": [
            (lowered.paths[argument - len(lowered.values)], output, argument)
            for argument, output in lowered.written
        ],
    }
    (out / "facts.json").write_text(json.dumps(facts))


def value_of(tensor):
    """Returns the value of an input of the step that is neither a variable nor a constant."""
    x, y = example(poisoned=False)
    by_shape = {(BATCH, 6): x, (BATCH, 1): y, (BATCH,): np.ones([BATCH], np.float32)}
    if tensor.dtype == tf.int64:  # the key of random numbers: seed 1, step 0
        return np.array([1, 0], np.int64)
    return by_shape.get(tuple(tensor.shape), np.float32(2.0**8))


if __name__ == "__main__":
    lower(Checked(sys.argv[2], fake_tpu.strategy(CORES)), pathlib.Path(sys.argv[1]))
