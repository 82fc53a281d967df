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


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("miror", "Did you mean 'mirrored'?"),
        ("zzz", "Add your own with strategies.register()."),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, hint):
    """The error for an unknown name lists all names and suggests the nearest."""
    with pytest.raises(ValueError, match="strategy") as error:
        strategies.create(name)

    assert str(error.value) == (
        f"`strategy` must be one of {', '.join(strategies.names())}; got {name!r}. No other name is "
        f"registered. {hint}"
    )
    assert strategies.names()[:3] == ["default", "one_device", "mirrored"]
