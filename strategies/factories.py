"""Creates the built-in strategies.

To add a strategy, write a function here and list it in `registry.py`.
"""

import os
from collections.abc import Sequence

import tensorflow as tf

from strategies.cluster import find_cluster
from strategies.rendezvous import join_job
from strategies.serving import serve
from strategies.tpu import tpu


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
        raise ValueError(
            f"`devices` must be None for multi_worker_mirrored, which uses what is visible; "
            f"got {devices!r}"
        )
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
        raise ValueError(
            f"`devices` must be None for parameter_server, which uses what is visible; "
            f"got {devices!r}"
        )
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
