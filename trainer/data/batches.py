"""What a user may hand in as data, turned into one `tf.data.Dataset` of global batches.

Every replica draws from the same pipeline and takes its own share of each batch (see
`strategies/division.py`), so one plain iterator serves all of them.
"""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.base.argument_checks import check_count
from trainer.base.autograph import without_autograph


@dataclasses.dataclass(frozen=True)
class Batches:
    """A dataset of global batches, and what is known of it before the first step."""

    dataset: tf.data.Dataset
    first: Any  # the first batch, read once: it proves that there is one, and builds models
    global_batch: int  # the number of examples in it: the nominal global batch
    steps_per_epoch: int | None  # None if the dataset cannot tell


def batches(
    data: Any,
    argument: str,
    strategy: tf.distribute.Strategy,
    global_batch: int | None = None,
    shuffle_seed: int | None = None,
) -> Batches:
    """Reads the data contract.

    Args:
        data: a `tf.data.Dataset` batched to the global batch; or a function of a
            `tf.distribute.InputContext` that returns one batched to
            `context.get_per_replica_batch_size(...)`; or arrays, in any structure, whose
            first dimension is the example. Its first batch is read once beforehand, so a
            source that can be read only once loses it.
        argument: what the caller's user calls it, for errors.
        strategy: whose replicas will share each batch.
        global_batch: the batch size for arrays; None for anything else.
        shuffle_seed: with arrays, shuffle the examples anew in every epoch; None keeps
            their order.

    Raises:
        TypeError, ValueError: if the data is none of these, is empty or is not batched.
    """
    if are_arrays(data):
        dataset = _from_arrays(data, argument, global_batch, shuffle_seed)
    elif global_batch is not None:
        raise ValueError(
            f"`global_batch` must be None unless `{argument}` is arrays; got {global_batch}. A "
            "dataset is batched already. Leave it out, or set it where the dataset is made."
        )
    else:
        is_dataset = isinstance(data, tf.data.Dataset)
        dataset = data if is_dataset else _from_function(data, argument, strategy)
    first = _first(dataset, argument)
    cardinality = int(dataset.cardinality())
    if are_arrays(data):
        cardinality = -(-len(tf.nest.flatten(data)[0]) // _examples(first, argument))
    return Batches(
        dataset=dataset,
        first=first,
        global_batch=_examples(first, argument),
        steps_per_epoch=cardinality if cardinality >= 0 else None,
    )


def are_arrays(data: Any) -> bool:
    """Returns whether data is arrays: neither a dataset nor a function."""
    return not isinstance(data, tf.data.Dataset) and not callable(data)


def same_data(before: Any, now: Any, global_batch: int, found: Batches) -> bool:
    """Returns whether data handed in are those that were handed in before: the same objects."""
    if not are_arrays(now):
        return before is now
    if are_arrays(before) and global_batch == found.global_batch:
        pairs = zip(tf.nest.flatten(before), tf.nest.flatten(now), strict=False)
        return len(tf.nest.flatten(before)) == len(tf.nest.flatten(now)) and all(
            one is other for one, other in pairs
        )
    return False


def check_ends(found: Batches, argument: str) -> None:
    """Raises ValueError if a data set to evaluate on never ends."""
    if int(found.dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"`{argument}` must end; got a dataset that repeats for ever. The whole of it is "
            "evaluated. Leave .repeat() out, or call .take(n)."
        )


def without_end(found: Batches) -> tf.data.Dataset:
    """Returns the dataset repeated for ever, with the next batches fetched ahead."""
    dataset = found.dataset
    if int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY:
        dataset = dataset.repeat()
    # Two, and not AUTOTUNE: what has been fetched is part of every checkpoint.
    return dataset.prefetch(2)


def steps_to_take(steps: Any, epochs: int | None, found: Batches) -> int:
    """Returns the step a run is to reach.

    Args:
        steps: that step itself, or None.
        epochs: the same in passes over the data, or None.
        found: the data.

    Raises:
        ValueError: unless exactly one of the two is given, at least 1, and epochs can be counted.
    """
    if (steps is None) == (epochs is None):
        raise ValueError(
            f"`steps` must be given if `epochs` is not; got steps={steps!r}, epochs={epochs!r}. "
            "One of the two says where the run ends. Pass exactly one."
        )
    if epochs is None:
        check_count("steps", steps)
        return steps
    check_count("epochs", epochs)
    if found.steps_per_epoch is None:
        raise ValueError(
            f"`epochs` must be None if the data cannot tell its length; got {epochs}. An epoch is "
            "one pass over it. Pass steps=, or call dataset.apply(tf.data.experimental."
            "assert_cardinality(n))."
        )
    return epochs * found.steps_per_epoch


def _from_function(data: Any, argument: str, strategy: tf.distribute.Strategy) -> tf.data.Dataset:
    replicas = strategy.num_replicas_in_sync
    dataset = data(tf.distribute.InputContext(num_replicas_in_sync=replicas))
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"`{argument}` must return a tf.data.Dataset when it is a function; got "
            f"{type(dataset).__name__}. It is called with a tf.distribute.InputContext. Return a "
            "dataset batched to context.get_per_replica_batch_size(global_batch)."
        )
    if replicas == 1:
        return dataset
    replica_batch = _examples(_first(dataset, argument), argument)
    return dataset.rebatch(replica_batch * replicas)


