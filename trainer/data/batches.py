"""Turns the data that users may pass into one `tf.data.Dataset` of global batches.

All replicas read the same pipeline, and each takes its share of every batch (see
`strategies/division.py`), so one plain iterator serves all of them.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import tensorflow as tf

from scaling.base.argument_checks import check_integer
from strategies.division import count_examples, known_examples
from trainer.base.autograph import without_autograph
from trainer.data.reader import Reader, untuned
from trainer.data.source import Source
from trainer.data.sources import is_arrow, is_source, source_of
from trainer.data.structures import as_arrays, rows_in
from trainer.step.types import Batch

OTHER_SIZE = "Batches must have one size here; use batch(..., drop_remainder=True)"
DatasetFunction: TypeAlias = Callable[[tf.distribute.InputContext], tf.data.Dataset]
# What users may pass; besides, what `sources.is_source` knows: read batch by batch in Python.
Data: TypeAlias = "tf.data.Dataset | DatasetFunction | np.ndarray | Batch"

# The element spec of a dataset: the structure of a batch, with a spec for each tensor.
Spec: TypeAlias = "tf.TypeSpec | Mapping[str, Spec] | tuple[Spec, ...]"

CHUNK_BYTES = 2**17  # how much is compared at a time: it fits into a processor's cache


class ArrayCopies:
    """Copies of the arrays that a user passed, in any structure, and the batches made of them.

    A user may go on writing to the arrays, as to a replay buffer. So batches are made of copies,
    which also tell whether the arrays were changed.

    Args:
        data: the arrays; the first dimension of each indexes the examples.
        global_batch: the batch size.
        shuffle_seed: seed for a new order in every pass; None keeps the order.
    """

    def __init__(self, data: Any, global_batch: int, shuffle_seed: int | None) -> None:
        """Copies the arrays into the host's memory, from which batches are gathered."""
        self.global_batch = global_batch
        self.shuffle_seed = shuffle_seed
        with tf.device("CPU"):
            self.tensors = tf.nest.map_structure(tf.convert_to_tensor, data)

    def batches_from(self, first_pass: int) -> tf.data.Dataset:
        """Returns the batches: one pass in order; or, shuffled, all passes from one on."""
        size = min(self.global_batch, self.examples)
        # Where nothing is left over, the spec says the size. A step of a known size is traced with
        # a third fewer operations, as no gradient depends on a shape.
        even = self.examples % size == 0
        if self.shuffle_seed is None:
            indices = tf.data.Dataset.range(self.examples).batch(size, drop_remainder=even)
        else:
            indices = shuffled_indices(
                self.examples, size, self.shuffle_seed, first_pass, drop_remainder=even
            )
        return untuned(indices.map(without_autograph(self._rows)))

    @property
    def examples(self) -> int:
        """Number of examples."""
        return int(tf.nest.flatten(self.tensors)[0].shape[0])

    def _rows(self, rows: tf.Tensor) -> Batch:
        """Returns some rows of all arrays: where a batch of arrays is made."""
        return tf.nest.map_structure(lambda array: tf.gather(array, rows), self.tensors)

    def hold(self, data: Any) -> bool:
        """Returns whether the arrays still have the values of the copies.

        Reads all of both, which takes less time than copying them. Tensors cannot have changed.
        """
        pairs = zip(tf.nest.flatten(self.tensors), tf.nest.flatten(data), strict=True)
        return all(isinstance(leaf, tf.Tensor) or same(copy, leaf) for copy, leaf in pairs)


