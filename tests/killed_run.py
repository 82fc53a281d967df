"""A training run that tests kill and restart: python killed_run.py MODEL_DIR STRATEGY STEPS.

It has every kind of state that a run has to restore: Dropout, BatchNorm, momentum, a moving average
of the weights, a metric, a shuffled pipeline, and a loss scale that grows until a step overflows.
At its end it writes `MODEL_DIR/final.json` with digests of every replica's copy of every variable
and of the next batches, and with the numbers in `metrics.jsonl`.
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from helpers import digests_of_run

import scaling
import strategies
from trainer import Trainer

CHECKPOINT_INTERVAL = 10
LOOP = 5
EXAMPLES = 200  # 13 batches in a pass, not a multiple of the checkpoint interval


class KilledRun(Trainer):
    """Records where each inner loop starts, so that tests can count the executed steps."""

    def build_model(self):
        """Layers with weights, statistics and randomness."""
        return keras.Sequential(
            [
                keras.Input([8]),
                keras.layers.Dense(24),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(24, activation="relu"),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )

    def on_loop_begin(self, step):
        """Appends the process id and the step to `loops.txt`."""
        with (self.model_dir / "loops.txt").open("a") as loops:
            loops.write(f"{os.getpid()} {step}\n")


def pipeline():
    """Returns a prefetched dataset with a new order in every pass and a short last batch."""
    x = np.random.default_rng(1).normal(size=[EXAMPLES, 8]).astype(np.float32)
    y = np.tanh(x.sum(axis=1, keepdims=True))
    rows = tf.data.Dataset.range(EXAMPLES).shuffle(100, seed=5)
    examples = rows.map(lambda row: (tf.gather(x, row), tf.gather(y, row)))
    return examples.batch(16).prefetch(tf.data.AUTOTUNE)


def make(model_dir, strategy):
    """Returns the trainer, in float16. "auto" could compile another part of the step in each run.

    Args:
        model_dir: the run's folder.
        strategy: a name for `strategies.create`, or "one program": the default strategy, under
            which XLA compiles the whole step.
    """
    whole = strategy == "one program"
    return KilledRun(
        model_dir=model_dir,
        strategy="default" if whole else strategy,
        optimizer=lambda: keras.optimizers.SGD(0.003, momentum=0.9),
        loss_fn="mse",
        metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
        precision="mixed_float16",
        loss_scale=scaling.DynamicLossScale(initial_scale=2.0**12, growth_interval=20),
        ema_momentum=0.9,
        jit_compile="step" if whole else False,
        steps_per_loop=LOOP,
        checkpoint_interval=CHECKPOINT_INTERVAL,
        log_interval=CHECKPOINT_INTERVAL,
        seed=3,
    )


def final_state(trainer):
    """Returns digests of the run's variables and next batches, and the numbers that it logged."""
    found = digests_of_run(trainer, 30)
    lines = (trainer.model_dir / "metrics.jsonl").read_text().splitlines()
    numbers = [json.loads(line) for line in lines]
    numbers = [line for line in numbers if line["split"] not in {"run", "end", "failure"}]
    for line in numbers:
        for speed in ("examples_per_second", "steps_per_second", "data_wait"):
            line.pop(speed, None)
    found["metrics.jsonl"] = json.dumps(numbers)
    return found


def main(model_dir, strategy, steps):
    """Trains until the given step and writes `final.json`."""
    strategies.split_cpu(2)
    trainer = make(pathlib.Path(model_dir), strategy)
    trainer.train(pipeline(), steps=int(steps))
    assert trainer.totals.skipped > 0
    (trainer.model_dir / "final.json").write_text(json.dumps(final_state(trainer), indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
