"""Batches that are passed one by one, in the forms in which users have them."""

import numpy as np
import pytest
import tensorflow as tf

from trainer.data.online import as_global_batch


def test_batches_come_in_the_forms_that_data_have():
    """Lists of numbers become arrays, lists of arrays tuples; tensors and dicts stay."""
    x, y = np.zeros([2, 3]), np.zeros([2], np.int32)
    pair = as_global_batch([x, y])
    assert isinstance(pair, tuple)
    assert [leaf.dtype for leaf in pair] == [tf.float64, tf.int32]
    named = as_global_batch({"x": [[1.0], [2.0]], "ids": tf.constant([1, 2])})
    assert named["x"].dtype == tf.float32
    assert named["ids"].shape == [2]
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    assert as_global_batch((ragged, y))[0] is ragged


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        ((np.zeros([2, 1]), None), TypeError),
        ((np.zeros([2, 1]), 1.0), ValueError),
        ((np.zeros([2, 1]), np.zeros([3])), ValueError),
        (np.zeros([0, 1]), ValueError),
    ],
)
def test_what_is_no_batch_is_an_error(batch, kind):
    """The error names the argument."""
    with pytest.raises(kind, match="`batch`"):
        as_global_batch(batch)
