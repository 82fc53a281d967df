"""The program of a worker: calls that differ between the two workers of a job, in turn.

python worker_differences.py OUT. Each process writes `OUT/INDEX.json`: the error of each call, or
None. Every call must end on both workers, so that the next one finds them together. Then come the
predictions in each of `DTYPES`, and the error of a run of which a hook fails on the second worker.
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from trainer import Action, Monitoring, Trainer, Updates  # isort: skip

import keras
import numpy as np
import tensorflow as tf

import strategies

X = np.arange(64, dtype=np.float32)[:, None]
DTYPES = ("bool", "uint8", "bfloat16", "string")


class Ending(Trainer):
    """Predicts in a dtype, and fails on the second worker."""

    dtype = ""

    def predict_batch(self, batch):
        """The numbers in the dtype, or as text."""
        return tf.as_string(batch) if self.dtype == "string" else tf.cast(batch, self.dtype)

    def on_loop_end(self, step):
        """Fails."""
        if self.strategy.cluster_resolver.task_id == 1 and step == 2:
            raise KeyError("a bug")


def made(strategy, kind=Trainer, **settings):
    """Returns a trainer."""
    defaults = {
        "model": lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        "optimizer": lambda: keras.optimizers.SGD(0.0),
        "loss_fn": "mse",
        "seed": 0,
        "verbose": False,
    }
    return kind(strategy=strategy, **(defaults | settings))


def calls(rank, strategy, out):
    """Returns the calls, by name; `rank` is the index of this worker."""

    def train(data, **arguments):
        settings = arguments.pop("settings", {})
        arguments = {"steps": 2} | arguments
        return lambda: made(strategy, **settings).train(data, **arguments)

    data = tf.data.Dataset.from_tensor_slices((X, X))
    batches, own = data.batch(8), data.shard(2, rank).batch(8)
    tasks = [Action(lambda _: None, every_steps=1)] * rank
    arrays = X[rank::2]
    return {
        "same": train(batches),
        "rounded": train((X * np.float32(1 + 1e-6 * rank), X), global_batch=8),
        "shard": train(own),
        "arrays": train((arrays, arrays), global_batch=8),
        "batch size": train(data.batch(8 + 8 * rank)),
        "length": train(batches.take(2 + rank)),
        "steps": train(batches, steps=2 + rank),
        "clipnorm": train(batches, settings={"updates": Updates(clipnorm=1.0 + rank)}),
        "seed": train(batches, settings={"seed": rank}),
        "steps per loop": train(batches, settings={"steps_per_loop": 1 + rank}),
        "actions": train(batches, settings={"callbacks": tasks}),
        "eval_data": train(batches, eval_data=own),
        "eval_interval": train(batches, eval_data=batches, eval_interval=1 + rank),
        "evaluate": lambda: made(strategy).evaluate(own),
        "predict": lambda: made(strategy).predict(X[rank * 8 :], global_batch=8),
        "profile": train(
            batches,
            steps=8,
            settings={
                "model_dir": out / "run",
                "monitoring": Monitoring(profile_steps=(3, 4)),
                "steps_per_loop": 8,
            },
        ),
        "same again": train(batches, eval_data={"all": batches, "arrays": (X, X)}),
    }


def main():
    """Makes the calls, and writes their errors."""
    strategy = strategies.create("multi_worker_mirrored")
    rank = strategy.cluster_resolver.task_id
    found, out = {}, pathlib.Path(sys.argv[1])
    for name, call in calls(rank, strategy, out).items():
        try:
            call()
            found[name] = None
        except ValueError as error:
            found[name] = str(error)
    for dtype in DTYPES:
        trainer = made(strategy, Ending, metrics=["mae"], model_dir=out / "ends", steps_per_loop=1)
        trainer.dtype = dtype
        try:
            outputs = trainer.predict(X[:10], global_batch=4)
            found[dtype] = [str(outputs.dtype), outputs.astype(float).ravel().tolist()]
        except TypeError as error:
            found[dtype] = str(error)
    try:
        trainer.train((X[:8], X[:8]), steps=4, global_batch=4)
    except Exception as error:  # noqa: BLE001  # the test looks at it
        found["end"] = type(error).__name__
    (out / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # the other worker does not wait for this one


if __name__ == "__main__":
    main()
