"""The data that a trainer accepts: datasets, functions and arrays give the same batches."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes

from trainer import Monitoring
from trainer.data.batches import ArrayCopies, batches, same_data, shuffled_indices

X = np.arange(10, dtype=np.float32)


def rows(dataset):
    """The batches of a dataset of {"x": ...}, as lists."""
    return [batch["x"].numpy().tolist() for batch in dataset]


def test_arrays_keep_their_order_or_are_shuffled_in_every_epoch():
    """Without a seed arrays keep their order; with one, every epoch has a new order."""
    strategy = tf.distribute.get_strategy()
    plain = batches({"x": X}, "data", strategy, global_batch=4)
    shuffled = batches({"x": X}, "data", strategy, global_batch=4, shuffle_seed=1)

    assert rows(plain.dataset) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (plain.global_batch, plain.steps_per_epoch) == (4, 3)
    passes = rows(shuffled.dataset.take(6))
    first, second = (list(itertools.chain(*each)) for each in (passes[:3], passes[3:]))
    assert sorted(first) == sorted(second) == X.tolist()
    assert first != second
    assert (shuffled.global_batch, shuffled.steps_per_epoch) == (4, 3)
    assert [len(batch) for batch in passes] == [4, 4, 2, 4, 4, 2]


def test_the_order_depends_on_the_seed_only():
    """L12: TensorFlow's global seed, which a trainer sets to build its model, has no influence."""

    def order(seed):
        found = batches(
            {"x": X}, "data", tf.distribute.get_strategy(), global_batch=4, shuffle_seed=seed
        )
        return rows(found.dataset.take(9))

    first = order(1)
    tf.random.set_seed(7)

    assert order(1) == first
    assert order(2) != first


def test_the_same_arrays_in_another_structure_are_other_data():
    """A second call of `train` with a tuple in place of a dict must not go on with the dict."""
    data = {"x": X, "y": X}
    found = batches(data, "data", tf.distribute.get_strategy(), global_batch=4)

    assert same_data(data, dict(data), found)
    assert not same_data(data, (X, X), found)
    assert not same_data(data, {"x": X, "z": X}, found)
    assert not same_data(data, {"x": X}, found)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_function_of_an_input_context(mirrored, replicas):
    """The function returns per-replica batches, which are joined to global batches."""

    def make(context):
        assert context.num_replicas_in_sync == replicas
        per_replica = context.get_per_replica_batch_size(6)
        return tf.data.Dataset.from_tensor_slices({"x": X}).batch(per_replica)

    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    found = batches(make, "data", strategy)

    assert found.global_batch == 6
    assert rows(found.dataset) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]


@pytest.mark.parametrize("kind", ["arrays", "dataset", "endless", "function"])
def test_every_kind_of_data_trains(kind):
    """5 epochs of 10 examples in batches of 2 are 25 steps, each of which lowers the weight by 1."""
    arrays = {"x": np.ones([10, 1], np.float32), "slope": np.ones(10, np.float32)}
    dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(2)
    data, arguments = {
        "arrays": (arrays, {"epochs": 5, "global_batch": 2}),
        "dataset": (dataset, {"epochs": 5}),
        "endless": (dataset.repeat(), {"steps": 25}),
        "function": (lambda context: dataset, {"epochs": 5}),  # noqa: ARG005
    }[kind]
    trainer = Linear(verbose=False)
    summary = trainer.train(data, **arguments)

    assert (summary.step, trainer.weight) == (25, -24.0)


TABLE = np.arange(14.0, dtype=np.float32).reshape(7, 2)
IN_STRUCTURES = {
    "tensor": lambda rows: rows,
    "tuple of one": lambda rows: (rows,),
    "pair": lambda rows: (rows, rows[:, 0]),
    "dict": lambda rows: {"x": rows, "y": (rows, rows)},
}