@dataclasses.dataclass(frozen=True)
class Batches:
    """A dataset of global batches, with its first batch and its sizes."""

    dataset: tf.data.Dataset
    first: Batch  # used to check that the dataset is not empty, and to build the model
    global_batch: int  # number of examples in the first batch; the last one may be smaller
    steps_per_epoch: int | None  # None if the length of the dataset is unknown
    reader: Reader | None = None  # reads what Python makes; None for a pipeline and for arrays
    arrays: ArrayCopies | None = None  # None unless the data is arrays
    first_pass: int = 0  # number of the pass of arrays whose order comes first
    one_size: bool = False  # whether all batches must have the size of the first; see `of_one_size`

    def beginning_with(self, first_pass: int) -> "Batches":
        """Returns the same batches from another pass on; only arrays have numbered passes."""
        if self.arrays is None or first_pass == self.first_pass:
            return self
        dataset = self.arrays.batches_from(first_pass)
        return dataclasses.replace(self, dataset=dataset, first_pass=first_pass)

    def sized(self) -> "Batches":
        """Returns the same batches, all of which must have the size of the first."""
        dataset = of_one_size(self.dataset, self.global_batch)
        return dataclasses.replace(self, dataset=dataset, one_size=True)

    def endless(self) -> tf.data.Dataset:
        """Returns the batches again and again, with the next two fetched ahead."""
        if self.reader:
            dataset = self.reader.forever()
            if self.one_size:
                dataset = of_one_size(dataset, self.global_batch)
        else:
            dataset = self.dataset
            if int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY:
                dataset = dataset.repeat()
        # Do not use AUTOTUNE, which may prefetch many batches: every checkpoint saves all of them.
        return dataset.prefetch(2)


def batches(
    data: Data,
    argument: str,
    strategy: tf.distribute.Strategy,
    global_batch: int | None = None,
    shuffle_seed: int | None = None,
    first_pass: int = 0,
    *,
    one_size: bool = False,
    whole: bool = False,
) -> Batches:
    """Makes a dataset of global batches from the data that a user passed.

    The first batch of a pipeline is read once in advance.

    Args:
        data: a `tf.data.Dataset` batched to the global batch; or a function of a
            `tf.distribute.InputContext` that returns a dataset batched to
            `context.get_per_replica_batch_size(...)`; or arrays, in any structure, whose
            first dimension indexes the examples; or what Python reads batch by batch: see
            `sources.source_of`.
        argument: name of the user's argument, for errors.
        strategy: the strategy whose replicas will share each batch.
        global_batch: the batch size for arrays; None for other data.
        shuffle_seed: seed for shuffling arrays in a new order in every epoch; None keeps their
            order.
        first_pass: number of the pass whose order comes first. A run numbers the passes of arrays
            by its steps, so that arrays which it is given later do not begin with the same order.
        one_size: whether all batches must have the size of the first; see `of_one_size`. Arrays
            that do not divide evenly are left as they are.
        whole: whether batches are not divided: see `rows_in`.

    Raises:
        TypeError, ValueError: if the data has another type, is empty or is not batched.
    """
    if needs_batch_size(data):
        check_integer("global_batch", global_batch, 1)
    elif global_batch is not None:
        raise ValueError(
            f"`global_batch` must be None unless `{argument}` is arrays; got {global_batch}"
        )
    if is_source(data):
        made = made_pipeline(data)
        if made is None:
            source = source_of(data, global_batch, shuffle_seed)
            found = read_batches(source, argument, whole=whole)
            return found.sized() if one_size else found
        data = made
    if are_arrays(data):
        # No more than all examples are taken, however large the number: TensorFlow counts to 2^63.
        size = min(cast("int", global_batch), 2**62)
        return of_arrays(data, argument, size, shuffle_seed, first_pass)
    if isinstance(data, tf.data.Dataset):
        dataset = data
    else:
        dataset = _from_function(cast("DatasetFunction", data), argument, strategy)
    first, length = _first(dataset, argument), int(dataset.cardinality())
    rows = rows_in(first, argument, whole=whole)
    found = Batches(dataset, first, rows, steps_per_epoch=length if length >= 0 else None)
    return found.sized() if one_size else found


