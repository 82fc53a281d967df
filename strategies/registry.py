"""Strategies by name: `create`, and `register` for one's own."""

import difflib
from collections.abc import Callable, Sequence

import tensorflow as tf

from strategies import factories, tpu

# What a factory is handed: the devices the caller named, or None for its own choice.
Factory = Callable[[Sequence[str] | None], tf.distribute.Strategy]

_FACTORIES: dict[str, Factory] = {
    "default": factories.default,
    "one_device": factories.one_device,
    "mirrored": factories.mirrored,
    "multi_worker_mirrored": factories.multi_worker_mirrored,
    "parameter_server": factories.parameter_server,
    "tpu": tpu.tpu,
    "auto": factories.auto,
}


def create(name: str, devices: Sequence[str] | None = None) -> tf.distribute.Strategy:
    """Makes the strategy of a name.

    Args:
        name: one of `names()`.
        devices: the devices to use, for instance `["GPU:0", "GPU:1"]`, or a TPU's address;
            None lets the strategy choose: every GPU there is, or else every logical CPU device.

    Returns:
        A new `tf.distribute.Strategy`.

    Raises:
        ValueError: if the name is unknown, or the devices do not suit it.

    Example:
        >>> create("mirrored", devices=["CPU:0", "CPU:1"]).num_replicas_in_sync
        2
    """
    if name not in _FACTORIES:
        near = difflib.get_close_matches(str(name), names(), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Add your own with strategies.register()."
        raise ValueError(
            f"`strategy` must be one of {', '.join(names())}; got {name!r}. No other is "
            f"registered. {hint}"
        )
    return _FACTORIES[name](devices)


def register(name: str, factory: Factory) -> None:
    """Adds a strategy, so that `create`, `Trainer` and `--distribution_strategy` know its name.

    Args:
        name: the new name.
        factory: a function of `devices` (a list of names, or None) that returns a new
            `tf.distribute.Strategy`.

    Raises:
        TypeError: if the name is no text, or the factory no function.
        ValueError: if the name is taken.

    Example:
        >>> register("last_cpu", lambda devices: tf.distribute.OneDeviceStrategy("CPU:1"))
        >>> create("last_cpu").num_replicas_in_sync
        1
    """
    if not isinstance(name, str):
        raise TypeError(
            f"`name` must be a string; got {name!r}. It is what a command line says. Pass for "
            'instance "mine".'
        )
    if not callable(factory):
        raise TypeError(
            f"`factory` must be a function of devices; got {type(factory).__name__}. Each create() "
            "makes a new strategy. Pass for instance lambda devices: "
            "tf.distribute.MirroredStrategy(devices)."
        )
    if name in _FACTORIES:
        raise ValueError(
            f"`name` must be new; got {name!r}. A strategy of that name is registered already. "
            f"Choose a name other than {', '.join(names())}."
        )
    _FACTORIES[name] = factory


def names() -> list[str]:
    """Returns the names that `create` knows, in the order in which they were registered.

    Example:
        >>> names()[:3]
        ['default', 'one_device', 'mirrored']
    """
    return list(_FACTORIES)
