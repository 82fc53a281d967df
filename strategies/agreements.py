"""The two things replicas must agree on in a step: the sum of their gradients, and the verdict."""

from typing import Any

import tensorflow as tf

from strategies.capabilities import has_workers
from strategies.checks import check_strategy


def sum_gradients(gradients: Any) -> Any:
    """Returns the sum over all replicas, on every replica. One all-reduce for the whole structure.

    Call it in replica context (inside `strategy.run`), on every replica, and outside any
    branch that a replica could take alone.

    Args:
        gradients: any structure of float or int32 tensors; None and `tf.IndexedSlices`
            survive, the latter with the rows of all replicas, so an index may occur
            several times.

    Returns:
        The same structure, shapes and dtypes.

    Raises:
        RuntimeError: if called in cross-replica context.
        TypeError: if something in it is no number.

    Example:
        >>> @tf.function
        ... def total(strategy):
        ...     def replica():
        ...         index = tf.distribute.get_replica_context().replica_id_in_sync_group
        ...         return sum_gradients([tf.cast(index, tf.float32) + 1.0, None])[0]
        ...     return strategy.experimental_local_results(strategy.run(replica))
        >>> mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"],
        ...     cross_device_ops=tf.distribute.ReductionToOneDevice())
        >>> [float(result) for result in total(mirrored)]
        [3.0, 3.0]
    """
    context = _replica_context("sum_gradients")
    flat = tf.nest.flatten(gradients)
    present = [leaf for leaf in flat if leaf is not None]
    _check_numbers(present)
    if context.num_replicas_in_sync == 1:
        return gradients
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, present) if present else [])
    return tf.nest.pack_sequence_as(
        gradients, [None if leaf is None else next(sums) for leaf in flat]
    )


def agree(flag: tf.Tensor | bool) -> tf.Tensor:
    """Returns, on every replica, whether `flag` is true on all of them.

    Call it in replica context (inside `strategy.run`), on every replica, and outside any
    branch that a replica could take alone. It costs an all-reduce of one number; to spare
    it, send the count of replicas that say no along with `sum_gradients`.

    Args:
        flag: shape (), bool: for instance `scaling.all_finite(gradients)`.

    Returns:
        Shape (), bool: the same on every replica.

    Raises:
        RuntimeError: if called in cross-replica context.
        TypeError, ValueError: if `flag` is not one bool.

    Example:
        >>> bool(agree(tf.constant(True)))
        True
    """
    flag = tf.convert_to_tensor(flag)
    if flag.dtype != tf.bool:
        raise TypeError(
            f"`flag` must be a bool; got {flag.dtype.name}. It is this replica's answer. Pass for "
            "instance scaling.all_finite(gradients)."
        )
    if flag.shape.rank not in (0, None):
        raise ValueError(
            f"`flag` must be a scalar; got shape {tuple(flag.shape)}. Each replica gives one "
            "answer. Pass for instance scaling.all_finite(gradients)."
        )
    against = sum_gradients(tf.cast(~flag, tf.float32))
    # The count is compared with 0, never with 1: two replicas may say no at once.
    return tf.equal(against, 0.0)


def any_worker(flag: bool | tf.Tensor, strategy: tf.distribute.Strategy) -> Any:
    """Returns, on every worker, whether `flag` is true on any of them. Waits for all.

    Call it on every worker, in cross-replica context. Where there is one worker it costs nothing.

    Args:
        flag: this worker's: a bool, or in a graph a tensor of one.
        strategy: whose workers.

    Returns:
        A bool for a bool, and a tensor of shape () for a tensor.

    Raises:
        TypeError: if one is none.

    Example:
        >>> any_worker(True, tf.distribute.get_strategy())
        True
    """
    is_tensor = isinstance(flag, tf.Tensor) and flag.dtype == tf.bool
    if not is_tensor and flag not in (True, False):
        raise TypeError(
            f"`flag` must be True or False; got {flag!r}. It is this worker's answer. Pass a bool."
        )
    check_strategy(strategy, "It knows the workers.")
    if not has_workers(strategy):
        return flag
    # Within the replica, which gives the number the device that the sum is taken on.
    total = strategy.run(lambda: sum_gradients(tf.cast(flag, tf.float32)))
    answer = strategy.experimental_local_results(total)[0] > 0
    return answer if is_tensor else bool(answer)


def from_chief(number: int, strategy: tf.distribute.Strategy) -> int:
    """Returns, on every worker, the number that the chief has brought. Waits for all.

    Call it outside any graph, on every worker.

    Args:
        number: this worker's; the chief's counts.
        strategy: whose workers.

    Raises:
        TypeError: if one is none.

    Example:
        >>> from_chief(7, tf.distribute.get_strategy())
        7
    """
    if not isinstance(number, int):
        raise TypeError(
            f"`number` must be an int; got {number!r}. The chief's is told to all workers. Pass "
            "for instance a step."
        )
    check_strategy(strategy, "It knows the workers.")
    if not has_workers(strategy):
        return number

    def brought() -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return sum_gradients(tf.where(replica == 0, tf.constant(number, tf.int64), 0))

    return int(strategy.experimental_local_results(strategy.run(brought))[0])


def _replica_context(caller: str) -> tf.distribute.ReplicaContext:
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError(
            f"`{caller}` must be called in replica context; got cross-replica context. "
            "Each replica brings its own value. Call it inside the function given to "
            "strategy.run()."
        )
    return context


def _check_numbers(tensors: list[Any]) -> None:
    """Refuses what cannot be summed."""
    for tensor in tensors:
        dtype = tf.as_dtype(getattr(tensor, "dtype", type(tensor)))
        if not (dtype.is_floating or dtype.is_integer):
            raise TypeError(
                f"`gradients` must be of floats or integers; got {dtype.name}. Replicas add them "
                "up. Use agree() for a bool."
            )
