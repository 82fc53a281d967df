"""Divides a global batch over replicas and microbatches. No other file divides a batch.

A global batch is cut into contiguous shares whose sizes differ by at most one, the larger ones
first. Each replica's share is cut into microbatches in the same way. Nothing is padded and nothing
is dropped: a short last batch gives shorter shares. A share that would be empty holds the last
example instead, with weight 0, and its `examples` field is 0.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

from strategies.capabilities import capabilities

# One component of a batch, of any dtype. None stays None in every part.
Leaf: TypeAlias = "tf.Tensor | tf.RaggedTensor | tf.SparseTensor | None"
# A batch in the structure of the user's data; the first dimension of every tensor counts examples.
Batch: TypeAlias = "Leaf | Mapping[str, Batch] | tuple[Batch, ...] | list[Batch]"
Tree = TypeVar("Tree")


class Share(NamedTuple):
    """One part of a batch."""

    batch: Batch  # same structure as the whole batch; first dimension: max(examples, 1)
    weights: tf.Tensor  # shape=(max(examples, 1), ...), float32: zeros in an empty share
    examples: tf.Tensor  # shape=(), int32: number of real examples; 0 in an empty share


def whole(batch: Batch, weights: tf.Tensor) -> Share:
    """Returns the global batch as one share.

    Args:
        batch: any structure of tensors whose first dimension counts examples. They may be ragged
            or sparse.
        weights: shape (global_batch,), float32: the weight of each example's loss; or shape
            (global_batch, ...) if an example has several losses, such as one per token. Integers
            and bools are cast.

    Example:
        >>> int(whole({"x": tf.zeros([5, 3])}, tf.ones([5])).examples)
        5
    """
    weights = tf.convert_to_tensor(weights)
    if weights.dtype.is_integer or weights.dtype.is_bool:
        weights = tf.cast(weights, tf.float32)
    rows = weights.shape[:1].num_elements()
    return Share(batch, weights, tf.shape(weights)[0] if rows is None else tf.constant(rows))


def take(share: Share, index: int | tf.Tensor, parts: int) -> Share:
    """Returns part `index` of `parts` of a share.

    Args:
        share: the share to divide.
        index: the part to return, from 0 to parts - 1: an int, or an int32 tensor of shape ().
        parts: number of parts. With 1, the share is returned unchanged, and its tensors may have
            any shapes.

    Returns:
        The rows of that part. An empty part holds one row, a real example with weight 0.

    Raises:
        ValueError: if static shapes show a tensor without a row for each weight.

    Example:
        >>> share = whole(tf.range(7), tf.ones([7]))
        >>> [take(share, index, 3).batch.numpy().tolist() for index in range(3)]
        [[0, 1, 2], [3, 4], [5, 6]]
        >>> last = take(whole(tf.range(2), tf.ones([2])), 2, 3)
        >>> last.batch.numpy().tolist(), last.weights.numpy().tolist(), int(last.examples)
        ([1], [0.0], 0)
    """
    if parts == 1:
        return share
    rows = static_shape(share.weights)[:1]
    if not all(static_shape(each)[:1].is_compatible_with(rows) for each in tensors_in(share.batch)):
        raise ValueError(
            f"`batch` must have one row per example in every tensor; got {shapes_in(share.batch)} "
            f"and {rows[0]} examples"
        )
    index = tf.cast(index, tf.int32) if tf.is_tensor(index) else int(index)  # as counts are
    known = tf.get_static_value(share.examples)
    if known and known % parts == 0:
        return _equal_part(share, index, int(known) // parts)
    size, larger = share.examples // parts, share.examples % parts
    start = first_row(share.examples, index, parts)
    examples = size + tf.cast(index < larger, tf.int32)
    # An empty part repeats a real example, because a row of zeros could give NaN gradients.
    rows = tf.shape(share.weights)[0]
    start = tf.minimum(start, rows - 1)
    stop = start + tf.maximum(examples, 1)
    return Share(
        batch=cut_rows(share.batch, start, stop),
        weights=tf.where(examples > 0, share.weights[start:stop], 0.0),
        examples=examples,
    )


def shares(batch: Batch, weights: tf.Tensor, strategy: tf.distribute.Strategy) -> Share:
    """Cuts a global batch into shares, of which `strategy.run` hands each replica its own.

    Call it in cross-replica context, and pass the result on in `args` of `strategy.run`; there,
    `own_share` returns the replica's share. The batch is cut on the host, so each accelerator is
    sent its own rows alone.

    Args:
        batch: as for `whole`.
        weights: as for `whole`.
        strategy: the strategy that runs the replicas.

    Example:
        >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> found = shares(tf.range(5), tf.ones([5]), strategy)
        >>> [rows.numpy().tolist() for rows in strategy.experimental_local_results(found.batch)]
        [[0, 1, 2], [3, 4]]
    """
    share, replicas = whole(batch, weights), strategy.num_replicas_in_sync
    # A TPU's program must know the number of its examples when it is compiled. Of what it is
    # handed it does not know that, so it is handed the whole batch and cuts its share itself.
    if replicas == 1 or capabilities(strategy).decides_in_replica:
        return share
    with tf.device("/device:CPU:0"):
        found: Share = strategy.experimental_distribute_values_from_function(
            lambda context: take(share, context.replica_id_in_sync_group, replicas)
        )
    return found


def own_share(share: Share) -> Share:
    """Returns a replica's share of what `shares` returned. Call it in replica context."""
    context = tf.distribute.get_replica_context()
    if not capabilities(context.strategy).decides_in_replica:
        return share
    return take(share, context.replica_id_in_sync_group, context.num_replicas_in_sync)