def of_arrays(
    data: Data,
    argument: str,
    global_batch: int,
    shuffle_seed: int | None,
    first_pass: int,
) -> Batches:
    """Makes a dataset of global batches from copies of arrays; see `batches`."""
    arrays = ArrayCopies(as_arrays(data, argument), global_batch, shuffle_seed)
    rows_in(arrays.tensors, argument)
    dataset = arrays.batches_from(first_pass)
    first = _first(dataset, argument)
    rows = rows_in(first, argument)
    return Batches(
        dataset=dataset,
        first=first,
        global_batch=rows,
        steps_per_epoch=-(-arrays.examples // rows),
        arrays=arrays,
        first_pass=first_pass,
    )


def are_arrays(data: Data) -> bool:
    """Returns whether data consists of arrays: is neither a dataset, a function nor a source."""
    return not (isinstance(data, tf.data.Dataset) or is_source(data) or callable(data))


def needs_batch_size(data: Data) -> bool:
    """Returns whether data consists of single examples, so that `global_batch` must be given."""
    return are_arrays(data) or is_arrow(data)


def made_pipeline(data: Any) -> tf.data.Dataset | None:
    """Returns the dataset that a function without parameters returns; None for other data."""
    if not callable(data) or hasattr(data, "__iter__"):
        return None
    if inspect.isgeneratorfunction(inspect.unwrap(data)):
        return None
    made = data()
    return made if isinstance(made, tf.data.Dataset) else None


def read_batches(source: Source, argument: str, *, whole: bool = False) -> Batches:
    """Reads the first two batches of a source, which tell the structure of all.

    Raises:
        TypeError, ValueError: if there is none, or if they cannot be batches.
    """
    reader = Reader(source, argument, whole=whole)
    if reader.first is None:
        raise _empty(argument)
    dataset = reader.once()
    if source.endless:
        dataset = dataset.apply(
            tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        )
    first = tf.nest.map_structure(tf.convert_to_tensor, reader.first)
    rows = rows_in(first, argument, whole=whole)
    return Batches(dataset, first, rows, source.length, reader)


def same_data(before: Data, now: Data, found: Batches) -> bool:
    """Returns whether the same data is passed again: the same dataset, function or arrays.

    Arrays that were changed in place are other data.

    Args:
        before: the data that was passed before.
        now: the data that is passed now.
        found: the batches that were made of `before`.
    """
    if not (are_arrays(before) and are_arrays(now)):
        return before is now
    try:
        tf.nest.assert_same_structure(before, now)
    except (TypeError, ValueError):
        return False
    pairs = zip(tf.nest.flatten(before), tf.nest.flatten(now), strict=True)
    same = all(one is other for one, other in pairs)
    return same and found.arrays is not None and found.arrays.hold(as_arrays(now))


def check_ends(found: Batches, argument: str, *, limit: str = "") -> None:
    """Raises ValueError if a dataset for evaluation or prediction is infinite.

    Args:
        found: the batches of the dataset.
        argument: name of the user's argument, for the error.
        limit: name of the argument that limits the number of batches to read; "" without one.
    """
    if int(found.dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        remedy = f"pass {limit}=" if limit else "call .take(n)"
        raise ValueError(f"`{argument}` must end; got a dataset that repeats forever: {remedy}")


def of_one_size(dataset: tf.data.Dataset, examples: int) -> tf.data.Dataset:
    """Returns a dataset whose spec says the size of its batches; reading another size raises.

    Where replicas exchange tensors of one shape only, a batch of another size would end all
    processes in the middle of a step.

    Args:
        dataset: the dataset.
        examples: number of examples in each batch.
    """
    spec = dataset.element_spec

    @without_autograph
    def checked(*batch: Any) -> Any:
        leaves = tf.nest.flatten(batch)
        found = count_examples(leaves)
        same = tf.debugging.Assert(found == examples, [f"{OTHER_SIZE}; got", found])
        with tf.control_dependencies([same]):
            sized = [with_rows(leaf, examples) for leaf in leaves]
        return tf.nest.pack_sequence_as(spec, sized)

    return dataset if known_examples(spec) else dataset.map(checked)


def with_rows(leaf: Any, rows: int) -> Any:
    """Returns a dense tensor whose static shape says its number of rows; any other unchanged."""
    return tf.ensure_shape(leaf, [rows, *leaf.shape[1:]]) if isinstance(leaf, tf.Tensor) else leaf


def check_length(steps: int | None, epochs: int | None, found: Batches) -> None:
    """Checks the length of a run.

    Args:
        steps: the number of the last step, or None.
        epochs: the number of passes over the data, or None.
        found: the batches of the training data.

    Raises:
        ValueError: unless exactly one of `steps` and `epochs` is given and it is at least 1, or if
            `epochs` is given and the length of an epoch is unknown.
    """
    if (steps is None) == (epochs is None):
        raise ValueError(
            f"`steps` must be given if and only if `epochs` is None; got {steps!r} and {epochs!r}"
        )
    name, length = ("steps", steps) if epochs is None else ("epochs", epochs)
    check_integer(name, length, 1)
    if epochs is not None and found.steps_per_epoch is None:
        raise ValueError(
            f"`epochs` must be None if the length of the dataset is unknown; got {epochs}: pass "
            "steps=, or use tf.data.experimental.assert_cardinality"
        )


def _from_function(
    data: DatasetFunction, argument: str, strategy: tf.distribute.Strategy
) -> tf.data.Dataset:
    replicas = strategy.num_replicas_in_sync
    dataset = data(tf.distribute.InputContext(num_replicas_in_sync=replicas))
    if replicas == 1:
        return dataset
    replica_batch = rows_in(_first(dataset, argument), argument)
    return dataset.rebatch(replica_batch * replicas)


def repeat_first_batch(found: Batches) -> tf.data.Dataset:
    """Returns the first batch repeated forever, with the element spec of the whole dataset.

    A function traced with this dataset is therefore not retraced for the data itself.
    """
    spec = found.dataset.element_spec

    @without_autograph
    def with_spec(*batch: Batch) -> Batch:
        pairs = zip(tf.nest.flatten(batch), tf.nest.flatten(spec), strict=True)
        leaves = [with_static_shape(tensor, leaf_spec) for tensor, leaf_spec in pairs]
        return tf.nest.pack_sequence_as(spec, leaves)

    return untuned(tf.data.Dataset.from_tensors(found.first).repeat().map(with_spec))


@without_autograph
def with_static_shape(tensor: tf.Tensor, spec: tf.TypeSpec) -> tf.Tensor:
    """Returns `tensor` with the static shape of `spec`, even if its own shape is more specific."""
    if not isinstance(spec, tf.TensorSpec):  # ragged and sparse tensors have the right spec already
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=spec.shape)


def _first(dataset: tf.data.Dataset, argument: str) -> Batch:
    for batch in untuned(dataset.take(1)):
        return batch
    raise _empty(argument)


def _empty(argument: str) -> ValueError:
    return ValueError(f"`{argument}` must hold at least one batch; got an empty dataset")


def same(copy: tf.Tensor, array: Any) -> bool:
    """Returns whether an array has the bits of its copy."""
    held, now = np.asarray(copy), np.asarray(array)
    if held.shape != now.shape:
        return False
    if held.dtype != now.dtype or held.dtype.hasobject:  # strings
        return bool(np.array_equal(copy.numpy(), tf.convert_to_tensor(array).numpy()))
    rows = max(1, CHUNK_BYTES // max(1, held[:1].nbytes))
    parts = (slice(begin, begin + rows) for begin in range(0, len(held), rows))
    return all(held[part].tobytes() == now[part].tobytes() for part in parts)


def shuffled_indices(
    examples: int,
    global_batch: int,
    seed: int,
    first_pass: int = 0,
    *,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Returns batches of shuffled indices forever, each pass in a new order.

    The order depends only on the seed and the number of the pass. `Dataset.shuffle` would also
    depend on TensorFlow's global seed, and would save its buffer in every checkpoint.
    """

    @without_autograph
    def one_pass(number: tf.Tensor) -> tf.data.Dataset:
        order = shuffled(examples, seed, number)
        return tf.data.Dataset.from_tensor_slices(order).batch(
            global_batch, drop_remainder=drop_remainder
        )

    endless = tf.data.Dataset.counter(first_pass).flat_map(one_pass)
    return endless.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


@tf.function(reduce_retracing=True, autograph=False)  # type: ignore[untyped-decorator]
def _shuffled(examples: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    indices = tf.range(examples, dtype=tf.int64)
    return tf.random.experimental.stateless_shuffle(indices, seeds, alg="philox")


def shuffled(examples: int, seed: int, number: int | tf.Tensor) -> tf.Tensor:
    """Returns the order of a pass: the indices of all examples, in int64."""
    seeds = tf.stack([tf.constant(seed, tf.int64), tf.cast(number, tf.int64)])
    # Traced once per process: a pipeline of new arrays is then made in less time.
    return _shuffled(tf.constant(examples, tf.int64), seeds)
