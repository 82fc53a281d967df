"""The properties of a strategy that a training step depends on, and this process's role in it."""

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The properties of a strategy that decide how a step is built."""

    num_replicas: int  # replicas that take each step together; their gradients are summed
    asynchronous: bool  # parameter servers: workers take steps without waiting for each other
    multi_worker: bool  # other processes take the same steps as this one
    decides_in_replica: bool  # TPU: each replica's program must decide whether to apply the update
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
        asynchronous=is_asynchronous(strategy),
        multi_worker=has_workers(strategy),
        decides_in_replica=decides_inside(strategy),
        is_chief=is_chief(strategy),
        on_cpu=_on_cpu(strategy),
        one_shape=exchanges_one_shape(strategy),
    )


def is_asynchronous(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether workers take steps without waiting for each other (parameter servers).

    Args:
        strategy: the strategy that the workers run under.

    Example:
        >>> is_asynchronous(tf.distribute.get_strategy())
        False
    """
    return isinstance(strategy, tf.distribute.ParameterServerStrategy)


def has_workers(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether other processes take the same steps as this one.

    Args:
        strategy: the strategy that the workers run under.

    Example:
        >>> has_workers(tf.distribute.get_strategy())
        False
    """
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def exchanges_one_shape(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether replicas exchange tensors by collectives, which take one shape only.

    Such an operation of TensorFlow remembers the shape that it is first called with. With another
    shape it fails, and so does every one after it. Replicas of one process exchange by collectives
    on GPUs, and on CPUs if a `MirroredStrategy` was created without `cross_device_ops`.

    Args:
        strategy: the strategy that the replicas run under.

    Example:
        >>> exchanges_one_shape(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
        True
    """
    workers = has_workers(strategy)
    # Private, because no public name tells it; other strategies do not have it.
    sums = getattr(strategy.extended, "_cross_device_ops", None)
    by_collectives = workers or type(sums).__name__ == "CollectiveAllReduce"
    return strategy.num_replicas_in_sync > 1 and by_collectives


def decides_inside(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether each replica's program must decide whether to apply the update.

    This is the case on a TPU, where a step is one program per replica, from its share of the
    batch to the update. The other strategies do not allow collectives inside a condition in a
    replica, so with them the decision is made in cross-replica context.

    Args:
        strategy: the strategy that the replicas run under.

    Example:
        >>> decides_inside(tf.distribute.get_strategy())
        False
    """
    return isinstance(strategy, tf.distribute.TPUStrategy)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether this process writes files and prints: exactly one process of a job does.

    Args:
        strategy: the strategy that the processes of the job run under.

    Example:
        >>> is_chief(tf.distribute.get_strategy())
        True
    """
    return bool(strategy.extended.should_checkpoint)


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
