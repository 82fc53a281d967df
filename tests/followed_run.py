"""A run and its evaluator, as programs: python followed_run.py --mode=MODE --model_dir=DIR ...

The model drops out inputs in evaluations too, so that results show whether an evaluator draws the
same random numbers as the run.
"""

import json
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

from trainer import Checkpoints, Trainer
from trainer.flags import define_flags, make_trainer, run_mode

ROWS = np.random.default_rng(0).normal(size=[64, 3]).astype(np.float32)
DATA = {"x": ROWS, "y": ROWS @ np.array([[1.0], [-2.0], [0.5]], np.float32)}
HELD_OUT = tf.nest.map_structure(lambda array: array[:21], DATA)
NAP = 0.1  # seconds between two inner loops of the run


class Followed(Trainer):
    """A regression with BatchNorm and a Dropout that is always on."""

    def build_model(self):
        """A dense layer, BatchNorm, and a dense layer."""
        layers = keras.layers
        return keras.Sequential(
            [keras.Input([3]), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]
        )

    def compute_loss(self, batch, training):
        """The square of each example's error."""
        x = batch["x"] * keras.random.dropout(tf.ones_like(batch["x"]), 0.3, seed=self.drops)
        return tf.square(self.model(x, training=training) - batch["y"])[:, 0]

    def __init__(self, **arguments):
        """Makes the seed generator of the dropout."""
        super().__init__(**{"jit_compile": False, "verbose": False} | arguments)
        self.drops = keras.random.SeedGenerator(3)


class Running(Followed):
    """The run: it has an optimizer, and naps."""

    def build_optimizer(self):
        """Adam."""
        return keras.optimizers.Adam(0.01)

    def on_loop_end(self, step):
        """Naps, so that its checkpoints are read while there are more to come."""
        time.sleep(NAP)


def validation(path):
    """The results in a `metrics.jsonl`, keyed by step."""
    lines = map(json.loads, pathlib.Path(path, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["split"] == "validation"}


def main(_):
    """Trains, or evaluates without an optimizer."""
    values = flags.FLAGS
    made = make_trainer(Followed if values.mode == "eval" else Running, seed=3)
    run_mode(made, DATA, HELD_OUT)


if __name__ == "__main__":
    define_flags(
        global_batch=16, checkpoints=Checkpoints(interval=5), eval_interval=5, steps_per_loop=5
    )
    app.run(main)
