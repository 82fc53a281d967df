"""How each strategy of ours is made. A new one is a function here and a line in `registry.py`."""

import os
from collections.abc import Iterable, Sequence

import tensorflow as tf

from strategies.checks import check_count
from strategies.cluster import find_cluster
from strategies.gather import gather
from strategies.tpu import tpu


def default(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """TensorFlow's default: no distribution, and TensorFlow places each operation."""
    if devices is not None:
        raise ValueError(
            f"`devices` must be None for the default strategy; got {devices!r}. It leaves the "
            'placing to TensorFlow. Use "one_device" or "mirrored" to choose devices.'
        )
    return tf.distribute.get_strategy()


def one_device(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """Everything on one device: the one named, or else the first GPU, or else the CPU."""
    chosen = _named(devices) if devices is not None else _available()[:1]
    if len(chosen) != 1:
        raise ValueError(
            f"`devices` must name one device for one_device; got {devices!r}. Every variable and "
            'operation is placed on it. Name one, or use "mirrored" for several.'
        )
    return tf.distribute.OneDeviceStrategy(chosen[0])


def mirrored(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """A copy of the model on each device of this machine, kept in step.

    On CPU devices the sums are taken on one of them: TensorFlow's own choice there, a
    collective under one group key, fails as soon as a second number of replicas is used in
    the same process, and its hierarchical copy returned 2 for the sum of three ones.
    """
    chosen = _named(devices) if devices is not None else _available()
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(
            f"`devices` must name each device once, and at least one; got {devices!r}. Each "
            'replica needs a device of its own. Name for instance ["GPU:0", "GPU:1"].'
        )
    on_cpu = all("CPU" in device.upper() for device in chosen)
    sums = tf.distribute.ReductionToOneDevice(accumulation_fn=_sum_in_order) if on_cpu else None
    return tf.distribute.MirroredStrategy(chosen, cross_device_ops=sums)


def _sum_in_order(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a sum whose bits depend on nothing but the values.

    `tf.add_n` begins with a value that nobody else holds at that moment, and TensorFlow makes
    one of a row of additions. Of three numbers, another order is another rounding.
    """
    return tf.add_n(values) if len(values) < 3 else tf.reduce_sum(tf.stack(values), axis=0)


def multi_worker_mirrored(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """A copy of the model on each device of several machines, kept in step.

    Every process of the job makes it, at its start, and waits there for the others.
    """
    if devices is not None:
        raise ValueError(
            f"`devices` must be None for multi_worker_mirrored; got {devices!r}. Each process uses "
            "all its GPUs, or else its CPU. Set CUDA_VISIBLE_DEVICES to choose some."
        )
    cluster = find_cluster()
    if cluster is None:
        raise ValueError(
            "`strategy` must not be multi_worker_mirrored without a job; got no TF_CONFIG, no "
            "step of Slurm's and no HALFSTEP_WORKER_PODS. The processes could not find each other. "
            'Start them with python -m strategies.launch --workers=2, or use "mirrored".'
        )
    tasks = cluster.cluster_spec().as_dict()
    addresses = {
        f"{kind} {index}": address
        for kind in sorted(tasks)
        for index, address in enumerate(tasks[kind])
    }
    gather(addresses, f"{cluster.task_type} {cluster.task_id}")
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=cluster)


def parameter_server(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """The variables on servers; workers who take steps without waiting for each other.

    The job's chief makes the strategy and says what is to be done. In a worker or a server this
    never returns: the process does what it is told until it is ended.
    """
    if devices is not None:
        raise ValueError(
            f"`devices` must be None for parameter_server; got {devices!r}. Each worker computes "
            "on what it has. Set CUDA_VISIBLE_DEVICES to choose some."
        )
    cluster = find_cluster()
    kinds = cluster.cluster_spec().jobs if cluster else []
    if cluster is None or not {"chief", "ps", "worker"} <= {*kinds}:
        raise ValueError(
            "`strategy` must not be parameter_server without a job of a chief, workers and "
            f"servers (ps); got {', '.join(kinds) or 'none'}. The chief could not find the others. "
            "Start them with python -m strategies.launch --workers=2 --ps=1, or set TF_CONFIG."
        )
    if cluster.task_type != "chief":
        server = tf.distribute.Server(
            cluster.cluster_spec(),
            job_name=cluster.task_type,
            task_index=cluster.task_id,
            protocol=cluster.rpc_layer or "grpc",
        )
        server.join()
    # Or the chief would wait for a worker that has gone, instead of giving its step to another.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    return tf.distribute.ParameterServerStrategy(cluster)


def auto(devices: Sequence[str] | None) -> tf.distribute.Strategy:
    """What there is: a TPU, or else the GPUs, or else the CPU. Says what it takes, and why.

    GPUs take memory as they need it, not all of it at once. A TPU is looked for where
    `devices` or `TPU_NAME` says that there is one, or TensorFlow lists it.
    """
    gpus = tf.config.list_physical_devices("GPU")
    listed = bool(tf.config.list_physical_devices("TPU"))
    if devices or "TPU_NAME" in os.environ or listed:
        found, why = tpu(devices), "there is a TPU"
    elif gpus:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, enable=True)
        found = mirrored(None) if len(gpus) > 1 else one_device(None)
        why = f"there is no TPU, and {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"
    else:
        found, why = default(None), "there is neither a TPU nor a GPU"
    # Whoever has left the choice to us wants to know it, whatever is logged.
    print(f"strategy: {type(found).__name__.lstrip('_')}: {why}", flush=True)  # noqa: T201
    return found


def split_cpu(count: int) -> None:
    """Divides the CPU into logical devices, on which replicas can be tried without a GPU.

    Args:
        count: how many logical CPU devices there shall be.

    Raises:
        ValueError: if it is no int of at least 1.
        RuntimeError: if TensorFlow has started already with another number; it cannot be
            changed then.

    Example:
        >>> split_cpu(4)
        >>> [device.name for device in tf.config.list_logical_devices("CPU")][-1]
        '/device:CPU:3'
    """
    check_count("count", count, "It counts devices.")
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )
    except RuntimeError as error:
        found = len(tf.config.list_logical_devices("CPU"))
        if found != count:
            raise RuntimeError(
                f"`count` must be {found} by now; got {count}. TensorFlow has started with {found} "
                "logical CPU devices and cannot change that. Call split_cpu() before anything "
                "touches a device."
            ) from error


def _named(devices: Sequence[str]) -> list[str]:
    """Returns the devices a caller named; one name alone would be taken for its letters."""
    if isinstance(devices, str):
        raise TypeError(
            f"`devices` must be a list of names; got the string {devices!r}. Each item is a "
            f"device. Pass [{devices!r}]."
        )
    if not isinstance(devices, Iterable):
        raise TypeError(
            f"`devices` must be a list of names; got {devices!r}. Each item is a device. Pass for "
            'instance ["GPU:0", "GPU:1"].'
        )
    return list(devices)


def _available() -> list[str]:
    """Returns every GPU, or else every logical CPU device, by its short name."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name.removeprefix("/device:") for device in devices]
