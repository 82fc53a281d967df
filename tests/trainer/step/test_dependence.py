"""What a tensor depends on, and what it does not."""

import tensorflow as tf

from trainer.step.dependence import any_depends, operations_before


def test_a_shape_is_no_dependence():
    """The number of rows of `y` does not depend on the values of `y`."""
    with tf.Graph().as_default():
        x, y, other = tf.ones([2]), tf.random.uniform([2]), tf.ones([2])
        result = x * 2.0 + tf.zeros_like(y)

        assert x.op in operations_before([result])
        assert y.op not in operations_before([result])
        assert any_depends([other, result], [y, x])
        assert not any_depends([other, result], [y])
        assert not any_depends([], [x])


def test_eager_tensors_do_not_tell():
    """So any of them may depend on any other."""
    assert any_depends([tf.ones([])], [tf.ones([])])
