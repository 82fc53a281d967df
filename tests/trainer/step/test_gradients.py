"""The values of dense, sparse and missing gradients."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from trainer.step.gradients import (
    count_nonfinite,
    gradient_values,
    half_squared_norm,
    half_squared_norm_in_rows,
)

SPARSE = tf.IndexedSlices(tf.constant([[3.0, 4.0]]), tf.constant([1]), tf.constant([5, 2]))


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [(None, []), (tf.constant([1.0, 2.0]), [1.0, 2.0]), (SPARSE, [[3.0, 4.0]])],
    ids=["missing", "dense", "sparse"],
)
def test_gradient_values(gradient, expected):
    """A missing gradient has no values, and a sparse one has those of its rows."""
    assert gradient_values(gradient).numpy().tolist() == expected


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (None, 0.0),
        (tf.constant([3.0, 4.0]), 12.5),
        (SPARSE, 12.5),
        (tf.constant([1000.0], tf.float16), 500_000.0),  # beyond float16
    ],
    ids=["missing", "dense", "sparse", "float16"],
)
def test_squares_are_summed_in_float32(gradient, expected):
    """Half the sum of squares is computed in float32, whatever the gradient's dtype is."""
    found = half_squared_norm(gradient)

    assert (found.dtype, float(found)) == (tf.float32, expected)


@pytest.mark.parametrize("shape", [[1024], [33, 32], [1023], [40, 41], [7, 300, 2], []])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_squares_in_rows_are_the_same_sum(shape, jit_compile):
    """Integers add up exactly, in any order and shape, and each element counts: a square that
    overflows, inf and NaN show, wherever they are.
    """
    norm = tf.function(half_squared_norm_in_rows, jit_compile=jit_compile)
    whole = np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)
    places = {place % whole.size for place in (0, 31, 32, whole.size // 2, -1)}
    for place, value in itertools.product(places, (2.0, 2e19, -np.inf, np.nan)):
        values = whole.copy()
        values.reshape(-1)[place] = value
        expected = half_squared_norm(tf.constant(values)).numpy()

        np.testing.assert_array_equal(norm(tf.constant(values)).numpy(), expected)
        assert np.isfinite(expected) == (value == 2.0)


def test_gradients_without_a_known_size_are_added_in_one_sum():
    """Missing and sparse gradients, and tensors whose shape is not known when the step is traced."""
    norm = tf.function(half_squared_norm_in_rows)
    unknown = norm.get_concrete_function(tf.TensorSpec([None, 2]))

    assert [float(half_squared_norm_in_rows(each)) for each in (None, SPARSE)] == [0.0, 12.5]
    assert float(unknown(tf.ones([3000, 2]))) == 3000.0


def test_count_nonfinite():
    """inf, of either sign, and NaN are counted separately, in any shape."""
    values = tf.constant([[np.inf, -np.inf, 1.0], [np.nan, 0.0, np.inf]])

    assert count_nonfinite(values).numpy().tolist() == [3, 1]
    assert count_nonfinite(tf.zeros([0])).numpy().tolist() == [0, 0]
    assert count_nonfinite(tf.constant([1, 2])).numpy().tolist() == [0, 0]  # a trainable count
