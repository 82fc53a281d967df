"""Copies of arrays: they notice changes, and their batches go on in new orders."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import Linear, slopes
from trainer import Monitoring
from trainer.data.array_copies import ArrayCopies, is_constant, shuffled_indices


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


def test_what_cannot_change_is_not_read():
    """Tensors, and arrays that nobody can write to, are constant; views of others are not."""
    array = np.zeros(3)
    view = array[:]
    view.flags.writeable = False
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    assert is_constant(tf.zeros(3))
    assert is_constant(fixed[:2])
    assert not is_constant(tf.Variable([1.0]))
    assert not is_constant(view)


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


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("first_pass", [0, 5])
def test_the_first_batch_is_that_of_the_pipeline(seed, first_pass):
    """Its bits are the same; without the cost of an iterator."""
    data = {"x": np.random.default_rng(0).normal(size=[7, 2]), "y": np.arange(7)}
    copies = ArrayCopies(data, 4, seed)
    first = copies.first_from(first_pass)
    for batch in copies.batches_from(first_pass).take(1):
        tf.nest.map_structure(np.testing.assert_array_equal, first["x"], batch["x"])
        np.testing.assert_array_equal(first["y"], batch["y"])
        assert batch["x"].dtype == first["x"].dtype
    assert first["x"].shape == (4, 2)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(("global_batch", "size"), [(3, 3), (6, 6), (9, 6), (4, None)])
def test_batches_of_one_shape_say_their_size(seed, global_batch, size):
    """Nothing is dropped: an incomplete last batch leaves the size open."""
    copies = ArrayCopies(np.arange(6), global_batch, seed, one_shape=True)
    dataset = copies.batches_from(0)

    assert dataset.element_spec.shape[0] == size
    one_pass = dataset.take(-(-6 // global_batch))
    assert sorted(np.concatenate([*one_pass.as_numpy_iterator()])) == [*range(6)]
