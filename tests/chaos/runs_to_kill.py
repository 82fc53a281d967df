"""Runs that `test_kills.py` kills: python runs_to_kill.py, with a request in each line of its input.

To import TensorFlow takes longer than such a run. So one process imports it, starts nothing of it, and
forks a new process for each run:

    {"start": {...}}  starts a run, with the arguments of `run`; the answer is {"pid": 1234}
    {"wait": 1234, "seconds": 60}  the answer is {"code": 0}, or {"code": null} if it still runs

A run dies by SIGKILL at the moment that its request names. Moments are counted, not timed: they are
what the run does to the files in its folder, in whichever thread.
"""

import io
import itertools
import json
import os
import pathlib
import signal
import sys
import threading
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from helpers import digests_of_run

import scaling
import strategies
from trainer import Checkpoints, Monitoring, Skips, Trainer, Updates, convert_to_float8

STEPS = 24
EXAMPLES = 100  # 13 batches in a pass, the last of them with four examples
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link"}
IN_FOLDER = {"os.remove": 1, "os.rmdir": 1}  # the place of `dir_fd` in the arguments
DYNAMIC = scaling.DynamicLossScale(2.0**17, growth_interval=3)
# Overflows in float32 and bfloat16 too.
HUGE = scaling.DynamicLossScale(2.0**126, growth_interval=3, max_scale=2.0**126)

# What is special about each kind of run. Those with `eval_interval` evaluate.
KINDS = {
    "replicas": {"strategy": "mirrored"},
    "workers": {"strategy": "multi_worker_mirrored", "skips": Skips(max_records=0)},
    "sums": {  # of workers, in bfloat16 and in buckets
        "strategy": "multi_worker_mirrored",
        "skips": Skips(max_records=0),
        "updates": Updates(reduce_dtype="bfloat16", reduce_bucket_bytes=64),
    },
    "one_program": {"jit_compile": "step"},
    "retry": {"skips": Skips(on_overflow="retry", max_retries=1, max_records=2)},
    "ema": {
        "updates": Updates(ema_momentum=0.9),
        "monitoring": Monitoring(record_gradients=True),
        "eval_interval": 8,
        "checkpoints": Checkpoints(interval=5, max_to_keep=2, keep_best=1),
    },
    "evaluation": {
        "eval_interval": 3,
        "evaluate_at_start": True,
        "checkpoints": Checkpoints(interval=5, max_to_keep=2, keep_best=2),
    },
    "async": {"checkpoints": Checkpoints(background=True, interval=3, max_to_keep=2)},
    "auto": {
        "jit_compile": "auto",
        "precision": "float32",
        "loss_scale": HUGE,
    },
    "float8": {
        "strategy": "mirrored",
        "precision": "mixed_float8",
        "loss_scale": HUGE,
        "skips": Skips(on_overflow="retry", max_retries=1, max_records=2),
        "eval_interval": 5,
    },
    "optimizers": {"updates": Updates(alternate_optimizers=True, updates_per_step={"first": 2})},
}
OF_TRAIN = ("eval_interval", "evaluate_at_start")


class Halves(keras.Model):
    """Layers with weights, statistics and randomness, in two parts that can be trained apart."""

    def __init__(self):
        """Creates the parts."""
        super().__init__()
        dense, last = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)
        statistics = keras.layers.BatchNormalization()
        self.first = keras.Sequential([keras.Input([4]), dense, statistics])
        self.second = keras.Sequential([keras.Input([8]), keras.layers.Dropout(0.3), last])

    def call(self, inputs, training=False):
        """Applies both parts."""
        return self.second(self.first(inputs, training=training), training=training)


class RunToKill(Trainer):
    """Squared errors; one optimizer, or one for each half."""

    def build_model(self):
        """Both halves. A best model can be read without this file if Keras knows its layers."""
        if self.updates.alternate_optimizers:
            return Halves()
        halves = Halves()
        model = keras.Sequential([keras.Input([4]), *halves.first.layers, *halves.second.layers])
        if self.precision.name == "mixed_float8":  # all of its layers are too small
            convert_to_float8(model, lambda _: True)
        return model

    def build_optimizer(self):
        """With slots."""
        if self.updates.alternate_optimizers:
            return {"first": keras.optimizers.Adam(0.01), "second": keras.optimizers.SGD(0.01, 0.9)}
        return keras.optimizers.Adam(0.5)  # so large that later models are not always better

    def compute_loss(self, batch, training):
        """One loss per example, or the same for both halves."""
        outputs = tf.cast(self.model(batch[0], training=training), tf.float32)
        losses = tf.square(outputs - batch[1])[:, 0]
        of_halves = {"first": losses, "second": losses}
        return (of_halves if self.updates.alternate_optimizers else losses), outputs

    def update_metrics(self, batch, aux):
        """Mean absolute errors."""
        self.metrics["error"].update_state(batch[1], aux)


def data(seed, *, shuffled):
    """A pipeline of batches of eight; its last one in a pass has four examples."""
    x = np.random.default_rng(seed).normal(size=[EXAMPLES, 4]).astype(np.float32)
    y = np.tanh(x.sum(axis=1, keepdims=True))
    rows = tf.data.Dataset.range(EXAMPLES)
    if shuffled:
        rows = rows.shuffle(64, seed=5)
    examples = rows.map(lambda row: (tf.gather(x, row), tf.gather(y, row)))
    return examples.batch(8).prefetch(2)