def _from_arrays(
    data: Any, argument: str, global_batch: int | None, shuffle_seed: int | None
) -> tf.data.Dataset:
    leaves = tf.nest.flatten(data)
    if isinstance(data, list) or (
        isinstance(data, tuple) and any(isinstance(d, list) for d in data)
    ):
        raise TypeError(
            f"`{argument}` must have no lists in it; got one. tf.data would stack them into one "
            "tensor. Use tuples or dicts for several inputs, and NumPy arrays for numbers."
        )
    if not leaves or not all(hasattr(leaf, "shape") or np.ndim(leaf) for leaf in leaves):
        raise TypeError(
            f"`{argument}` must be a tf.data.Dataset, a function of a tf.distribute.InputContext, "
            f"or arrays; got {type(data).__name__}. Nothing else can be batched. Pass for instance "
            "(x, y) with global_batch=64."
        )
    if global_batch is None:
        raise ValueError(
            f"`global_batch` must be at least 1 when `{argument}` is arrays; got None. Arrays do "
            "not say how to batch them. Pass for instance global_batch=64."
        )
    check_count("global_batch", global_batch)
    arrays = tf.nest.map_structure(tf.convert_to_tensor, data)
    lengths = [int(leaf.shape[0]) if leaf.shape.rank else 0 for leaf in tf.nest.flatten(arrays)]
    if len(set(lengths)) != 1:
        raise ValueError(
            f"`{argument}` must have as many examples in every array; got {lengths}. The first "
            "dimension is the example. Cut them to the same length."
        )
    if lengths[0] == 0:
        raise _empty(argument)
    if shuffle_seed is None:
        indices = tf.data.Dataset.range(lengths[0]).batch(global_batch)
    else:
        indices = shuffled_for_ever(lengths[0], global_batch, shuffle_seed)

    @without_autograph
    def gathered(rows: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda array: tf.gather(array, rows), arrays)

    return untuned(indices.map(gathered))


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set whose iterator has no thread that tunes it.

    In TensorFlow 2.21 that thread can miss that its iterator is being removed, and is waited for
    until it looks again: up to a minute. Of our own pipelines there is nothing to tune; what a
    user hands in is left alone, since maps are run in parallel only where they are tuned.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def again_and_again(found: Batches) -> tf.data.Dataset:
    """Returns the first batch for ever; what is traced with it, fits all the data."""
    spec = found.dataset.element_spec

    @without_autograph
    def as_the_data(*batch: Any) -> Any:
        pairs = zip(tf.nest.flatten(batch), tf.nest.flatten(spec), strict=True)
        return tf.nest.pack_sequence_as(spec, [as_open_as(tensor, one) for tensor, one in pairs])

    return untuned(tf.data.Dataset.from_tensors(found.first).repeat().map(as_the_data))


@without_autograph
def as_open_as(tensor: Any, spec: Any) -> Any:
    """Returns a tensor of whose shape a graph knows no more than a spec says."""
    if not isinstance(spec, tf.TensorSpec):  # ragged or sparse: its spec says all there is
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=spec.shape)


def shuffled_for_ever(examples: int, global_batch: int, seed: int) -> tf.data.Dataset:
    """Returns batches of indices, pass after pass, each in an order of its own.

    An order is a function of seed and pass alone: `Dataset.shuffle` would also depend on
    TensorFlow's global seed, and would put its buffer into every checkpoint.
    """

    @without_autograph
    def one_pass(number: tf.Tensor) -> tf.data.Dataset:
        indices = tf.range(examples, dtype=tf.int64)
        seeds = tf.stack([tf.constant(seed, tf.int64), number])
        order = tf.random.experimental.stateless_shuffle(indices, seeds, alg="philox")
        return tf.data.Dataset.from_tensor_slices(order).batch(global_batch)

    endless = tf.data.Dataset.counter().flat_map(one_pass)
    return endless.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def _first(dataset: tf.data.Dataset, argument: str) -> Any:
    for batch in untuned(dataset.take(1)):
        return batch
    raise _empty(argument)


def _empty(argument: str) -> ValueError:
    return ValueError(
        f"`{argument}` must hold at least one batch; got an empty dataset. There is nothing to "
        "take a step on. Look at its source, at filters, and at batch(..., drop_remainder=True)."
    )


def _examples(batch: Any, argument: str) -> int:
    shapes = [leaf.shape for leaf in tf.nest.flatten(batch)]
    if not shapes or not all(shape.rank for shape in shapes):
        raise ValueError(
            f"`{argument}` must be batched; got elements of shapes "
            f"{[tuple(shape) for shape in shapes]}. The first dimension of every tensor is the "
            "example. Call .batch(global_batch) on the dataset."
        )
    sizes = sorted({int(shape[0]) for shape in shapes})
    if len(sizes) != 1:
        raise ValueError(
            f"`{argument}` must have as many examples in every tensor of a batch; got {sizes}. The "
            "first dimension is the example. Batch all of them alike."
        )
    return sizes[0]
