"""The cost of the one all-reduce of a step, by bytes and replicas, with a fitted model.

    python benchmarks/all_reduce.py

Replicas are logical CPU devices in one process (`mirrored`), and then processes that communicate
over gRPC on 127.0.0.1 (`multi_worker_mirrored`). The variants in a row are measured in turn in one
process; the output is medians. The model is a ring: a latency for each of 2 (R - 1) rounds, and 2
(R - 1) / R of the bytes over the slowest link.
"""

import functools
import io
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import strategies
from strategies.launch import Job

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 9, "Number of turns of each variant.", lower_bound=1)
flags.DEFINE_integer("calls", 10, "Number of sums in a turn.", lower_bound=1)
flags.DEFINE_string("measure_into", None, "File for the results; set for subprocesses.")

FLOATS = 400_000  # size in the comparisons: 1.6 MB, a small convolutional network
SIZES = (1_000, 100_000, 400_000, 1_600_000)


def variants(replicas):
    """Returns the structure of tensors to sum, by name."""
    vector = tf.ones([FLOATS])
    table = (tf.zeros([replicas]), tf.zeros([replicas, 2]), tf.zeros([replicas]))
    verdict = (table, tf.zeros([]), tf.zeros([]), tf.zeros([]))
    return {
        **{f"{size} floats": tf.ones([size]) for size in SIZES},
        "with the verdict": (vector, verdict),
        "in float16": tf.cast(vector, tf.float16),
        "100 variables": [tf.ones([FLOATS // 100]) + number for number in range(100)],
    }


def measured(strategy):
    """Returns the seconds per sum, by variant."""
    replicas = strategy.num_replicas_in_sync

    def calls_of(values):
        def replica(values):
            # Each sum depends on the previous one, without the host in between.
            now = tf.nest.map_structure(tf.identity, values)
            for _ in range(FLAGS.calls):
                total = strategies.sum_gradients(now)
                now = tf.nest.map_structure(lambda each: each / replicas, total)
            # Uses every sum, because TensorFlow would prune unused ones.
            return tf.add_n(
                [tf.reduce_sum(tf.cast(each, tf.float32)) for each in tf.nest.flatten(now)]
            )

        # Passed as arguments, because sums of constants would be folded.
        step = tf.function(lambda values: strategy.run(replica, args=(values,)))
        return functools.partial(step, values)

    functions = {name: calls_of(values) for name, values in variants(replicas).items()}
    seconds = {name: [] for name in functions}
    # Same order and number in every process, because each sum waits for all processes.
    for turn in range(FLAGS.rounds + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            strategy.experimental_local_results(function())[0].numpy()
            if turn:  # the first turn traces
                seconds[name].append((time.perf_counter() - began) / FLAGS.calls)
    return {name: statistics.median(each) for name, each in seconds.items()}


def of_processes(count):
    """Returns what the first of `count` worker processes has measured."""
    with tempfile.TemporaryDirectory() as scratch:
        out = pathlib.Path(scratch) / "measured.json"
        here = [f"--rounds={FLAGS.rounds}", f"--calls={FLAGS.calls}", f"--measure_into={out}"]
        printed = io.StringIO()
        if Job([sys.executable, __file__, *here], count, 0, printed).run():
            sys.exit(printed.getvalue())
        return json.loads(out.read_text())


def fit(seconds, replicas):
    """Fits the ring; returns its latency in seconds per round and its bandwidth in bytes per
    second.
    """
    sizes = np.array([4.0 * size for size in SIZES])
    times = np.array([seconds[f"{size} floats"] for size in SIZES])
    design = np.stack(
        [2 * (replicas - 1) * np.ones_like(sizes), 2 * (replicas - 1) / replicas * sizes]
    )
    # Relative errors, because absolute ones would fit the largest size only.
    (latency, per_byte), *_ = np.linalg.lstsq((design / times).T, np.ones_like(times), rcond=None)
    return latency, 1 / per_byte


def ring(replicas, size, latency, bandwidth):
    """Returns the seconds of an all-reduce of `size` bytes."""
    return 2 * (replicas - 1) * (latency + size / replicas / bandwidth)


def show(title, found):
    """Prints the table of one kind of replicas, and predictions for more replicas."""
    print(f"\n{title}: milliseconds of one sum")
    names = list(next(iter(found.values())))
    print(f"{'':18}" + "".join(f"{f'{replicas} replicas':>14}" for replicas in found))
    for name in names:
        print(f"{name:18}" + "".join(f"{1e3 * each[name]:14.2f}" for each in found.values()))
    for replicas, each in found.items():
        base = each[f"{FLOATS} floats"]
        shares = {name: each[name] / base for name in names[len(SIZES) :]}
        text = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
        latency, bandwidth = fit(each, replicas)
        print(
            f"{replicas} replicas, of {FLOATS} floats: {text}; "
            f"fitted: {1e3 * latency:.2f} ms a round, {bandwidth / 1e9:.2f} GB/s"
        )
    latency, bandwidth = fit(found[max(found)], max(found))
    for size in (1.6e6, 100e6):
        times = [f"{1e3 * ring(more, size, latency, bandwidth):.0f} ms" for more in (8, 64, 1024)]
        print(f"predicted for {size / 1e6:g} MB at 8, 64 and 1024 replicas: {', '.join(times)}")


def main(_):
    """Measures and prints everything, or measures as one of the worker processes."""
    tf.get_logger().setLevel("ERROR")
    logging.set_verbosity(logging.ERROR)
    if FLAGS.measure_into:
        strategy = strategies.create("multi_worker_mirrored")
        found = measured(strategy)
        if strategies.capabilities(strategy).is_chief:
            pathlib.Path(FLAGS.measure_into).write_text(json.dumps(found))
        return
    processes = {count: of_processes(count) for count in (2, 4)}
    strategies.split_cpu(4)
    local = {}
    for count in (2, 4):
        devices = [f"CPU:{index}" for index in range(count)]
        local[count] = measured(strategies.create("mirrored", devices))
    show("logical devices of one process", local)
    show("processes, over 127.0.0.1", processes)


if __name__ == "__main__":
    app.run(main)
