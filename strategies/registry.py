"""Strategies by name: `create` makes one, and `register` adds one of your own."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from strategies import factories, tpu

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
        ValueError: if `name` is not registered, the strategy cannot use `devices`, or a device, its
            TPU or its job is not found.

    Example:
        >>> from strategies import split_cpu
        >>> split_cpu(4)  # a CPU is one device unless it is split
        >>> create("mirrored", devices=["CPU:0", "CPU:1"]).num_replicas_in_sync
        2
    """
    if name not in _FACTORIES:
        raise ValueError(f"`strategy` must be one of {', '.join(names())}; got {name!r}")
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
        ValueError: if a strategy of that name is already registered.

    Example:
        >>> register("last_cpu", lambda devices: tf.distribute.OneDeviceStrategy("CPU:1"))
        >>> create("last_cpu").num_replicas_in_sync
        1
    """
    if name in _FACTORIES:
        raise ValueError(f"`name` must be new; got {name!r}")
    _FACTORIES[name] = factory


def names() -> list[str]:
    """Returns the names that `create` accepts, in order of registration.

    Example:
        >>> names()[:3]
        ['default', 'one_device', 'mirrored']
    """
    return list(_FACTORIES)


def check_devices(strategy: tf.distribute.Strategy) -> None:
    """Raises an error if a replica's device is not one of this process.

    TensorFlow would place the operations of a single missing GPU on the CPU without a word, and
    would wait forever for several. Devices of other processes are not looked for, nor TPUs, which
    TensorFlow lists when it connects to them.

    Args:
        strategy: the strategy to check. Its devices are initialized.

    Raises:
        ValueError: if a device is missing.

    Example:
        >>> check_devices(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    """
    try:
        devices = strategy.extended.worker_devices
    except RuntimeError:  # TensorFlow's default strategy has no devices
        return
    local = [name_of(device) for device in devices if device.startswith("/job:localhost/")]
    present = [name_of(device.name) for device in tf.config.list_logical_devices()]
    missing = [each for each in local if each not in present and not each.startswith("TPU")]
    if missing:
        raise ValueError(f"`strategy` must use devices of {', '.join(present)}; got {missing[0]}")


def name_of(device: str) -> str:
    """Returns the short name of a device.

    Example:
        >>> name_of("/job:localhost/replica:0/task:0/device:GPU:1")
        'GPU:1'
    """
    return device.rpartition("/device:")[2]
