"""The properties of a strategy that a training step depends on, and this process's role in it."""

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The properties of a strategy that decide how a step is built."""

    num_replicas: int  # replicas that take each step together; their gradients are summed
    asynchronous: bool  # parameter servers: workers take steps without waiting for each other
    multi_worker: bool  # other processes take the same steps as this one
    # TPU: a step is one program per replica, which must decide whether to apply the update. Other
    # strategies allow no collectives inside a condition in a replica, so it is decided outside.
    decides_in_replica: bool
    is_chief: bool  # this process writes files and prints; exactly one process of a job does
    on_cpu: bool  # all replicas compute on CPU devices
    # Replicas exchange tensors by collectives: in a graph, each of them takes tensors of one shape.
    one_shape: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the replicas compute on GPUs, not on CPUs or a TPU."""
        return not (self.on_cpu or self.decides_in_replica)

    @property
    def several_processes(self) -> bool:
        """Whether other processes take steps: workers, or those of parameter servers."""
        return self.multi_worker or self.asynchronous


def capabilities(strategy: tf.distribute.Strategy) -> Capabilities:
    """Returns the properties of a strategy, as plain Python values.

    Runs nothing, initializes no device and does not wait for other processes.

    Args:
        strategy: the strategy to describe.

    Example:
        >>> found = capabilities(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
        >>> found.num_replicas, found.on_cpu, found.is_chief
        (2, True, True)
        >>> found.asynchronous, found.multi_worker, found.decides_in_replica
        (False, False, False)
    """
    return Capabilities(
        num_replicas=int(strategy.num_replicas_in_sync),
        asynchronous=isinstance(strategy, tf.distribute.ParameterServerStrategy),
        multi_worker=isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy),
        decides_in_replica=isinstance(strategy, tf.distribute.TPUStrategy),
        is_chief=bool(strategy.extended.should_checkpoint),
        on_cpu=_on_cpu(strategy),
        one_shape=_exchanges_one_shape(strategy),
    )


def _exchanges_one_shape(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether replicas exchange tensors by collectives, which take one shape only.

    Such an operation of TensorFlow remembers the shape that it is first called with. With another
    shape it fails, and so does every one after it. Replicas of one process exchange by collectives
    on GPUs, and on CPUs if a `MirroredStrategy` was created without `cross_device_ops`.
    """
    workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    # Private, because no public name tells it; other strategies do not have it.
    sums = getattr(strategy.extended, "_cross_device_ops", None)
    by_collectives = workers or type(sums).__name__ == "CollectiveAllReduce"
    return strategy.num_replicas_in_sync > 1 and by_collectives


def _on_cpu(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether all replicas compute on CPU devices.

    The default strategy lets TensorFlow place operations: on a GPU if one is visible.
    """
    try:
        devices = strategy.extended.worker_devices
    except RuntimeError:  # the default strategy
        # Do not list the logical devices: that would initialize all devices.
        return not tf.config.get_visible_devices("GPU")
    return all("CPU" in device.upper() for device in devices)
