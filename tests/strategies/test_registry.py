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
    """A name makes a strategy of its kind; mirrored takes every CPU device there is."""
    strategy = strategies.create(name)

    assert isinstance(strategy, kind)
    assert strategy.num_replicas_in_sync == (4 if name == "mirrored" else 1)


def test_devices_can_be_chosen():
    """The devices named are the devices used."""
    assert strategies.create("mirrored", ["CPU:1", "CPU:3"]).extended.worker_devices == (
        "/job:localhost/replica:0/task:0/device:CPU:1",
        "/job:localhost/replica:0/task:0/device:CPU:3",
    )
    assert "CPU:2" in strategies.create("one_device", ["CPU:2"]).extended.worker_devices[0]


def test_a_strategy_of_ones_own():
    """What is registered is known by name, once."""
    strategies.register("mine", lambda devices: tf.distribute.OneDeviceStrategy("CPU:3"))  # noqa: ARG005

    assert strategies.names()[-1] == "mine"
    assert isinstance(strategies.create("mine"), tf.distribute.OneDeviceStrategy)
    with pytest.raises(ValueError, match="`name` must be new; got 'mine'"):
        strategies.register("mine", strategies.create)


def test_an_unknown_name_is_refused_with_the_nearest():
    """The error lists the names and suggests one."""
    with pytest.raises(ValueError, match=r"got 'miror'\. .*Did you mean 'mirrored'\?") as error:
        strategies.create("miror")

    assert "`strategy` must be one of default, one_device, mirrored" in str(error.value)


@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        ("default", ["CPU:0"], "`devices` must be None for the default strategy"),
        ("one_device", ["CPU:0", "CPU:1"], "`devices` must name one device for one_device"),
        ("mirrored", ["CPU:0", "CPU:0"], "`devices` must name each device once"),
        ("mirrored", [], "`devices` must name each device once, and at least one"),
    ],
)
def test_devices_that_do_not_suit(name, devices, message):
    """Each strategy says what it expects of `devices`."""
    with pytest.raises(ValueError, match=message):
        strategies.create(name, devices)


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_devices_are_a_list(name):
    """One name alone would be taken for its letters."""
    with pytest.raises(TypeError, match=r"got the string 'CPU:0'.* Pass \['CPU:0'\]"):
        strategies.create(name, "CPU:0")


def test_the_cpu_cannot_be_split_twice():
    """Asking again for the same number is fine; for another it says why not."""
    strategies.split_cpu(4)
    with pytest.raises(RuntimeError, match="`count` must be 4 by now; got 2"):
        strategies.split_cpu(2)
