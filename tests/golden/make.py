"""Writes the golden checkpoint `ckpt-8` next to this file. README.md says when to run it."""

import json
import os
import pathlib
import shutil
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import scaling
from trainer import Trainer

HERE = pathlib.Path(__file__).parent
STEPS = 8


def data():
    """Twenty examples of a linear function."""
    x = np.arange(40, dtype=np.float32).reshape(20, 2) / 40
    return x, x[:, :1] + x[:, 1:]


def make(model_dir, **arguments):
    """A trainer with every kind of variable that a checkpoint holds."""
    return Trainer(
        model=lambda: keras.Sequential(
            [
                keras.Input([2]),
                keras.layers.Dense(3),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.25),
                keras.layers.Dense(1),
            ]
        ),
        optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.5),
        loss_fn="mse",
        metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
        model_dir=model_dir,
        precision="mixed_float16",
        loss_scale=scaling.DynamicLossScale(initial_scale=2.0**15, growth_interval=3),
        ema_momentum=0.75,
        jit_compile=False,
        steps_per_loop=4,
        seed=11,
        verbose=False,
        **arguments,
    )


def state_of(trainer):
    """The weights, counts and loss scale, as they stand in `expected.json`."""
    return {
        "weights": [weight.tolist() for weight in trainer.model.get_weights()],
        "updates": int(trainer.optimizer.iterations.numpy()),
        "attempted": trainer.totals.attempted,
        "loss_scale": trainer.loss_scale,
    }


def main():
    """Trains, and writes the last checkpoint and `expected.json`."""
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make(scratch)
        trainer.train(data(), steps=STEPS, global_batch=4)
        target = HERE / f"ckpt-{STEPS}"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(pathlib.Path(scratch) / target.name, target)
    (HERE / "expected.json").write_text(json.dumps(state_of(trainer), indent=1) + "\n")


if __name__ == "__main__":
    main()
