"""Strategies by name: how each is made. `create` makes one, and `register` adds one of your own.

To add a strategy to this package, write a function here and add its name to `_FACTORIES`.
"""

import os
from collections.abc import Callable, Sequence

import tensorflow as tf

from strategies.cluster import find_cluster
from strategies.job import join_job, serve
from strategies.tpu import tpu

# Takes the caller's device names, or None, in which case the factory chooses the devices.
Factory = Callable[[Sequence[str] | None], tf.distribute.Strategy]


def default(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """Returns TensorFlow's default strategy: one replica, operations placed by TensorFlow."""
    if devices is not None:
        raise ValueError(f"`devices` must be None for default; got {devices!r}")
    return tf.distribute.get_strategy()


def one_device(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """Returns a strategy on one device: the given one, or the first GPU, or the CPU."""
    chosen = devices if devices is not None else _all_devices()[:1]
    if len(chosen) != 1:
        raise ValueError(f"`devices` must name one device for one_device; got {devices!r}")
    return tf.distribute.OneDeviceStrategy(chosen[0])


def mirrored(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """Returns a strategy with a replica on each of the given devices, or on every local device.

    On CPU devices, all sums are computed on one device. TensorFlow's default on CPUs is a
    collective with a fixed group key, which fails if two strategies in one process have different
    numbers of replicas. The alternative, TensorFlow's hierarchical copy, returned 2 for the sum of
    three ones.
    """
    named = devices if devices is not None else _all_devices()
    chosen = [_canonical(device) for device in named]
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"`devices` must name each device once; got {devices!r}")
    on_cpu = all("CPU" in device.upper() for device in chosen)
    sums = tf.distribute.ReductionToOneDevice(accumulation_fn=_sum_in_order) if on_cpu else None
    return tf.distribute.MirroredStrategy(chosen, cross_device_ops=sums)


def _sum_in_order(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a sum whose bits depend only on the values.

    `tf.add_n` starts with a value whose memory it can reuse, so its order depends on what else
    uses the values, and TensorFlow's optimizer rewrites a chain of additions as `tf.add_n`. With
    three or more values, the order can change the rounding.
    """
    return tf.add_n(values) if len(values) < 3 else tf.reduce_sum(tf.stack(values), axis=0)


def multi_worker_mirrored(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """Returns a strategy with replicas on the devices of several processes.

    Every process of the job must call this before anything else uses TensorFlow's devices. It
    waits until all processes have started. Later calls return the same strategy.
    """
    if devices is not None:
        raise ValueError(f"`devices` must be None for multi_worker_mirrored; got {devices!r}")
    cluster = find_cluster()
    if cluster is None:
        raise ValueError(
            "found no job for multi_worker_mirrored: set TF_CONFIG, or start all workers with "
            "python -m strategies.launch"
        )
    return join_job(cluster, tf.distribute.MultiWorkerMirroredStrategy)


def parameter_server(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """Returns a strategy with parameter servers, whose workers do not wait for each other.

    The call returns only in the job's chief, which sends steps to the workers. In a worker or a
    parameter server it never returns: the process serves the chief, and ends with it. Later calls
    return the same strategy.
    """
    if devices is not None:
        raise ValueError(f"`devices` must be None for parameter_server; got {devices!r}")
    cluster = find_cluster()
    kinds = cluster.cluster_spec().jobs if cluster else []
    if cluster is None or not {"chief", "ps", "worker"} <= {*kinds}:
        raise ValueError(
            f"found no job for parameter_server: it needs a chief, a ps and a worker; got "
            f"{', '.join(kinds) or 'none'}"
        )
    if cluster.task_type != "chief":
        serve(cluster)
    # Without this, the chief would wait for a lost worker instead of giving its step to another.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    return join_job(cluster, tf.distribute.ParameterServerStrategy)


def auto(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """Returns a strategy for a TPU, else for all GPUs, else for the CPU, and prints the choice.

    A TPU is used if `devices` or `TPU_NAME` gives its address or TensorFlow lists one. GPU memory
    is allocated as needed, not all at once.
    """
    gpus = tf.config.list_physical_devices("GPU")
    listed = bool(tf.config.list_physical_devices("TPU"))
    if devices or "TPU_NAME" in os.environ or listed:
        found, reason = tpu(devices), "found a TPU"
    elif gpus:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, enable=True)
        found = mirrored(None) if len(gpus) > 1 else one_device(None)
        reason = f"found {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} and no TPU"
    else:
        found, reason = default(None), "found no TPU and no GPU"
    # Printed at any log level, because the caller has left the choice to this function.
    print(f"strategy: {type(found).__name__.lstrip('_')} ({reason})", flush=True)  # noqa: T201
    return found


_FACTORIES: dict[str, Factory] = {
    "default": default,
    "one_device": one_device,
    "mirrored": mirrored,
    "multi_worker_mirrored": multi_worker_mirrored,
    "parameter_server": parameter_server,
    "tpu": tpu,
    "auto": auto,
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
        name: the new name; a strategy of the same name is replaced.
        factory: a function of `devices` (a list of names, or None) that returns a new
            `tf.distribute.Strategy`.

    Example:
        >>> register("last_cpu", lambda devices: tf.distribute.OneDeviceStrategy("CPU:1"))
        >>> create("last_cpu").num_replicas_in_sync
        1
    """
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


def split_cpu(count: int) -> None:
    """Divides the CPU into logical devices, to run several replicas without a GPU.

    Args:
        count: number of logical CPU devices.

    Raises:
        RuntimeError: if TensorFlow has already initialized its devices with another number.

    Example:
        >>> split_cpu(4)
        >>> [device.name for device in tf.config.list_logical_devices("CPU")][-1]
        '/device:CPU:3'
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )
    except RuntimeError as error:
        found = len(tf.config.list_logical_devices("CPU"))
        if found != count:
            raise RuntimeError(
                f"`count` must be {found} once TensorFlow has used a device; got {count}"
            ) from error


def _canonical(device: str) -> str:
    """Returns one spelling of a device's name.

    Example:
        >>> _canonical("/job:localhost/device:cpu:0"), _canonical("CPU"), _canonical("cpu:00")
        ('CPU:0', 'CPU:0', 'CPU:0')
    """
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type is None or spec.job not in (None, "localhost"):
        return device
    return f"{spec.device_type.upper()}:{spec.device_index or 0}"


def _all_devices() -> list[str]:
    """Returns the short names of all GPUs or, if there are none, of all logical CPU devices."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name.removeprefix("/device:") for device in devices]
