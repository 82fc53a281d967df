"""The capabilities of every kind of strategy."""

import dataclasses
import pathlib

import fake_tpu
import pytest
import tensorflow as tf

import strategies

ROOT = pathlib.Path(__file__).parents[2]
PLAIN = strategies.Capabilities(
    num_replicas=1,
    asynchronous=False,
    multi_worker=False,
    decides_in_replica=False,
    is_chief=True,
    on_cpu=True,
)


def assert_capabilities(strategy, **different):
    """Checks all capabilities: those of one CPU replica, apart from the given differences."""
    assert strategies.capabilities(strategy) == dataclasses.replace(PLAIN, **different)


@pytest.mark.parametrize("name", ["default", "one_device"])
def test_one_replica_on_the_cpu(name):
    """The default strategy and a strategy on one CPU device have the same capabilities."""
    assert_capabilities(strategies.create(name))


@pytest.mark.parametrize("replicas", [2, 3])
def test_mirrored_replicas(mirrored, replicas):
    """A mirrored strategy differs from one device only in its number of replicas."""
    assert_capabilities(mirrored(replicas), num_replicas=replicas)


def test_replicas_that_exchange_one_shape():
    """TensorFlow's own sums are collectives, unless another way was asked for."""
    devices = ["CPU:0", "CPU:1"]
    assert_capabilities(tf.distribute.MirroredStrategy(devices), num_replicas=2, one_shape=True)
    other = tf.distribute.MirroredStrategy(devices, tf.distribute.HierarchicalCopyAllReduce())
    assert_capabilities(other, num_replicas=2)


def test_a_tpu_decides_in_each_replica():
    """The cores of a TPU are replicas that decide within their own program."""
    assert_capabilities(
        fake_tpu.strategy(cores=4), num_replicas=4, decides_in_replica=True, on_cpu=False
    )


def test_a_gpu_is_not_a_cpu(monkeypatch):
    """`on_cpu` is false on a GPU that was named, and on one that TensorFlow would choose."""
    assert not strategies.capabilities(tf.distribute.OneDeviceStrategy("GPU:0")).on_cpu
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [f"one {kind}"])
    assert not strategies.capabilities(tf.distribute.get_strategy()).on_cpu
