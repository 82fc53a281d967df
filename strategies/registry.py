"""Strategies by name: `create` makes one, and `register` adds one of your own."""

import difflib
from collections.abc import Callable, Sequence

import tensorflow as tf

from strategies import factories, tpu
from strategies.checks import check_devices, shown

# Takes the caller's device names, or None, in which case the factory chooses the devices.
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
    """Returns a new strategy of the given name.

    Args:
        name: one of `names()`.
        devices: names of the devices to use, for instance `["GPU:0", "GPU:1"]`, or a list with
            the address of a TPU. With None, "mirrored" uses all GPUs or, if there are none, all
            logical CPU devices. That is one replica unless `split_cpu` has divided the CPU.

    Returns:
        A new `tf.distribute.Strategy`; for "default", TensorFlow's current strategy.

    Raises:
        TypeError: if `devices` is not a list.
        ValueError: if `name` is not registered, the strategy cannot use `devices`, or a device, its
            TPU or its job is not found.

    Example:
        >>> from strategies import split_cpu
        >>> split_cpu(4)  # a CPU is one device unless it is split
        >>> create("mirrored", devices=["CPU:0", "CPU:1"]).num_replicas_in_sync
        2
    """
    if not isinstance(name, str) or name not in _FACTORIES:
        near = difflib.get_close_matches(shown(name).strip("'"), names(), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Add your own with strategies.register()."
        raise ValueError(
            f"`strategy` must be one of {', '.join(names())}; got {shown(name)}. No other name "
            f"is registered. {hint}"
        )
    made = _FACTORIES[name](devices)
    check_devices(made)
    return made


def register(name: str, factory: Factory) -> None:
    """Adds a strategy, so that `create`, `Trainer` and `--strategy` accept its name.

    Args:
        name: the new name.
        factory: a function of `devices` (a list of names, or None) that returns a new
            `tf.distribute.Strategy`.

    Raises:
        TypeError: if `name` is not a string or `factory` is not callable.
        ValueError: if a strategy of that name is already registered.

    Example:
        >>> register("last_cpu", lambda devices: tf.distribute.OneDeviceStrategy("CPU:1"))
        >>> create("last_cpu").num_replicas_in_sync
        1
    """
    if not isinstance(name, str):
        raise TypeError(
            f"`name` must be a string; got {shown(name)}. The name is passed to create() and to "
            'Trainer(strategy=). Pass for instance "my_strategy".'
        )
    if not callable(factory):
        raise TypeError(
            f"`factory` must be a function of devices; got {type(factory).__name__}. create() "
            "calls it to make a new strategy each time. Pass for instance lambda devices: "
            "tf.distribute.MirroredStrategy(devices)."
        )
    if name in _FACTORIES:
        raise ValueError(
            f"`name` must be new; got {shown(name)}. A strategy of that name is already "
            f"registered. Choose a name other than {', '.join(names())}."
        )
    _FACTORIES[name] = factory


def names() -> list[str]:
    """Returns the names that `create` accepts, in order of registration.

    Example:
        >>> names()[:3]
        ['default', 'one_device', 'mirrored']
    """
    return list(_FACTORIES)