@pytest.mark.sampled
@pytest.mark.parametrize("read_by_python", [False, True])
@pytest.mark.parametrize("structure", IN_STRUCTURES)
def test_batches_of_one_size_say_it(structure, read_by_python):
    """The spec has the size of the first batch, and another size is an error when it is read."""
    wrap, strategy = IN_STRUCTURES[structure], tf.distribute.get_strategy()

    def parts(sizes):
        cut = [wrap(TABLE[:size]) for size in sizes]
        if read_by_python:
            return lambda: iter(cut)
        spec = tf.nest.map_structure(lambda row: tf.TensorSpec([None, *row.shape[1:]]), cut[0])
        return tf.data.Dataset.from_generator(lambda: iter(cut), output_signature=spec)

    found = batches(parts([3, 3]), "data", strategy, one_size=True)
    for dataset in (found.dataset, found.endless().take(4)):
        tf.nest.assert_same_structure(dataset.element_spec, wrap(TABLE))
        assert {spec.shape[0] for spec in tf.nest.flatten(dataset.element_spec)} == {3}
        for batch in dataset:
            tf.nest.map_structure(np.testing.assert_array_equal, batch, wrap(TABLE[:3]))
    uneven = batches(parts([3, 3, 1]), "data", strategy, one_size=True)
    for dataset in (uneven.dataset, uneven.endless()):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"one size here.*\] \[1\]"):
            list(dataset)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(("global_batch", "size"), [(3, 3), (6, 6), (9, 6), (4, None)])
def test_arrays_that_divide_evenly_say_their_size(seed, global_batch, size):
    """Nothing is dropped: else the size stays open."""
    rows = np.arange(6)
    found = batches(rows, "data", tf.distribute.get_strategy(), global_batch, seed)

    for each in (found, found.beginning_with(5)):
        assert each.dataset.element_spec.shape[0] == size
        one_pass = each.dataset.take(-(-6 // global_batch))
        assert sorted(np.concatenate([*one_pass.as_numpy_iterator()])) == [*range(6)]


def copies_of(data):
    """Copies for batches of 2 in their order."""
    return ArrayCopies(data, 2, None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool", "uint8", "str"])
def test_every_changed_element_is_noticed(dtype):
    """Arrays hold their copies' values until any one element is changed in place."""
    array = np.zeros([5, 3]).astype(dtype)
    copies = copies_of({"x": array})
    assert copies.hold({"x": array})
    for place in np.ndindex(array.shape):
        before = array[place]
        array[place] = 1
        assert not copies.hold({"x": array})
        array[place] = before
    assert copies.hold({"x": array})


def test_large_arrays_are_compared_to_their_last_row():
    """A change in the last of many chunks is noticed, also through a view with steps."""
    array = np.zeros([300_000, 4], np.float32)
    copies = copies_of((array, array[:, ::2]))
    array[-1, 2] = 1
    assert not copies.hold((array, array[:, ::2]))
    assert not copies_of(array[::-1]).hold(array)


def test_nan_is_no_change():
    """NaN holds the values of its copy, which a comparison by value would deny."""
    array = np.array([[np.nan], [0.0]], np.float32)
    copies = copies_of(array)
    assert copies.hold(array)
    array[1] = -0.0
    assert not copies.hold(array)


def test_orders_follow_the_number_of_the_pass():
    """Orders that begin with a later pass are those of a run that has come there."""
    from_first = shuffled_indices(6, 2, seed=3).take(9)
    from_second = shuffled_indices(6, 2, seed=3, first_pass=1).take(6)
    rows = [batch.numpy().tolist() for batch in from_first]
    assert rows[3:] == [batch.numpy().tolist() for batch in from_second]
    assert rows[:3] != rows[3:6]


def test_a_run_reads_arrays_that_were_changed_in_place():
    """A call of `train` uses the values that its arrays have when it begins, as a loop would."""
    line, data = Linear(verbose=False), slopes(1.0, 1.0)
    line.train(data, 3, global_batch=2)
    data["slope"][:] = 10.0
    line.train(data, 5, global_batch=2)
    data["slope"][1] = 20.0
    line.train(data, 6, global_batch=2)
    assert line.weight == 1 - 3 * 1 - 2 * 10 - 15


@pytest.mark.thorough
def test_new_arrays_in_every_call_begin_with_new_orders():
    """A run that is given new arrays in every call takes other rows of them each time, and the
    same arrays go on in one order.
    """
    values, taken = 2.0 ** np.arange(4), []
    arrays = slopes(*values)
    new, same = (
        Linear(verbose=False, monitoring=Monitoring(check_gradients=False)) for _ in range(2)
    )
    for step in range(1, 5):
        before = new.weight if step > 1 else 1.0
        new.train(slopes(*values), step, global_batch=1)
        taken.append(before - new.weight)
        same.train(arrays, step, global_batch=1)
    assert len({*taken}) > 1
    assert same.weight == 1 - sum(values)
