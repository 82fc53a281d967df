"""Saves and restores every replica's copy of variables when the replicas are on several workers.

A worker sees the copies of its own replicas only. So the workers exchange the bits of all copies
when the run is saved, and each takes its own when the run is restored.
"""

import io
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import strategies
from trainer.base.tracking import tensorflow_variable
from trainer.step.rollback import copies_of
from trainer.step.types import Variable

FILE = "copies.npz"
ENTRY = "bytes"  # shape (replicas, bytes), uint8: the copies of all variables, one after another


def write_worker_copies(
    folder: str, variables: Sequence[Variable], strategy: tf.distribute.Strategy
) -> None:
    """Writes the copies of all workers, on any file system that TensorFlow supports.

    Every worker must call this function, in cross-replica context.
    """
    contents = io.BytesIO()
    np.savez(contents, **{ENTRY: gathered(variables, strategy)})  # type: ignore[arg-type]
    with tf.io.gfile.GFile(f"{folder}/{FILE}", "wb") as file:
        file.write(contents.getvalue())


def read_worker_copies(
    folder: pathlib.Path, variables: Sequence[Variable], strategy: tf.distribute.Strategy
) -> None:
    """Assigns to the copies of this worker's replicas what `write_worker_copies` wrote."""
    with np.load(folder / FILE, allow_pickle=False) as found:
        assign_own(variables, found[ENTRY], strategy)


def gathered(variables: Sequence[Variable], strategy: tf.distribute.Strategy) -> np.ndarray:
    """Returns the bytes of every replica's copies: shape (replicas, bytes), uint8.

    Replicas exchange them by adding them to zeros, as integers: that keeps every bit, also those of
    NaN and -0.0.
    """
    replicas, count = strategy.num_replicas_in_sync, sum(map(size_of, variables))

    def exchanged() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        values = [tensorflow_variable(variable).read_value() for variable in variables]
        row = tf.concat([tf.zeros([0], tf.uint8), *map(bytes_of, values)], axis=0)
        words = tf.bitcast(tf.reshape(tf.pad(row, [[0, -count % 8]]), [-1, 8]), tf.int64)
        own = tf.range(replicas) == context.replica_id_in_sync_group
        return strategies.sum_gradients(tf.where(own[:, None], words[None], tf.zeros([], tf.int64)))

    table = strategy.experimental_local_results(strategy.run(exchanged))[0].numpy()
    return np.ascontiguousarray(table).view(np.uint8)[:, :count]


def assign_own(
    variables: Sequence[Variable], table: np.ndarray, strategy: tf.distribute.Strategy
) -> None:
    """Assigns to each copy on this worker its part of what `gathered` returned."""

    def number() -> Any:
        return tf.identity(tf.distribute.get_replica_context().replica_id_in_sync_group)

    numbers = strategy.experimental_local_results(strategy.run(number))
    rows = [table[int(replica)].tobytes() for replica in numbers]
    start = 0
    for variable in variables:
        dtype, shape = tf.as_dtype(variable.dtype).as_numpy_dtype, tuple(variable.shape)
        end = start + size_of(variable)
        for copy, row in zip(copies_of(variable, strategy), rows, strict=True):
            copy.assign(np.frombuffer(row[start:end], dtype).reshape(shape))
        start = end


def size_of(variable: Variable) -> int:
    """Returns the number of bytes in a copy of a variable."""
    size: int = tf.as_dtype(variable.dtype).size
    return size * int(np.prod(tuple(variable.shape)))


def bytes_of(value: tf.Tensor) -> tf.Tensor:
    """Returns the bytes of a tensor: shape (bytes,), uint8."""
    one_byte = tf.cast(value, tf.uint8) if value.dtype == tf.bool else value
    return tf.reshape(tf.bitcast(one_byte, tf.uint8), [-1])
