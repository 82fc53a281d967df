"""The program that each worker of a test job runs: python worker_run.py OUT KIND --steps=6 ...

KIND is `plain`, `coupled` or `noisy`, or several in turn. `plain` is SGD in float32, to be compared with
a single process that has the whole batch; `coupled` is the same with a loss of all pairs of examples. `noisy` is float16 with BatchNorm, Dropout and a moving average;
its gradients are summed in float16 and in buckets, and in step 3 only the last replica of the job overflows. After every inner loop each process writes a
line to `OUT/KIND-INDEX.jsonl` with a digest of all its variables, the loss scale, the number of
applied steps and the weights.
"""

import argparse
import hashlib
import json
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import access
import keras
import numpy as np
import tensorflow as tf
from helpers import copies

import scaling
import strategies
from trainer import Checkpoints, Losses, Trainer, Updates

BATCH = 16
PLANTED = 3  # the step with an example that overflows


def examples(steps, planted=3e5):
    """Returns data for so many steps; the last example of batch `PLANTED` has a huge target."""
    random = np.random.default_rng(1)
    x = random.normal(size=[steps * BATCH, 6]).astype(np.float32)
    y = np.tanh(x.sum(axis=1, keepdims=True))
    y[PLANTED * BATCH - 1] = planted
    return x, y


@keras.saving.register_keras_serializable()
class Counted(keras.layers.Layer):
    """Counts positive inputs, so that each replica has another count."""

    def build(self, shape):
        """Creates the count, shape (), int32."""
        del shape
        self.seen = self.add_weight(
            shape=[], dtype="int32", initializer="zeros", trainable=False, name="seen"
        )

    def call(self, inputs):
        """Adds the number of positive inputs."""
        self.seen.assign(self.seen + keras.ops.cast(keras.ops.sum(inputs > 0), "int32"))
        return inputs


class WorkerRun(Trainer):
    """Writes a line on the state of this process after every inner loop."""

    def __init__(self, out, kind, **arguments):
        """Stores where to write, and what kind of run it is."""
        self.noisy, self.coupled = kind == "noisy", kind == "coupled"
        reduction = "global" if self.coupled else "mean"
        super().__init__(losses=Losses(reduction=reduction), **arguments)
        self.out, self.pause = out, 0.0

    def build_model(self):
        """Two dense layers; a noisy run has layers with state and randomness in between."""
        first = [keras.Input([6]), keras.layers.Dense(16, activation="tanh")]
        last = [keras.layers.Dense(1)]
        if self.noisy:
            first += [keras.layers.BatchNormalization(), Counted(), keras.layers.Dropout(0.3)]
        return keras.Sequential([*first, *last])

    def build_optimizer(self):
        """SGD, whose update shows every factor in a gradient."""
        return keras.optimizers.SGD(0.05, momentum=0.9 if self.noisy else 0.0)

    def compute_loss(self, batch, training):
        """Squared errors with targets of at most 1; a noisy run weights them by |target|.

        The planted example's loss is finite in float32; its gradients overflow in float16.
        """
        x, y = batch
        predictions = tf.cast(self.model(x, training=training), tf.float32)
        if self.coupled:  # errors of the differences between all pairs
            errors = self.all_gather(predictions - tf.minimum(y, 1.0))
            return tf.reduce_mean(tf.square(errors - 0.5 * tf.transpose(errors)))
        loss = tf.square(predictions - tf.minimum(y, 1.0)) * (tf.abs(y) if self.noisy else 1.0)
        return loss[:, 0]

    def update_metrics(self, batch, aux):
        """The mean of the targets."""
        for metric in self.metrics.values():
            metric.update_state(batch[1])

    def on_loop_end(self, step):
        """Appends a line to the file."""
        digest = hashlib.sha256()
        for variable in access.variables(self, of_metrics=False):
            for copy in copies(variable):
                digest.update(copy.tobytes())
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
    """Returns the trainer of a run."""
    noisy = kind == "noisy"
    return WorkerRun(
        out,
        kind,
        strategy=strategy,
        precision="mixed_float16" if noisy else "float32",
        loss_scale=scaling.DynamicLossScale(2.0**8, growth_interval) if noisy else None,
        updates=Updates(
            ema_momentum=0.9 if noisy else None,
            reduce_dtype="float16" if noisy else None,
            reduce_bucket_bytes=100 if noisy else None,
        ),
        metrics=lambda: {"mean": keras.metrics.Mean()} if noisy else {},
        checkpoints=Checkpoints(interval=4),
        jit_compile=False,
        log_interval=6,
        seed=3,
        **arguments,
    )


def data(steps, planted=3e5):
    """Returns the batches in order."""
    return tf.data.Dataset.from_tensor_slices(examples(steps, planted)).batch(BATCH)


def readable(dataset, count, *, ends=False):
    """Returns a dataset that can be read so far on this worker, and is the same on every worker.

    Args:
        dataset: the dataset.
        count: how many batches can be read, which stands in a file of this worker's.
        ends: whether it ends there; otherwise reading the next batch raises an error.
    """
    pathlib.Path("count.txt").write_text(str(count))

    def is_there(number, batch):
        del batch
        return number < tf.strings.to_number(tf.io.read_file("count.txt"), tf.int64)

    def read(number, batch):
        tf.debugging.Assert(is_there(number, batch), ["a torn file"])
        return batch

    numbered = dataset.enumerate()
    return numbered.take_while(is_there).map(lambda _, batch: batch) if ends else numbered.map(read)


def main():
    """Trains the kinds of runs that the command line names, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--model_dir")
    parser.add_argument("--steps_per_loop", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--raise_at", type=int)
    parser.add_argument("--uneven", action="store_true")
    options = parser.parse_args()
    strategy = strategies.create("multi_worker_mirrored")
    index = strategy.cluster_resolver.task_id
    for kind in options.kinds:
        trainer = make(
            options.out / f"{kind}-{index}.jsonl",
            kind,
            strategy,
            model_dir=options.model_dir,
            steps_per_loop=options.steps_per_loop,
        )
        trainer.pause = options.pause
        train_data, eval_data = data(options.steps), data(PLANTED)
        if options.raise_at:  # only the other workers fail to read a batch, not the chief
            train_data = readable(train_data, options.raise_at if index else options.steps)
        if options.uneven:
            eval_data = readable(data(PLANTED + 1), PLANTED + index, ends=True)
        trainer.train(train_data, steps=options.steps, eval_data=eval_data, eval_interval=6)
        outputs = trainer.predict(data(PLANTED).unbatch().batch(7))  # 7: gives uneven shares
        np.save(options.out / f"{kind}-{index}.npy", outputs)


if __name__ == "__main__":
    main()
