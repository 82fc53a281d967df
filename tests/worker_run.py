"""A job's process, as a program: python worker_run.py OUT KIND STEPS [MODEL_DIR].

`plain` is SGD in float32, to be compared with one process that has the whole batch. `noisy` is
float16 with BatchNorm, Dropout and a moving average; in step 3 the job's last replica alone
overflows. After every step each process writes a line to `OUT/task-INDEX.jsonl`: a digest of
all that it keeps, the loss scale, and whether the step was applied.
"""

import hashlib
import json
import os
import pathlib
import sys

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


def examples(steps):
    """As many batches as there are steps; the last example of one of them is far too large."""
    random = np.random.default_rng(1)
    x = random.normal(size=[steps * BATCH, 6]).astype(np.float32)
    y = np.tanh(x.sum(axis=1, keepdims=True))
    y[PLANTED * BATCH - 1] = 3e5
    return x, y


class WorkerRun(Trainer):
    """Writes after every step what this process has."""

    def __init__(self, out, noisy, **arguments):
        """See the module."""
        super().__init__(**arguments)
        self.out, self.noisy = out, noisy

    def build_model(self):
        """Layers that keep something if the run is noisy."""
        first = [keras.Input([6]), keras.layers.Dense(16, activation="tanh")]
        last = [keras.layers.Dense(1)]
        if self.noisy:
            first += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
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


def make(out, kind, strategy, model_dir=None):
    """The trainer."""
    noisy = kind == "noisy"
    return WorkerRun(
        out,
        noisy,
        strategy=strategy,
        model_dir=model_dir,
        precision="mixed_float16" if noisy else "float32",
        loss_scale=scaling.DynamicLossScale(initial_scale=2.0**8) if noisy else None,
        ema_momentum=0.9 if noisy else None,
        metrics=lambda: {"mean": keras.metrics.Mean()} if noisy else {},
        checkpoint_interval=4,
        jit_compile=False,
        steps_per_loop=1,
        log_interval=1,
        seed=3,
    )


def data(steps):
    """In the order in which they are."""
    return tf.data.Dataset.from_tensor_slices(examples(steps)).batch(BATCH)


def main(out, kind, steps, model_dir=None):
    """Trains."""
    strategy = strategies.create("multi_worker_mirrored")
    index = strategy.cluster_resolver.task_id
    steps = int(steps)
    for each in kind.split("+"):
        path = pathlib.Path(out) / f"{each}-{index}.jsonl"
        made = make(path, each, strategy, model_dir)
        made.train(data(steps), steps=steps, eval_data=data(PLANTED), eval_interval=3)


if __name__ == "__main__":
    main(*sys.argv[1:])
