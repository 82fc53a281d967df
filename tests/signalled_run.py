"""A training run to be sent signals: python signalled_run.py MODEL_DIR SLOW STEPS.

SLOW is the phase of it that takes long: see `SLOW`. `told.txt` says where inner loops begin, and
when a nap does.
"""

import functools
import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from helpers import Linear, all_copies

from trainer import Action
from trainer.base import atomic_files

# The phases that may be slow, and what makes them so: how many seconds at a time.
SLOW = {
    "training": 0.1,
    "evaluating": 0.05,
    "saving": 0.1,
    "saving in a thread": 0.1,
    "acting": 0.3,
    "one long step": 120.0,
    "one long save": 120.0,
    "nothing": 0.0,
}
INTERVAL = 4  # steps between checkpoints, evaluations or actions, where there are such


class SignalledRun(Linear):
    """Says what it does, so that a signal can meet it there."""

    def build_optimizer(self):
        """With momentum, which is to be kept, too."""
        return keras.optimizers.SGD(0.125, momentum=0.5)

    def on_loop_begin(self, step):
        """Before each loop."""
        tell(self.model_dir, f"loop {step}")

    hurry = False

    def tell_and_sleep(self, phase, secs):
        """Makes a phase slow, unless it is to hurry."""
        if not self.hurry:
            tell(self.model_dir, phase)
            time.sleep(secs)

    def slow_data(self):
        """Data that make the training slow."""
        return data(functools.partial(self.tell_and_sleep, "training", SLOW["training"]))


def tell(model_dir, what):
    """Adds a line to `told.txt`."""
    with (model_dir / "told.txt").open("a") as told:
        told.write(what + "\n")


def told(model_dir):
    """The lines of `told.txt`."""
    path = model_dir / "told.txt"
    return path.read_text().splitlines() if path.exists() else []


def data(nap=lambda: None):
    """Batches of two, of which no two are alike; before each of them, `nap` is called."""

    def napped(slope):
        nap()
        return slope

    def batch(rows):
        slope = tf.py_function(napped, [tf.gather(values, rows)], tf.float32)
        slope = tf.ensure_shape(slope, [None])
        return {"x": tf.ones([tf.shape(slope)[0], 1]), "slope": slope}

    values = np.arange(1, 15, dtype=np.float32) / 64
    return tf.data.Dataset.range(14).batch(2).map(batch)


def make(model_dir, slow="nothing", **arguments):
    """The trainer. A phase that is not slow is left out, but for the training."""
    arguments = {"model_dir": model_dir, "verbose": False, "data_resume": "skip"} | arguments
    if slow in ("saving", "saving in a thread", "one long save", "one long step"):
        arguments["checkpoint_interval"] = INTERVAL
    trainer = SignalledRun(
        steps_per_loop=1_000_000, async_checkpoint=slow == "saving in a thread", **arguments
    )
    if slow == "acting":
        act = Action(lambda trainer: trainer.tell_and_sleep(slow, SLOW[slow]), INTERVAL)
        trainer.actions.append(act)
    return trainer


def train(trainer, slow, steps):
    """Trains slowly. What is slow in a save is the file system."""
    nap = functools.partial(trainer.tell_and_sleep, slow, SLOW[slow])
    batches, flushes = [], []

    def nap_in_batch():
        batches.append(None)
        if slow == "training" or (slow == "one long step" and len(batches) > 2 * INTERVAL + 1):
            nap()
        if slow == "saving in a thread":
            time.sleep(SLOW["training"])

    def nap_in_flush(path, flush=atomic_files.flush_to_disk):
        flushes.append(path)
        if "long" not in slow or f"ckpt-{2 * INTERVAL}" in str(path):
            nap()
        flush(path)

    evaluation = {}
    if slow == "evaluating":
        evaluation = {"eval_data": data(nap).repeat(1000), "eval_interval": INTERVAL}
    before = atomic_files.flush_to_disk
    if "sav" in slow:
        atomic_files.flush_to_disk = nap_in_flush
    try:
        return trainer.train(data(nap_in_batch), steps=steps, **evaluation)
    finally:
        atomic_files.flush_to_disk = before


def bits(trainer):
    """Every copy of every variable of model and optimizer, in their order."""
    return [copy.tobytes() for copies in all_copies(trainer).values() for copy in copies]


def main(model_dir, slow, steps):
    """Trains to the target."""
    path = pathlib.Path(model_dir)
    path.mkdir(exist_ok=True)
    train(make(path, slow), slow, int(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
