"""The values of dense, sparse and missing gradients."""

import numpy as np
import pytest
import tensorflow as tf

from trainer.step.gradients import count_nonfinite, gradient_values, half_squared_norm

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


def test_count_nonfinite():
    """inf, of either sign, and NaN are counted separately, in any shape."""
    values = tf.constant([[np.inf, -np.inf, 1.0], [np.nan, 0.0, np.inf]])

    assert count_nonfinite(values).numpy().tolist() == [3, 1]
    assert count_nonfinite(tf.zeros([0])).numpy().tolist() == [0, 0]
