"""Agreement among replicas and workers: sums of gradients, verdicts and decisions to stop."""

from typing import Any, TypeVar, cast

import tensorflow as tf

from strategies.capabilities import capabilities

REDUCE_DTYPES = ("float16", "bfloat16")  # in which gradients may be summed, besides their own
Structure = TypeVar("Structure")  # any structure of tensors, None and tf.IndexedSlices
Flag = TypeVar("Flag", bound=bool | tf.Tensor)


def sum_gradients(
    gradients: Structure, dtype: str | None = None, bucket_bytes: int | None = None
) -> Structure:
    """Sums each tensor over all replicas, with one all-reduce for all tensors.

    Every replica gets the sums. Call this function in replica context (inside `strategy.run`), on
    every replica, and outside any branch that only some replicas might take.

    Args:
        gradients: any structure of float or integer tensors. None and `tf.IndexedSlices` are
            allowed. The sum of `tf.IndexedSlices` has the rows of all replicas, so an index can
            occur several times. It is dense where the number of rows is not known when the function
            is traced and replicas exchange tensors of one shape only
            (`Capabilities.one_shape`).
        dtype: the dtype in which floats are sent and summed: "float16" or "bfloat16", with half the
            bytes of float32 and less range and precision. A value or a sum beyond the dtype's
            range becomes inf. None sums each tensor in its own dtype. With one replica nothing is
            sent, and the gradients are returned unchanged.
        bucket_bytes: the size from which on a bucket of tensors is full. Each bucket has an
            all-reduce of its own, beginning with the last tensors, so that the sum of the first
            bucket need not wait for the tensors of the others. None puts all of them into one.
            Strategies whose sums are computed on one device, as on several CPU devices of one
            process, have no buckets.

    Returns:
        The same structure, shapes and dtypes.

    Raises:
        ValueError: for another `dtype`, in which gradients would lose their fractions.

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
    if dtype not in (None, *REDUCE_DTYPES):
        raise ValueError(f'`dtype` must be "float16", "bfloat16" or None; got {dtype!r}')
    context = tf.distribute.get_replica_context()
    flat = tf.nest.flatten(gradients)
    present = [
        leaf if isinstance(leaf, tf.IndexedSlices) else tf.convert_to_tensor(leaf)
        for leaf in flat
        if leaf is not None
    ]
    if context.num_replicas_in_sync == 1:
        return gradients
    one_shape = capabilities(context.strategy).one_shape
    sent = [_as_sent(_of_one_shape(leaf) if one_shape else leaf, dtype) for leaf in present]
    buckets = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=bucket_bytes or 0)
    total = tf.distribute.ReduceOp.SUM
    sums = iter(context.all_reduce(total, sent, options=buckets) if sent else [])
    own = iter(present)
    summed = [None if leaf is None else _as_dtype(next(sums), next(own).dtype) for leaf in flat]
    return cast("Structure", tf.nest.pack_sequence_as(gradients, summed))


def agree(flag: tf.Tensor | bool) -> tf.Tensor:
    """Returns, on every replica, whether `flag` is true on all replicas.

    Call it in replica context (inside `strategy.run`), on every replica, and outside any branch
    that only some replicas might take. It costs an all-reduce of one number. To save
    this, sum the flag with the gradients: pass `sum_gradients` 1.0 from each replica whose flag is
    false and 0.0 from the others, and compare the sum with 0.

    Args:
        flag: this replica's flag: shape (), bool; for instance `scaling.all_finite(gradients)`.

    Returns:
        Shape (), bool: the same on every replica.

    Example:
        >>> bool(agree(tf.constant(True)))
        True
    """
    flag = tf.convert_to_tensor(flag, tf.bool)
    against = sum_gradients(tf.cast(~flag, tf.float32))
    # Compare with 0 and not with 1, because several replicas can vote no at once.
    return tf.equal(against, 0.0)


def any_worker(flag: Flag, strategy: tf.distribute.Strategy) -> Flag:
    """Returns, on every worker, whether `flag` is true on any worker. Waits for all workers.

    Call it on every worker, in cross-replica context. With a single worker it costs nothing.

    Args:
        flag: this worker's flag: a bool, or a tensor of shape (), bool, inside a graph.
        strategy: the strategy that the workers run under.

    Returns:
        A bool if `flag` is a bool; otherwise a tensor of shape (), bool.

    Example:
        >>> any_worker(True, tf.distribute.get_strategy())
        True
    """
    if not capabilities(strategy).multi_worker:
        return flag
    # The cast is done in replica context to place the number on the device that sums it.
    total = strategy.run(lambda: sum_gradients(tf.cast(flag, tf.float32)))
    answer = strategy.experimental_local_results(total)[0] > 0
    return cast("Flag", answer if tf.is_tensor(flag) else bool(answer))


def from_chief(number: int, strategy: tf.distribute.Strategy) -> int:
    """Returns, on every worker, the number that the chief passed. Waits for all workers.

    Call it on every worker, eagerly (outside any `tf.function`).

    Args:
        number: an int of at most 63 bits. Only the chief's value is used.
        strategy: the strategy that the workers run under.

    Example:
        >>> from_chief(7, tf.distribute.get_strategy())
        7
    """
    if not capabilities(strategy).multi_worker:
        return number

    def chief_value_or_zero() -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return sum_gradients(tf.where(replica == 0, tf.constant(number, tf.int64), 0))

    return int(strategy.experimental_local_results(strategy.run(chief_value_or_zero))[0])


def _of_one_shape(leaf: Any) -> Any:
    """Returns `tf.IndexedSlices` with any number of rows as a tensor; anything else unchanged.

    Those that do not tell their dense shape stay as they are.
    """
    if not isinstance(leaf, tf.IndexedSlices) or leaf.dense_shape is None:
        return leaf
    if leaf.values.shape[0] is not None:
        return leaf
    return tf.math.unsorted_segment_sum(leaf.values, leaf.indices, leaf.dense_shape[0])


def _as_sent(leaf: Any, dtype: Any) -> Any:
    """Returns a tensor or `tf.IndexedSlices` in the dtype that is summed.

    TensorFlow keeps int32 on the host, and sums no tensors there together with others.

    Args:
        leaf: the tensor.
        dtype: the dtype in which floats are summed; None for their own.
    """
    if leaf.dtype == tf.int32:
        return _as_dtype(leaf, tf.int64)
    return _as_dtype(leaf, dtype) if dtype and leaf.dtype.is_floating else leaf


def _as_dtype(leaf: Any, dtype: Any) -> Any:
    """Returns a tensor or `tf.IndexedSlices` cast to a dtype."""
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(leaf.values, dtype), leaf.indices, leaf.dense_shape)
    return tf.cast(leaf, dtype)
