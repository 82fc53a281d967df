"""A process of a job, as a program: python worker_run.py OUT KIND --steps=6 ...

`plain` is SGD in float32, to be compared with one process that has the whole batch. `noisy` is
float16 with BatchNorm, Dropout and a moving average; in step 3 the job's last replica alone
overflows. After every inner loop each process writes a line to `OUT/KIND-INDEX.jsonl`: a digest of
all that it keeps, the loss scale, and whether the step was applied.
"""

import argparse
import hashlib
import json
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import scaling
import strategies
from trainer import Trainer
from trainer.step.rollback import copies_of, variables_in_reach

BATCH = 16
PLANTED = 3  # the step that overflows


def examples(steps, planted=3e5):
    """As many batches as there are steps; the last example of one of them is far too large."""
    random = np.random.default_rng(1)
    x = random.normal(size=[steps * BATCH, 6]).astype(np.float32)
    y = np.tanh(x.sum(axis=1, keepdims=True))
    y[PLANTED * BATCH - 1] = planted
    return x, y


@keras.saving.register_keras_serializable()
class Counted(keras.layers.Layer):
    """Counts the examples it has seen: each replica its own."""

    def build(self, shape):
        """One integer."""
        del shape
        self.seen = self.add_weight(
            shape=[], dtype="int32", initializer="zeros", trainable=False, name="seen"
        )

    def call(self, inputs):
        """Adds the sum of some signs, which is another on every replica."""
        self.seen.assign(self.seen + keras.ops.cast(keras.ops.sum(inputs > 0), "int32"))
        return inputs


class WorkerRun(Trainer):
    """Writes after every step what this process has."""

    def __init__(self, out, noisy, **arguments):
        """See the module."""
        super().__init__(**arguments)
        self.out, self.noisy, self.pause = out, noisy, 0.0

    def build_model(self):
        """Layers that keep something if the run is noisy."""
        first = [keras.Input([6]), keras.layers.Dense(16, activation="tanh")]
        last = [keras.layers.Dense(1)]
        if self.noisy:
            first += [keras.layers.BatchNormalization(), Counted(), keras.layers.Dropout(0.3)]
        return keras.Sequential([*first, *last])

    def build_optimizer(self):
        """SGD, which hides no factor."""
        return keras.optimizers.SGD(0.05, momentum=0.9 if self.noisy else 0.0)

    def compute_loss(self, batch, training):
        """Squared errors; of the planted example the error itself, that float32 bears."""
        x, y = batch
        found = tf.cast(self.model(x, training=training), tf.float32)
        loss = tf.square(found - tf.minimum(y, 1.0)) * (tf.abs(y) if self.noisy else 1.0)
        return loss[:, 0]

    def update_metrics(self, batch, aux):
        """The mean of the targets."""
        for metric in self.metrics.values():
            metric.update_state(batch[1])

    def on_loop_end(self, step):
        """Adds a line."""
        digest = hashlib.sha256()
        for variable in variables_in_reach([self.model, self.optimizer, self._parts.state], ()):
            if variable.dtype != "string":
                for copy in copies_of(variable, self.strategy):
                    digest.update(copy.numpy().tobytes())
        line = {
            "step": step,
            "digest": digest.hexdigest(),
            "scale": self.loss_scale,
            "applied": self.totals.applied,
            "weights": [weight.tolist() for weight in self.model.get_weights()],
        }
        with self.out.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        time.sleep(self.pause)


def make(out, kind, strategy, growth_interval=2000, **arguments):
    """The trainer."""
    noisy = kind == "noisy"
    return WorkerRun(
        out,
        noisy,
        strategy=strategy,
        precision="mixed_float16" if noisy else "float32",
        loss_scale=scaling.DynamicLossScale(2.0**8, growth_interval) if noisy else None,
        ema_momentum=0.9 if noisy else None,
        metrics=lambda: {"mean": keras.metrics.Mean()} if noisy else {},
        checkpoint_interval=4,
        jit_compile=False,
        log_interval=6,
        seed=3,
        **arguments,
    )


def data(steps, raise_at=None, planted=3e5):
    """In the order in which they are; from some batch on they cannot be read, if that is said."""
    dataset = tf.data.Dataset.from_tensor_slices(examples(steps, planted)).batch(BATCH)
    if raise_at is None:
        return dataset

    def readable(number, batch):
        tf.debugging.assert_less(number, tf.constant(raise_at, tf.int64), "a torn file")
        return batch

    return dataset.enumerate().map(readable)


def main():
    """Trains one kind after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--model_dir")
    parser.add_argument("--steps_per_loop", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--raise_at", type=int)
    parser.add_argument("--uneven", action="store_true")
    asked = parser.parse_args()
    strategy = strategies.create("multi_worker_mirrored")
    index = strategy.cluster_resolver.task_id
    for kind in asked.kinds:
        made = make(
            asked.out / f"{kind}-{index}.jsonl",
            kind,
            strategy,
            model_dir=asked.model_dir,
            steps_per_loop=asked.steps_per_loop,
        )
        made.pause = asked.pause
        # The chief can read all.
        train_data = data(asked.steps, asked.raise_at if index else None)
        eval_data = data(PLANTED + index if asked.uneven else PLANTED)
        made.train(train_data, steps=asked.steps, eval_data=eval_data, eval_interval=6)
        outputs = made.predict(data(PLANTED).unbatch().batch(7))  # not to be shared evenly
        np.save(asked.out / f"{kind}-{index}.npy", outputs)


if __name__ == "__main__":
    main()
