"""Copies of the arrays that a user passed, and the batches made of them.

A user may go on writing to the arrays, as to a replay buffer. So batches are made of copies, which
also tell whether the arrays were changed.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from trainer.base.autograph import without_autograph
from trainer.data.reader import untuned
from trainer.step.types import Batch

CHUNK_BYTES = 2**17  # how much is compared at a time: it fits into a processor's cache


class ArrayCopies:
    """Copies of arrays in any structure.

    Args:
        data: the arrays; the first dimension of each indexes the examples.
        global_batch: the batch size.
        shuffle_seed: seed for a new order in every pass; None keeps the order.
        one_shape: whether the spec of the batches says their size, if all have the same.
    """

    def __init__(
        self, data: Any, global_batch: int, shuffle_seed: int | None, *, one_shape: bool = False
    ) -> None:
        """Copies the arrays into the host's memory, from which batches are gathered."""
        self.global_batch = global_batch
        self.shuffle_seed = shuffle_seed
        with tf.device("CPU"):
            self.tensors = tf.nest.map_structure(tf.convert_to_tensor, data)
        self._one_shape = one_shape

    def batches_from(self, first_pass: int) -> tf.data.Dataset:
        """Returns the batches: one pass in order; or, shuffled, all passes from one on."""
        size = min(self.global_batch, self.examples)
        whole = self._one_shape and self.examples % size == 0  # then there is nothing to drop
        if self.shuffle_seed is None:
            indices = tf.data.Dataset.range(self.examples).batch(size, drop_remainder=whole)
        else:
            indices = shuffled_indices(
                self.examples, size, self.shuffle_seed, first_pass, drop_remainder=whole
            )
        return untuned(indices.map(without_autograph(self._rows)))

    def first_from(self, first_pass: int) -> Batch:
        """Returns the first batch of a pass, at a fraction of the cost of an iterator."""
        if self.shuffle_seed is None:
            indices = tf.range(self.examples, dtype=tf.int64)
        else:
            indices = shuffled(self.examples, self.shuffle_seed, first_pass)
        with tf.device("CPU"):
            return self._rows(indices[: self.global_batch])

    @property
    def examples(self) -> int:
        """Number of examples."""
        return int(tf.nest.flatten(self.tensors)[0].shape[0])

    def _rows(self, rows: tf.Tensor) -> Batch:
        return tf.nest.map_structure(lambda array: tf.gather(array, rows), self.tensors)

    def hold(self, data: Any) -> bool:
        """Returns whether the arrays still have the values of the copies.

        Reads all of both, which takes less time than copying them. Tensors, and arrays that NumPy
        does not let anybody write to, cannot have changed.
        """
        pairs = zip(tf.nest.flatten(self.tensors), tf.nest.flatten(data), strict=True)
        return all(is_constant(leaf) or same(copy, leaf) for copy, leaf in pairs)


def is_constant(array: Any) -> bool:
    """Returns whether nobody can write to an array."""
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return False
        if array.base is None:
            return True
        array = array.base
    return isinstance(array, tf.Tensor)


def same(copy: tf.Tensor, array: Any) -> bool:
    """Returns whether an array has the bits of its copy."""
    held, now = values_of(copy), np.asarray(array)
    if held.shape != now.shape:
        return False
    if held.dtype != now.dtype or held.dtype.hasobject:  # strings
        return bool(np.array_equal(copy.numpy(), tf.convert_to_tensor(array).numpy()))
    rows = max(1, CHUNK_BYTES // max(1, held[:1].nbytes))
    parts = (slice(begin, begin + rows) for begin in range(0, len(held), rows))
    return all(held[part].tobytes() == now[part].tobytes() for part in parts)


def values_of(tensor: tf.Tensor) -> np.ndarray:
    """Returns the values of a tensor in the host's memory, without a copy where possible."""
    try:
        return np.asarray(memoryview(tensor))
    except (BufferError, TypeError, ValueError):  # strings, and types that NumPy does not know
        values: np.ndarray = tensor.numpy()
        return values


def shuffled_indices(
    examples: int,
    global_batch: int,
    seed: int,
    first_pass: int = 0,
    *,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Returns batches of shuffled indices forever, each pass in a new order.

    The order depends only on the seed and the number of the pass. `Dataset.shuffle` would also
    depend on TensorFlow's global seed, and would save its buffer in every checkpoint.
    """

    @without_autograph
    def one_pass(number: tf.Tensor) -> tf.data.Dataset:
        order = shuffled(examples, seed, number)
        return tf.data.Dataset.from_tensor_slices(order).batch(
            global_batch, drop_remainder=drop_remainder
        )

    endless = tf.data.Dataset.counter(first_pass).flat_map(one_pass)
    return endless.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


@tf.function(reduce_retracing=True, autograph=False)  # type: ignore[untyped-decorator]
def _shuffled(examples: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    indices = tf.range(examples, dtype=tf.int64)
    return tf.random.experimental.stateless_shuffle(indices, seeds, alg="philox")


def shuffled(examples: int, seed: int, number: int | tf.Tensor) -> tf.Tensor:
    """Returns the order of a pass: the indices of all examples, in int64."""
    seeds = tf.stack([tf.constant(seed, tf.int64), tf.cast(number, tf.int64)])
    # Traced once per process: a pipeline of new arrays is then made in less time.
    return _shuffled(tf.constant(examples, tf.int64), seeds)
