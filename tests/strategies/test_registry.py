"""Strategies by name."""

import pytest
import tensorflow as tf

import strategies


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("default", tf.distribute.Strategy),
        ("one_device", tf.distribute.OneDeviceStrategy),
        ("mirrored", tf.distribute.MirroredStrategy),
    ],
)
def test_every_name_makes_its_strategy(name, kind):
    """Each name creates a strategy of its kind; "mirrored" uses all four CPU devices."""
    strategy = strategies.create(name)

    assert isinstance(strategy, kind)
    assert strategy.num_replicas_in_sync == (4 if name == "mirrored" else 1)


def test_a_registered_strategy_is_created_by_name():
    """A registered strategy can be created by its name, and the name cannot be taken twice."""
    strategies.register("mine", lambda devices: tf.distribute.OneDeviceStrategy("CPU:3"))  # noqa: ARG005

    assert strategies.names()[-1] == "mine"
    assert isinstance(strategies.create("mine"), tf.distribute.OneDeviceStrategy)
    with pytest.raises(ValueError, match="`name` must be new; got 'mine'"):
        strategies.register("mine", strategies.create)


def test_an_unknown_name_is_refused():
    """The error for an unknown name lists all names."""
    with pytest.raises(
        ValueError, match=r"^`strategy` must be one of default, one_device, mirrored"
    ):
        strategies.create("miror")


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
    strategies.check_devices(make())


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (lambda: tf.distribute.OneDeviceStrategy("GPU:0"), "GPU:0"),
        (lambda: tf.distribute.OneDeviceStrategy("CPU:77"), "CPU:77"),
        (lambda: tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"]), "GPU:0"),
    ],
    ids=["one GPU", "a CPU too many", "two GPUs"],
)
def test_a_missing_device_is_named(make, missing):
    """TensorFlow would compute on the CPU instead, or hang in the first step."""
    with pytest.raises(ValueError, match=f"^`strategy` must use devices of .*got {missing}"):
        strategies.check_devices(make())
