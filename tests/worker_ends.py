"""The program of a worker: predicts outputs of several kinds, and ends with an error in a hook.

python worker_ends.py OUT FAILING. Each process writes `OUT/INDEX.json`: what it predicted, by dtype,
and the error with which its run ended; the worker with the index FAILING raises one in a hook.
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from trainer import Trainer  # isort: skip

import keras
import numpy as np
import tensorflow as tf

import strategies

KINDS = ("bool", "uint8", "bfloat16", "string")


def main():
    """Predicts, trains until the hook raises, and writes what happened."""
    out, failing = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    strategy = strategies.create("multi_worker_mirrored")
    index = strategy.cluster_resolver.task_id

    class Ending(Trainer):
        kind = ""

        def predict_batch(self, batch):
            """The numbers in another dtype, or as text."""
            return tf.as_string(batch) if self.kind == "string" else tf.cast(batch, self.kind)

        def on_loop_end(self, step):
            """Fails on one worker."""
            if index == failing and step == 2:
                raise KeyError("a bug")

    x = np.arange(10, dtype=np.float32)[:, None]
    found = {}
    for kind in KINDS:
        trainer = Ending(
            model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
            optimizer=lambda: keras.optimizers.SGD(0.0),
            loss_fn="mse",
            metrics=["mae"],
            strategy=strategy,
            model_dir=str(out / "run"),
            steps_per_loop=1,
            verbose=False,
        )
        trainer.kind = kind
        try:
            outputs = trainer.predict(x, global_batch=4)
            found[kind] = [str(outputs.dtype), outputs.astype(float).ravel().tolist()]
        except TypeError as error:
            found[kind] = str(error)
    try:
        trainer.train((x[:8], x[:8]), steps=4, global_batch=4)
    except Exception as error:  # noqa: BLE001  # the test looks at it
        found["error"] = [type(error).__name__, *getattr(error, "__notes__", [])]
    (out / f"{index}.json").write_text(json.dumps(found))
    os._exit(0)  # the other worker does not wait for this one


if __name__ == "__main__":
    main()