def first_row(examples: tf.Tensor, index: int | tf.Tensor, parts: int) -> tf.Tensor:
    """Returns where part `index` of `parts` begins among the examples: shape (), int32."""
    return index * (examples // parts) + tf.minimum(index, examples % parts)


def _equal_part(share: Share, index: int | tf.Tensor, size: int) -> Share:
    """Returns a part whose size is static, which XLA (and so a TPU) requires."""

    def cut(tensor: Leaf) -> Leaf:
        if not isinstance(tensor, tf.Tensor) or tensor.shape.rank is None:
            return cut_rows(tensor, index * size, (index + 1) * size)
        inner = tensor.shape.rank - 1  # number of dimensions that are not cut
        return tf.slice(tensor, [index * size, *[0] * inner], [size, *[-1] * inner])

    return Share(tf.nest.map_structure(cut, share.batch), cut(share.weights), tf.constant(size))


def static_shape(tensor: Any) -> tf.TensorShape:
    """Returns the static shape of a tensor; the shape of a Python number or other object is ()."""
    try:
        return tf.TensorShape(getattr(tensor, "shape", ()))
    except TypeError:  # something else has this name
        return tf.TensorShape(())


def cut_rows(tree: Tree, start: int | tf.Tensor, stop: int | tf.Tensor) -> Tree:
    """Returns the examples from `start` up to `stop` of every tensor in a structure.

    Args:
        tree: a structure of dense, ragged or sparse tensors, or None.
        start: the first example: shape (), int32.
        stop: the end of the examples, at most their number: shape (), int32.

    Example:
        >>> words = tf.ragged.constant([[1], [2, 3], []])
        >>> cut_rows((words, None), 1, 3)
        (<tf.RaggedTensor [[2, 3], []]>, None)
    """

    def cut(tensor: Leaf) -> Leaf:
        if tensor is None:
            return None
        if not isinstance(tensor, tf.SparseTensor):
            return tensor[start:stop]
        first = tf.one_hot(0, tensor.shape.rank, tf.cast(start, tf.int64), 0, dtype=tf.int64)
        size = tf.concat([[tf.cast(stop - start, tf.int64)], tensor.dense_shape[1:]], axis=0)
        part = tf.sparse.slice(tensor, first, size)
        # The dense shape is known to tf.sparse.slice only when it runs.
        return tf.SparseTensor(part.indices, part.values, size)

    cut_tree: Tree = tf.nest.map_structure(cut, tree)
    return cut_tree


def shapes_in(batch: Batch) -> Any:
    """Returns a batch's shapes in its structure, for errors.

    Example:
        >>> shapes_in({"nodes": tf.ones([5, 2]), "temperature": tf.ones([])})
        {'nodes': (5, 2), 'temperature': ()}
    """
    shapes = map(static_shape, tf.nest.flatten(batch))
    found = [None if shape.rank is None else tuple(shape) for shape in shapes]
    return tf.nest.pack_sequence_as(batch, found)


def tensors_in(batch: Batch) -> list[Any]:
    """Returns the tensors of a batch, in the order of `tf.nest.flatten`, without None."""
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]


def with_rows(batch: Batch) -> list[Any]:
    """Returns the tensors of a batch that are not scalars."""
    return [tensor for tensor in tensors_in(batch) if static_shape(tensor).rank != 0]


def known_examples(batch: Batch) -> int | None:
    """Returns the number of examples of a batch if a tensor's static shape shows it, or None."""
    found = (static_shape(tensor)[:1].num_elements() for tensor in with_rows(batch))
    return next((examples for examples in found if examples is not None), None)


def count_examples(batch: Batch) -> tf.Tensor:
    """Returns the number of examples of a batch, 1 if it holds scalars alone: shape (), int32."""
    known = known_examples(batch)
    tensors = with_rows(batch)
    if known is not None or not tensors:
        return tf.constant(1 if known is None else known)
    first = tensors[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    return tf.shape(first)[0]
