"""How a global batch is divided over replicas and microbatches. No other file divides one.

A global batch of B examples is cut into `parts` contiguous shares whose sizes differ by at
most one, the larger ones first; each replica's share is cut into microbatches the same way.
Nothing is padded and nothing dropped: a short last batch gives shorter shares. Only a share
that would be empty is given one example, the batch's last, which its taker counts as none.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from strategies.checks import check_count, static_shape


class Share(NamedTuple):
    """One part of a batch."""

    batch: Any  # the batch's structure; first dimension: max(examples, 1)
    weights: tf.Tensor  # shape=(max(examples, 1),), float32: all 0 in an empty share
    examples: tf.Tensor  # shape=(), int32: how many of the rows count


def whole(batch: Any, weights: tf.Tensor) -> Share:
    """Returns the global batch as one share.

    Args:
        batch: any structure of tensors whose first dimension is the example.
        weights: shape (global_batch,), float32: the weight of each example's loss.

    Raises:
        ValueError: if the shapes say that these are not as many weights as examples.

    Example:
        >>> int(whole({"x": tf.zeros([5, 3])}, tf.ones([5])).examples)
        5
    """
    shape = static_shape(weights)
    if shape.rank not in (1, None):
        raise ValueError(
            f"`weights` must have one dimension; got shape {tuple(shape)}. There is a weight for "
            "each example. Pass for instance tf.ones([global_batch])."
        )
    for tensor in tf.nest.flatten(batch):
        found = static_shape(tensor)
        if not found[:1].is_compatible_with(shape):
            raise ValueError(
                "`batch` must have as many examples as there are weights; got shapes "
                f"{tuple(found)} and {tuple(shape)}. The first dimension is the example. Cut them "
                "to the same length."
            )
    rows = shape[:1].num_elements()
    return Share(batch, weights, tf.shape(weights)[0] if rows is None else tf.constant(rows))


def take(share: Share, index: int | tf.Tensor, parts: int) -> Share:
    """Returns part `index` of `parts` of a share.

    Args:
        share: what to divide.
        index: which part, from 0 to parts - 1; an int or an int32 tensor, shape ().
        parts: into how many parts; with 1, the share comes back as it is.

    Returns:
        The part's rows. If there are none, one row that repeats a real example with weight 0.

    Raises:
        TypeError: if `share` is none.
        ValueError: if there is no part of that number.

    Example:
        >>> share = whole(tf.range(7), tf.ones([7]))
        >>> [take(share, index, 3).batch.numpy().tolist() for index in range(3)]
        [[0, 1, 2], [3, 4], [5, 6]]
        >>> last = take(whole(tf.range(2), tf.ones([2])), 2, 3)
        >>> last.batch.numpy().tolist(), last.weights.numpy().tolist(), int(last.examples)
        ([1], [0.0], 0)
    """
    if not isinstance(share, Share):
        raise TypeError(
            f"`share` must be a Share; got {type(share).__name__}. It knows how many of its rows "
            "count. Pass strategies.whole(batch, weights), or a part of it."
        )
    check_count("parts", parts, "The share is cut into so many.")
    if not tf.is_tensor(index) and index not in range(parts):
        raise ValueError(
            f"`index` must be an int below parts = {parts}, or a tensor of one; got {index!r}. "
            "Parts are counted from 0. Pass the replica's number, or the microbatch's."
        )
    if parts == 1:
        return share
    known = tf.get_static_value(share.examples)
    if known and known % parts == 0:
        return _equal_part(share, index, int(known) // parts)
    size, larger = share.examples // parts, share.examples % parts
    start = index * size + tf.minimum(index, larger)
    examples = size + tf.cast(index < larger, tf.int32)
    # Zeros in place of a missing example can turn into NaN gradients; a real one cannot.
    rows = tf.shape(share.weights)[0]
    start = tf.minimum(start, rows - 1)
    stop = start + tf.maximum(examples, 1)
    return Share(
        batch=tf.nest.map_structure(lambda tensor: tensor[start:stop], share.batch),
        weights=tf.where(examples > 0, share.weights[start:stop], 0.0),
        examples=examples,
    )


def _equal_part(share: Share, index: int | tf.Tensor, size: int) -> Share:
    """Returns a part whose size is known before it runs, as XLA, and so a TPU, asks."""

    def cut(tensor: Any) -> Any:
        if not isinstance(tensor, tf.Tensor):  # ragged, say
            return tensor[index * size : (index + 1) * size]
        others = tensor.shape.rank - 1
        return tf.slice(tensor, [index * size, *[0] * others], [size, *[-1] * others])

    return Share(tf.nest.map_structure(cut, share.batch), cut(share.weights), tf.constant(size))


def check_divisible(global_batch: int, num_replicas: int, num_microbatches: int) -> None:
    """Refuses a nominal global batch that leaves a microbatch without an example.

    Raises:
        ValueError: if there are fewer examples than replicas x microbatches, or one is no int of
            at least 1.

    Example:
        >>> check_divisible(64, num_replicas=2, num_microbatches=4)
    """
    check_count("global_batch", global_batch, "It counts examples.")
    check_count("num_replicas", num_replicas, "It counts the batch's shares.")
    check_count("num_microbatches", num_microbatches, "It counts the parts of each share.")
    if global_batch < num_replicas * num_microbatches:
        raise ValueError(
            f"`global_batch` must be at least replicas x microbatches = {num_replicas} x "
            f"{num_microbatches}; got {global_batch}. Some microbatch would be empty on every "
            "step. Use a larger batch, or fewer replicas or microbatches."
        )
