"""The argument checks of `strategies`."""

import numpy as np
import pytest
import tensorflow as tf

from strategies import checks


@pytest.mark.parametrize("count", [1, 7, np.int64(3)])
def test_counts_are_accepted(count):
    """Every int of at least 1 is a count, including those of NumPy."""
    checks.check_count("parts", count, "Unused.")


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "2", None, np.float32(1)])
def test_other_values_are_not_counts(count):
    """Any other value, a bool included, is refused with the name of the argument."""
    with pytest.raises(ValueError, match="`parts`"):
        checks.check_count("parts", count, "Parts are numbered.")


def test_static_shapes():
    """A static shape is known of tensors and arrays; a Python number is a scalar."""
    assert checks.static_shape(tf.ones([2, 3])).as_list() == [2, 3]
    assert checks.static_shape(np.ones([4])).as_list() == [4]
    assert checks.static_shape(1.5).as_list() == []

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def traced(tensor):
        assert checks.static_shape(tensor).as_list() == [None, 3]

    traced.get_concrete_function()


def test_a_strategy_is_accepted(mirrored):
    """Every strategy of TensorFlow is one."""
    checks.check_strategy(tf.distribute.get_strategy(), "Unused.")
    checks.check_strategy(mirrored(2), "Unused.")


@pytest.mark.parametrize("strategy", ["mirrored", None, tf.distribute.MirroredStrategy])
def test_other_values_are_not_strategies(strategy):
    """A name, None or a class is refused with a suggestion that works."""
    with pytest.raises(TypeError, match="`strategy`"):
        checks.check_strategy(strategy, "It has the replicas.")


@pytest.mark.parametrize(
    "make",
    [
        tf.distribute.get_strategy,
        lambda: tf.distribute.OneDeviceStrategy("/cpu:1"),
        lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:2"]),
    ],
    ids=["default", "one device", "mirrored"],
)
def test_present_devices_are_accepted(make):
    """Devices may be named in each of TensorFlow's ways."""
    checks.check_devices(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.distribute.OneDeviceStrategy("GPU:0"),
        lambda: tf.distribute.OneDeviceStrategy("CPU:77"),
        lambda: tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"]),
    ],
    ids=["one GPU", "a CPU too many", "two GPUs"],
)
def test_a_missing_device_is_named(make):
    """TensorFlow would compute on the CPU instead, or hang in the first step."""
    with pytest.raises(ValueError, match="`strategy`"):
        checks.check_devices(make())
