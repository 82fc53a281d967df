"""Copies of variables on several workers. `tests/chaos/test_kills.py` kills such jobs."""

import numpy as np
import pytest
import tensorflow as tf

from trainer.checkpoint.worker_copies import (
    assign_own,
    gathered,
    read_worker_copies,
    write_worker_copies,
)

# Values of which each bit counts: two NaNs that differ, -0.0, and the smallest number.
BITS = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 1], np.uint32).view(np.float32)


def variables_on(strategy):
    """Variables of several types, with another copy on each replica."""
    values = [
        *(BITS, np.float16([[1.5], [2.5], [-0.0]]), np.int64(-(2**40)), np.array([True, False])),
        np.float32(0.1),
    ]
    with strategy.scope():
        variables = [
            tf.Variable(value, synchronization=tf.VariableSynchronization.ON_READ, trainable=False)
            for value in values
        ]
    for variable, value in zip(variables, values, strict=True):
        for replica, copy in enumerate(strategy.experimental_local_results(variable)):
            copy.assign(np.roll(value, replica) if np.ndim(value) else value)
    return variables


def bits_of(variables, strategy):
    """The bytes of every copy."""
    copies = [strategy.experimental_local_results(variable) for variable in variables]
    return [[copy.numpy().tobytes() for copy in of_one] for of_one in copies]


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_bit_of_every_copy_is_kept(tmp_path, mirrored, replicas):
    """L12: the copies of all replicas are gathered with every bit, and each gets its own again."""
    strategy = mirrored(replicas)
    variables = variables_on(strategy)
    before = bits_of(variables, strategy)
    table = gathered(variables, strategy)
    of_replicas = [b"".join(copies) for copies in zip(*before, strict=True)]
    assert [row.tobytes() for row in table] == of_replicas

    write_worker_copies(str(tmp_path), variables, strategy)
    assign_own(variables, np.zeros_like(table), strategy)
    assert bits_of(variables, strategy) != before
    read_worker_copies(tmp_path, variables, strategy)
    assert bits_of(variables, strategy) == before


def test_nothing_to_gather_is_nothing(mirrored):
    """A run without metrics has no copies that differ."""
    assert gathered([], mirrored(2)).shape == (2, 0)
