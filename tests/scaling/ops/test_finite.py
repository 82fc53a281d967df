"""The check for inf and NaN."""

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

import scaling

FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_one_bad_element_is_enough(dtype, bad, shape):
    """An inf or NaN is found at any position, in tensors of any float dtype and rank."""
    good = np.ones(shape)
    for place in np.ndindex(*shape):
        values = good.copy()
        values[place] = bad

        assert not scaling.all_finite([tf.ones([2]), tf.cast(values, dtype)])
    assert scaling.all_finite([tf.cast(good, dtype)])


@given(st.lists(st.sampled_from([0.0, 1.0, 6e4, np.inf, np.nan])), st.integers(0, 3))
def test_agrees_with_numpy(values, nesting):
    """For any values at any depth of a structure, the result is that of NumPy."""
    structure = tf.constant(values, tf.float32)
    for _ in range(nesting):
        structure = {"a": [structure, None]}

    assert bool(np.isfinite(values).all()) == bool(scaling.all_finite(structure))


def test_none_integers_and_empty_structures_are_finite():
    """None, integers, strings, empty tensors and empty structures are finite; sparse values count."""
    assert scaling.all_finite([None, tf.constant([2**31 - 1]), tf.zeros([0]), "text"])
    assert scaling.all_finite([])
    assert not scaling.all_finite([None, tf.constant(np.nan)])
    assert not scaling.all_finite([tf.IndexedSlices(tf.constant([np.nan]), tf.constant([0]))])


def test_a_nan_that_a_compiled_graph_computes_is_found():
    """A NaN that is computed inside a compiled graph is found there."""

    @tf.function(jit_compile=True)
    def check(x):
        return scaling.all_finite([x / x])

    assert check(tf.constant(1.0))
    assert not check(tf.constant(0.0))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_finite_or_not(dtype):
    """TensorFlow has no kernel that looks at float8."""
    for value, finite in ((1.0, True), (np.nan, False)):
        tensor = tf.cast(tf.constant([0.0, value]), tf.as_dtype(dtype))
        assert bool(scaling.all_finite([tensor])) is finite