def make(kind, model_dir, **arguments):
    """Returns the trainer of a kind of run; three intervals that are no multiples of each other."""
    settings = {
        "precision": "mixed_float16",
        "loss_scale": DYNAMIC,
        "jit_compile": False,
        "metrics": lambda: {"error": keras.metrics.MeanAbsoluteError()},
        "checkpoints": Checkpoints(interval=5, max_to_keep=2),
        "log_interval": 4,
        "steps_per_loop": 2,
        "skips": Skips(max_records=2),
        "seed": 3,
    }
    own = {name: value for name, value in KINDS[kind].items() if name not in OF_TRAIN}
    return RunToKill(model_dir=model_dir, **settings | own | arguments)


class Fate:
    """Counts what happens to the files below a folder, and kills the process in time.

    Args:
        folder: the folder.
        at: the number of the event at which the process dies; None for no end.
        later: seconds to live after that event.
        written: the part of a text that is written before a death in a write.
    """

    def __init__(self, folder, at, later, written):
        """Begins to count."""
        self._folder, self._at, self._later, self._written = str(folder), at, later, written
        self._numbers = itertools.count(1)  # its next() is one operation for all threads
        self.events = 0
        self._open = io.open
        io.open = self._watched
        sys.addaudithook(self._hear)

    def _hear(self, event, arguments):
        """Called before each operation on files."""
        if event == "open":
            path, _, flags = arguments
            relevant = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            relevant = relevant and self._is_ours(path)
        else:
            place = IN_FOLDER.get(event)  # shutil.rmtree names entries by an open folder
            in_folder = place is not None and arguments[place] >= 0
            relevant = event in CHANGES and (in_folder or self._is_ours(arguments[0]))
        if relevant and self._is_last():
            die(self._later)

    def _watched(self, file, mode="r", *arguments, **keywords):
        """In place of `io.open`: a text may be written in part."""
        opened = self._open(file, mode, *arguments, **keywords)
        if isinstance(opened, io.TextIOWrapper) and mode != "r" and self._is_ours(file):
            whole = opened.write

            def write(text):
                if self._is_last():
                    whole(text[: int(len(text) * self._written)])
                    opened.flush()
                    die(0.0)  # at once: nobody writes on after half of a text
                return whole(text)

            opened.write = write
        return opened

    def _is_ours(self, path):
        """Whether a path is below the folder."""
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._folder)

    def _is_last(self):
        """Counts an event; returns whether the process dies at it."""
        self.events = next(self._numbers)
        return self.events == self._at


def die(later):
    """Kills this process, now or in some seconds."""
    if later:
        threading.Timer(later, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def run(kind, folder, final, *, at=None, later=0.0, written=0.5, **arguments):
    """Trains one run to its end, or dies on the way.

    Args:
        kind: a key of `KINDS`.
        folder: the run's folder.
        final: the file for the digests, the number of events and the seconds of training. Empty from
            the moment when training begins.
        at: see `Fate`; so are `later` and `written`.
        later: as above.
        written: as above.
        **arguments: of the trainer, instead of those of the kind.
    """
    if KINDS[kind].get("strategy") == "mirrored":
        strategies.split_cpu(2)
    trainer = make(kind, pathlib.Path(folder), **arguments)
    fate = Fate(folder, at, later, written)
    pathlib.Path(final).write_text("")
    began = time.monotonic()
    evaluation = {name: KINDS[kind][name] for name in OF_TRAIN if name in KINDS[kind]}
    if evaluation:
        evaluation["eval_data"] = data(2, shuffled=False)
    trainer.train(data(1, shuffled=True), STEPS, **evaluation)
    facts = {"events": fate.events, "seconds": time.monotonic() - began}
    totals = trainer.totals
    facts |= {"skipped": totals.skipped, "retries": totals.retries, "scale": trainer.loss_scale}
    pathlib.Path(final).write_text(
        json.dumps(facts | {"digests": digests_of_run(trainer, 14)}, indent=1)
    )


def serve():
    """Answers requests until there are no more. In a process that it forks: returns the request."""
    codes = {}  # of the processes that have ended
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            with warnings.catch_warnings():  # the threads of TensorFlow do not run yet
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if not pid:
                return request["start"]
            codes.pop(pid, None)  # Linux gives a number again: threads use up 32,768 in minutes
            answer = {"pid": pid}
        else:
            pid = request["wait"]
            codes[pid] = codes.get(pid)
            if codes[pid] is None:
                codes[pid] = code_of(pid, request["seconds"])
            answer = {"code": codes[pid]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return None


def code_of(pid, seconds):
    """Waits for a process; returns its exit code, or None if it still runs after some seconds."""
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.005)


def main():
    """Serves, or runs what was asked for in a process of its own."""
    request = serve()
    if request is None:
        return
    with pathlib.Path(request.pop("output")).open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ |= request.pop("environment", {})
    run(**request)


if __name__ == "__main__":
    main()
