"""The labels that a loss can take."""

import keras
import pytest
import tensorflow as tf

from trainer.losses.label_ranges import label_ranges
from trainer.losses.loss_shapes import name_of

OUTPUTS = tf.zeros([2, 5])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=9), (0, 4, 9)),
        (keras.losses.sparse_categorical_crossentropy, (0, 4, None)),
        (keras.losses.BinaryCrossentropy(label_smoothing=0.1), (0, 1, None)),
        (keras.losses.categorical_focal_crossentropy, (0, 1, None)),
        (keras.losses.MeanSquaredError(), None),
        (keras.losses.Hinge(), None),
    ],
    ids=name_of,
)
def test_ranges(loss, expected):
    """Classes are counted by the outputs; probabilities lie between 0 and 1."""
    found = [each[2:] for each in label_ranges(loss, tf.zeros([2]), lambda: OUTPUTS)]

    assert found == ([expected] if expected else [])


def test_a_class_of_the_user_may_have_any_labels():
    """A name alone says nothing."""

    class BinaryCrossentropy(keras.losses.Loss):
        """Of labels -1 and 1."""

        def call(self, y_true, y_pred):
            return y_true * y_pred

    assert label_ranges(BinaryCrossentropy(), tf.zeros([2]), lambda: OUTPUTS) == []
