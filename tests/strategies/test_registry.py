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


@pytest.mark.parametrize("name", ["miror", "zzz"])
def test_an_unknown_name_is_refused(name):
    """A name that is near to a known one, and one that is not."""
    with pytest.raises(ValueError, match="`strategy`"):
        strategies.create(name)
    assert strategies.names()[:3] == ["default", "one_device", "mirrored"]
