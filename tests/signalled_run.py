"""A training run that tests send signals to, in the phase that is slow: a key of `SLOW`.

The run appends a line to `MODEL_DIR/events.txt` at the start of every inner loop and of every nap
in its slow phase.
"""

import functools
import time

import keras
import numpy as np
import tensorflow as tf
from helpers import Linear, all_copies

from trainer import Action, Checkpoints
from trainer.base import atomic_files

# The phases that can be slow, and the length of one nap in them, in seconds.
SLOW = {
    "training": 0.1,
    "evaluating": 0.05,
    "saving": 0.1,
    "saving in a thread": 0.1,
    "acting": 0.3,
    "nothing": 0.0,
}
EVENTS = "events.txt"
INTERVAL = 4  # steps between checkpoints, evaluations or actions, in runs that have them


class SignalledRun(Linear):
    """Records its events, so that a test can send a signal in a certain phase."""

    def build_optimizer(self):
        """With momentum, so that the optimizer has state to be saved."""
        return keras.optimizers.SGD(0.125, momentum=0.5)

    def on_loop_begin(self, step):
        """Records the start of an inner loop."""
        record(self.model_dir, f"loop {step}")

    hurry = False

    def nap(self, phase, secs):
        """Records the phase and sleeps, unless `hurry` is set."""
        if not self.hurry:
            record(self.model_dir, phase)
            time.sleep(secs)

    def slow_data(self):
        """Returns data that make training slow."""
        return data(functools.partial(self.nap, "training", SLOW["training"]))


def record(model_dir, event):
    """Appends a line to the record of events."""
    with (model_dir / EVENTS).open("a") as lines:
        lines.write(event + "\n")


def events(model_dir):
    """Returns the lines of the record of events."""
    path = model_dir / EVENTS
    return path.read_text().splitlines() if path.exists() else []


def data(nap=lambda: None):
    """Returns seven different batches of two examples; `nap` is called before each of them."""

    def after_nap(slope):
        nap()
        return slope

    def batch(rows):
        slope = tf.py_function(after_nap, [tf.gather(values, rows)], tf.float32)
        slope = tf.ensure_shape(slope, [None])
        return {"x": tf.ones([tf.shape(slope)[0], 1]), "slope": slope}

    values = np.arange(1, 15, dtype=np.float32) / 64
    return tf.data.Dataset.range(14).batch(2).map(batch)


def make(model_dir, slow="nothing", data_resume="skip", **arguments):
    """Returns the trainer. A run saves and acts only if that is its slow phase."""
    arguments = {"model_dir": model_dir, "verbose": False} | arguments
    checkpoints = Checkpoints(
        interval=INTERVAL if "sav" in slow else None,
        background=slow == "saving in a thread",
        data_resume=data_resume,
    )
    if slow == "acting":
        act = Action(lambda trainer: trainer.nap(slow, SLOW[slow]), INTERVAL)
        arguments["callbacks"] = [act]
    return SignalledRun(steps_per_loop=1_000_000, checkpoints=checkpoints, **arguments)


def train(trainer, slow, steps):
    """Trains with one slow phase. A save is slow because files are slow to reach the disk."""
    nap = functools.partial(trainer.nap, slow, SLOW[slow])

    def nap_in_batch():
        if slow == "training":
            nap()
        if slow == "saving in a thread":
            time.sleep(SLOW["training"])

    def nap_in_flush(path, flush=atomic_files.flush_to_disk):
        nap()
        flush(path)

    evaluation = {}
    if slow == "evaluating":
        evaluation = {"eval_data": data(nap).repeat(1000), "eval_interval": INTERVAL}
    original = atomic_files.flush_to_disk
    if "sav" in slow:
        atomic_files.flush_to_disk = nap_in_flush
    try:
        return trainer.train(data(nap_in_batch), steps=steps, **evaluation)
    finally:
        atomic_files.flush_to_disk = original


def bits(trainer):
    """Returns the bytes of every copy of every variable of the model and the optimizer."""
    return [copy.tobytes() for copies in all_copies(trainer).values() for copy in copies]
