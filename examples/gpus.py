"""Which GPUs a script takes, and how much of their memory.

    python examples/gpus.py
    python examples/gpus.py --gpus=0,2
    python examples/gpus.py --gpus=1 --memory_limit_mb=4096
    python examples/gpus.py --nomemory_growth

All of it is TensorFlow's public `tf.config`, called before anything touches a device. Copy `choose`
into a script of your own: `make_trainer(..., strategy=choose())`. Where there is no GPU, it says so
and goes on with the CPU.
"""

from trainer import Trainer  # isort: skip  # first: it sets TensorFlow up

import sys

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import strategies

GPUS = flags.DEFINE_list("gpus", None, "Which, counted from 0: for instance 0,2. None: all.")
GROWTH = flags.DEFINE_boolean("memory_growth", True, "Take memory as it is needed, not all.")
LIMIT = flags.DEFINE_integer("memory_limit_mb", None, "The most of each; then without growth.", 1)


def choose():
    """Returns a strategy on the GPUs that the flags ask for, or on the CPU if there is none."""
    found = tf.config.list_physical_devices("GPU")
    if not found:
        asked = f"; --gpus={','.join(GPUS.value)} has no effect" if GPUS.value else ""
        print(f"There is no GPU that TensorFlow can see: the CPU takes its place{asked}.")
        return strategies.create("default")
    numbers = [str(number) for number in range(len(found))]
    if GPUS.value and not set(GPUS.value) <= set(numbers):
        sys.exit(f"--gpus must be of {','.join(numbers)}; got {','.join(GPUS.value)}.")
    chosen = [found[int(number)] for number in GPUS.value or numbers]
    tf.config.set_visible_devices(chosen, "GPU")
    for gpu in chosen:
        if LIMIT.value:
            part = tf.config.LogicalDeviceConfiguration(memory_limit=LIMIT.value)
            tf.config.set_logical_device_configuration(gpu, [part])
        else:
            tf.config.experimental.set_memory_growth(gpu, GROWTH.value)
    print("on", ", ".join(gpu.name for gpu in chosen))
    # TensorFlow counts those that are left from 0 again.
    return strategies.create("mirrored" if len(chosen) > 1 else "one_device")


def main(_):
    """Fits y = 3 x + 1 on them."""
    line = Trainer(
        strategy=choose(),
        model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        optimizer=lambda: keras.optimizers.SGD(0.5),
        loss_fn="mse",
    )
    x = np.random.default_rng(0).uniform(-1, 1, [256, 1]).astype(np.float32)
    line.train((x, 3 * x + 1), steps=200, global_batch=64)
    slope, intercept = (float(weight.ravel()[0]) for weight in line.model.get_weights())
    used = line.strategy.num_replicas_in_sync
    print(f"y = {slope:.2f} x + {intercept:.2f}, found by {used} replica{'s' if used > 1 else ''}")


if __name__ == "__main__":
    app.run(main)
