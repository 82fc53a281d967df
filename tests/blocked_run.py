"""A training run that is blocked: python blocked_run.py MODEL_DIR WHERE GRACE_SECS [STRATEGY].

WHERE is a key of `BLOCKS`. With several workers, only the last one is blocked. The run creates the
file `MODEL_DIR/blocked` and waits until the file `go` is in the folder above MODEL_DIR.
"""

import os
import pathlib
import sys
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from helpers import Linear, all_copies

import strategies
from trainer import Checkpoints
from trainer.run import stop_signals

STEP = 7  # where the run is blocked
INTERVAL = 5  # steps between checkpoints
STEPS = 20
BLOCKS = {
    "hook": "on_loop_end, in Python",
    "graph in a hook": "on_loop_end, in C++",
    "end": "on_train_end",
    "first batch": "no batch at all",
    "python data": "a generator that waits for a lock",
    "pipeline": "a pipeline whose position is saved exactly",
    "evaluation": "evaluation data",
}


class Blocked(Linear):
    """Is blocked once: `blocked` says where."""

    def __init__(self, model_dir, where, strategy="default"):
        """With dropout, momentum, log lines and evaluations."""
        self.where = where
        self.folder = model_dir
        self.trained = False
        super().__init__(
            model_dir=model_dir,
            strategy=strategies.create(strategy),
            log_interval=3,
            checkpoints=Checkpoints(interval=INTERVAL),
            steps_per_loop=1 if where in {"hook", "graph in a hook"} else 100,
            verbose=False,
            seed=3,
        )

    def build_model(self):
        """With dropout, whose seed counts the steps."""
        layers = [keras.layers.Dense(4, kernel_initializer="ones"), keras.layers.Dropout(0.5)]
        return keras.Sequential([keras.Input([1]), *layers, keras.layers.Dense(1)])

    def compute_loss(self, batch, training):
        """Squared errors."""
        predictions = self.model(batch["x"], training=training)
        return (predictions[:, 0] - batch["slope"]) ** 2

    def build_optimizer(self):
        """With state."""
        return keras.optimizers.SGD(0.0125, momentum=0.5)

    def block(self, where):
        """Waits if the run is to be blocked here."""
        resolver = self.strategy.cluster_resolver
        if resolver and resolver.task_type == "worker" and resolver.task_id == 0:
            return
        if where == self.where and not (self.folder.parent / "go").exists():
            (self.folder / "blocked").touch()
            threading.Event().wait()

    def on_loop_begin(self, step):
        """The pipeline cannot say by itself that it is blocked."""
        if step and self.where == "pipeline":  # it reads ahead
            (self.folder / "blocked").touch()

    def on_loop_end(self, step):
        """May block."""
        self.trained = True
        if step == STEP:
            self.block("hook")
            if self.where == "graph in a hook" and not (self.folder.parent / "go").exists():
                (self.folder / "blocked").touch()
                tf.queue.FIFOQueue(1, [tf.int32]).dequeue()

    def on_train_end(self, summary):
        """May block."""
        del summary
        self.block("end")


def batch_of(number):
    """A batch of two examples."""
    slope = tf.cast(tf.stack([number, number + 1]), tf.float32) / 64
    return {"x": tf.ones([2, 1]), "slope": slope}


def data(trainer):
    """Nine different batches in each pass, one of which may not come."""
    late = 1 if trainer.where == "first batch" else STEP + 2
    if trainer.where in {"python data", "first batch"}:
        return lambda: late_batches(trainer, late)
    if trainer.where == "pipeline":
        return late_pipeline(str(trainer.folder.parent / "go*"), late)
    return tf.data.Dataset.range(9).shuffle(9, seed=1).map(batch_of)


def late_batches(trainer, late):
    """Yields batches that Python makes."""
    for number in range(9):
        if number + 1 == late:
            trainer.block(trainer.where)
        yield {name: value.numpy() for name, value in batch_of(number).items()}


def late_pipeline(go, late):
    """Returns a pipeline that waits for a file, without any Python code."""

    def after_waiting(place, number):
        def waits(_):
            return (place + 1 == late) & tf.equal(tf.size(tf.io.matching_files(go)), 0)

        with tf.control_dependencies(tf.while_loop(waits, lambda count: [count + 1], [0])):
            return batch_of(tf.identity(number))

    return tf.data.Dataset.range(9).shuffle(9, seed=1).enumerate().map(after_waiting)


def evaluated(trainer):
    """Evaluation data, of which a batch may not come."""

    def batches():
        for number in range(3):
            if number and trainer.trained:
                trainer.block("evaluation")
            yield {name: value.numpy() for name, value in batch_of(number).items()}

    return batches


def train(model_dir, where, strategy="default"):
    """Trains; returns the bits of all variables."""
    tf.random.set_seed(1)  # on which the order of the data depends
    model_dir.mkdir(exist_ok=True, parents=True)
    trainer = Blocked(model_dir, where, strategy)
    trainer.train(data(trainer), STEPS, eval_data=evaluated(trainer), eval_interval=6)
    return [each.tobytes() for found in all_copies(trainer).values() for each in found]


def main(model_dir, where, grace_secs, strategy="default"):
    """Trains, and ends some seconds after SIGTERM."""
    stop_signals.GRACE_SECS = float(grace_secs)
    train(pathlib.Path(model_dir), where, strategy)


if __name__ == "__main__":
    main(*sys.argv[1:])
