"""The cost of a step as work grows, and the share of loss scaling.

    python benchmarks/growth.py
    python benchmarks/growth.py --growing=parameters,replicas --rounds=5

One quantity grows at a time. A trainer with a dynamic loss scale, one without any and a
hand-written loop are measured in turn; each row is a process of its own. All compute in float32
without XLA, so that every contender runs the same kernels. Results go to benchmarks/growth.json,
and a table to docs/performance.md.
"""

from contenders import LOOP, by_hand, ours  # isort: skip  # configures TensorFlow

import pathlib
import statistics

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers
from models import Work, work_of
from turns import (
    in_turn,
    measured,
    measured_into,
    ratios_of,
    ready,
    table,
    with_interval,
    write_between,
)

import strategies

FLAGS = flags.FLAGS
# The quantity that grows, and its sizes.
ROWS = {
    "variables": (10, 100, 1_000),
    "parameters": (1_000_000, 10_000_000, 100_000_000),
    "microbatches": (1, 4, 16),
    "replicas": (1, 2, 4),
    "steps a call": (1, 5, 20, 100),
}
flags.DEFINE_list("growing", list(ROWS), "Quantities that grow.")
flags.DEFINE_integer("rounds", 25, "Number of turns of each contender.", lower_bound=3)
flags.DEFINE_float(
    "turn_secs", 0.3, "Target duration of a turn, in seconds; a turn has at least one step."
)
flags.DEFINE_string("row", None, "WHAT,SIZE: the row to measure; set for subprocesses.")

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "growth.json"
PAGE = ROOT / "docs" / "performance.md"
DYNAMIC, NONE, BY_HAND = "ours", "ours, no loss scale", "by hand"


class Chain(layers.Layer):
    """A chain of small matrices."""

    def __init__(self, count):
        """Creates `count` matrices."""
        super().__init__()
        self.kernels = [self.add_weight(shape=[16, 16]) for _ in range(count)]

    def call(self, inputs):
        """Takes and returns (batch, 16)."""
        for kernel in self.kernels:
            inputs = keras.ops.tanh(inputs @ kernel)
        return inputs


def chain(variables):
    """Returns a model with `variables` small matrices."""
    return Work(
        lambda: keras.Sequential([keras.Input([16]), Chain(variables)]),
        (np.ones([16, 16], np.float32), np.zeros([16], np.int64)),
    )


def square(parameters):
    """Returns a model with one matrix of `parameters` numbers, and a small one."""
    width = round(parameters**0.5)

    def build():
        hidden = layers.Dense(width, use_bias=False)
        return keras.Sequential([keras.Input([width]), hidden, layers.Dense(10)])

    return Work(build, (np.ones([16, width], np.float32), np.zeros([16], np.int64)))


def contenders(what, size):
    """Returns the contenders for a row, by name."""
    models = {"variables": chain, "parameters": square}
    networks = {"microbatches": "cnn", "replicas": "cnn", "steps a call": "mlp"}
    work = models[what](size) if what in models else work_of(networks[what])
    loop = size if what == "steps a call" else LOOP
    microbatches = size if what == "microbatches" else 1
    strategy = tf.distribute.get_strategy()
    if what == "replicas" and size > 1:
        strategies.split_cpu(size)
        strategy = strategies.create("mirrored", [f"CPU:{index}" for index in range(size)])
    settings = {"jit_compile": False, "num_microbatches": microbatches, "strategy": strategy}
    return {
        DYNAMIC: ours(work, "float32", loop, loss_scale="dynamic", **settings),
        NONE: ours(work, "float32", loop, loss_scale="none", **settings),
        BY_HAND: by_hand(work, "float32", loop, microbatches=microbatches, strategy=strategy),
    }


def shown(parts):
    """Returns a table with medians and ratios, one row per size."""
    head = ["", "ours", "no loss scale", "by hand", "loss scaling's share"]
    rows = [[*head, "ours, against by hand (95%)"]]
    for title, turns in parts.items():
        medians = [f"{statistics.median(turns[name]):.3g}" for name in (DYNAMIC, NONE, BY_HAND)]
        share = 1 - statistics.median(ratios_of(turns, NONE, DYNAMIC))
        against = with_interval(ratios_of(turns, DYNAMIC, BY_HAND))
        rows.append([title, *medians, f"{share:.1%}", against])
    return table(rows)


def main(_):
    """Measures one row, or all of them in a process each."""
    if FLAGS.row:
        what, size = FLAGS.row.split(",")
        found = contenders(what, int(size))
        ready()
        measured(in_turn(found, FLAGS.rounds, FLAGS.turn_secs))
        return
    rows = [(what, size) for what in FLAGS.growing for size in ROWS[what]]
    by_title = {f"{what}: {size:,}": f"--row={what},{size}" for what, size in rows}
    results = measured_into(RESULTS, by_title)
    text = "\n\n".join(f"### {name}\n\n{shown(parts)}" for name, parts in results.items())
    write_between(PAGE, "growth.py", text)
    print(text)


if __name__ == "__main__":
    app.run(main)
