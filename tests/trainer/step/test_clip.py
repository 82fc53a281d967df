"""Clipping of dense, sparse and missing gradients."""

import generators
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import scaling
from trainer import Updates
from trainer.step.clip import clip
from trainer.step.measure import global_norm


@settings(max_examples=40)
@given(
    st.lists(st.one_of(st.none(), generators.gradients()), min_size=1, max_size=4),
    st.sampled_from([0.01, 1.0, 100.0]),
)
def test_clipping_bounds_the_norm_and_keeps_the_direction(gradients, clipnorm):
    """L9: for any list of dense, sparse and missing gradients, the norm is that of the dense
    gradient. After clipping it is at most the bound; below the bound gradients stay unchanged.
    Norms agree to n rounding errors.
    """
    gradients = [gradient for gradient in gradients if gradient is not None] or [tf.constant([1.0])]
    gradients = scaling.unscale_gradients([*gradients, None], scaling.NoLossScale().initial_state())
    dense = np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in gradients[:-1]])
    norm = global_norm(gradients)
    *clipped, missing = clip(gradients, norm, Updates(global_clipnorm=clipnorm))
    ours = np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in clipped])
    expected = np.linalg.norm(dense.astype(np.float64))
    tolerance = 2 * len(dense) * float(np.finfo(np.float32).eps)

    assert missing is None
    assert float(norm) == pytest.approx(expected, rel=tolerance, abs=1e-30)
    if float(norm) <= clipnorm:
        np.testing.assert_array_equal(ours, dense)
    else:
        np.testing.assert_allclose(ours, dense * (clipnorm / expected), rtol=tolerance)


SPARSE = tf.IndexedSlices(tf.constant([[12.0]]), tf.constant([1]), tf.constant([3, 1]))
GRADIENTS = [tf.constant([3.0]), None, tf.constant([-4.0]), SPARSE]  # global norm 13


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        (Updates(), [3.0, -4.0, 12.0]),
        (Updates(global_clipnorm=6.5), [1.5, -2.0, 6.0]),
        (Updates(global_clipnorm=13.0), [3.0, -4.0, 12.0]),
        (Updates(clipnorm=4.0), [3.0, -4.0, 4.0]),
        (Updates(clipvalue=3.5), [3.0, -3.5, 3.5]),
    ],
    ids=str,
)
def test_each_bound(bound, expected):
    """L9: a bound applies to all gradients together, to each of them, or to each element; missing
    gradients stay missing and sparse ones sparse.
    """
    first, missing, second, sparse = clip(GRADIENTS, tf.constant(13.0), bound)

    assert missing is None
    assert isinstance(sparse, tf.IndexedSlices)
    assert (sparse.indices.numpy().tolist(), sparse.dense_shape.numpy().tolist()) == ([1], [3, 1])
    found = [float(first[0]), float(second[0]), float(sparse.values[0, 0])]
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["clipnorm", "clipvalue", "global_clipnorm"])
@pytest.mark.parametrize("bound", [2.0**-126, 2.0**63])
def test_the_outermost_bounds_keep_gradients_finite(name, bound):
    """No gradient that passes the verdict becomes inf, NaN or larger by clipping."""
    for gradient in ([2.0**63, -(2.0**62)], [2.0**-126, 0.0], [0.0, 0.0]):
        before = [tf.constant(gradient)]
        [after] = clip(before, global_norm(before), Updates(**{name: bound}))

        assert np.isfinite(after).all()
        assert (np.abs(after) <= np.abs(before[0])).all()
