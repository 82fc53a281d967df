"""Chooses the GPUs that a script uses, and how much of their memory.

    python examples/gpus.py
    python examples/gpus.py --gpus=0,2
    python examples/gpus.py --gpus=1 --memory_limit_mb=4096
    python examples/gpus.py --nomemory_growth

It uses only TensorFlow's public `tf.config`, before TensorFlow initializes a device. Copy
`choose_strategy` into your own script: `make_trainer(..., strategy=choose_strategy())`. If there
is no GPU, it says so and uses the CPU.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import sys

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import strategies

GPUS = flags.DEFINE_list("gpus", None, "GPUs to use, such as 0,2. Default: all.")
GROWTH = flags.DEFINE_boolean("memory_growth", True, "Allocate GPU memory as needed.")
LIMIT = flags.DEFINE_integer("memory_limit_mb", None, "Memory limit per GPU; disables growth.", 1)


def choose_strategy():
    """Returns a strategy on the GPUs that the flags select, or on the CPU if there is no GPU."""
    found = tf.config.list_physical_devices("GPU")
    if not found:
        ignored = f" and ignoring --gpus={','.join(GPUS.value)}" if GPUS.value else ""
        print(f"TensorFlow finds no GPU; using the CPU{ignored}.")
        return strategies.create("default")
    numbers = [str(number) for number in range(len(found))]
    if GPUS.value and not set(GPUS.value) <= set(numbers):
        sys.exit(f"--gpus must be chosen from {','.join(numbers)}; got {','.join(GPUS.value)}.")
    chosen = [found[int(number)] for number in GPUS.value or numbers]
    tf.config.set_visible_devices(chosen, "GPU")
    for gpu in chosen:
        if LIMIT.value:
            config = tf.config.LogicalDeviceConfiguration(memory_limit=LIMIT.value)
            tf.config.set_logical_device_configuration(gpu, [config])
        else:
            tf.config.experimental.set_memory_growth(gpu, GROWTH.value)
    print("on", ", ".join(gpu.name for gpu in chosen))
    # TensorFlow renumbers the visible GPUs from 0.
    return strategies.create("mirrored" if len(chosen) > 1 else "one_device")


def main(_):
    """Fits y = 3 x + 1 on the chosen GPUs."""
    line = Trainer(
        strategy=choose_strategy(),
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
