"""The chief of a job with servers: a run that ends with an error, and a run after it.

python server_errors.py OUT. Writes `OUT/result.json`: the error of a run whose data are wrong, the
updates that another trainer then applies in the same process, the step at which a third one ends
whose second loss is NaN, and the step at which a fourth one ends that skips two steps and no others.
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from trainer import DataError, Monitoring, Skips, Trainer, TrainingStuckError  # isort: skip

import keras
import numpy as np
import tensorflow as tf

import strategies

X = np.random.default_rng(0).normal(size=[50, 6]).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def main():
    """Runs the four."""
    strategy = strategies.create("parameter_server")

    def made(**settings):
        return Trainer(
            model=lambda: keras.Sequential([keras.Input([6]), keras.layers.Dense(1)]),
            optimizer=lambda: keras.optimizers.SGD(0.1),
            loss_fn="mse",
            strategy=strategy,
            verbose=False,
            **{"steps_per_loop": 2} | settings,
        )

    wrong = X.copy()
    wrong[[19, 25]] = np.nan  # in the second and the third batch
    data = tf.data.Dataset.from_tensor_slices((wrong, Y)).batch(10)
    found = {}
    try:
        made(monitoring=Monitoring(check_data=True)).train(data, steps=12)
    except DataError as error:
        found["data"] = str(error)
    found["after"] = made().train((X, Y), steps=4, global_batch=10).totals.applied
    stuck = made(skips=Skips(on_nonfinite_loss="raise"))
    try:
        stuck.train(data, steps=60)
    except TrainingStuckError as error:
        found["stuck"] = str(error)
    found["attempted"] = stuck.totals.attempted
    wrong = X.copy()
    wrong[10:30] = np.nan
    skipping = made(skips=Skips(max_consecutive=2), steps_per_loop=60)
    data = (
        tf.data.Dataset.from_tensor_slices((wrong, Y))
        .batch(10)
        .concatenate(tf.data.Dataset.from_tensor_slices((X, Y)).batch(10).repeat(20))
    )
    try:
        skipping.train(data, steps=60)
    except TrainingStuckError as error:
        found["skips"] = str(error)
    found["skipped"] = skipping.totals.skipped
    found["taken"] = skipping.totals.attempted
    (pathlib.Path(sys.argv[1]) / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
