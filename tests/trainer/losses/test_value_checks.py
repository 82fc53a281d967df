"""`check_data=True`: a batch with wrong values ends the run before its step, and says what it holds."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import all_copies
from hypothesis import example, given
from hypothesis import strategies as st

from trainer import DataError, Monitoring, Trainer
from trainer.losses.shapes import name_of
from trainer.losses.value_checks import in_range, label_rules

ROWS = np.arange(32, dtype=np.float32).reshape(8, 4)
LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1])


def trainer_of(loss_fn="sparse_categorical_crossentropy", outputs=3, **arguments):
    """A trainer of a small model."""
    return Trainer(
        model=lambda: keras.Sequential(
            [
                keras.Input([4]),
                keras.layers.Dense(
                    outputs, activation="sigmoid" if "binary" in str(loss_fn) else "softmax"
                ),
            ]
        ),
        optimizer="adam",
        loss_fn=loss_fn,
        **{"verbose": False, "monitoring": Monitoring(check_data=True), "jit_compile": False}
        | arguments,
    )


def batches(*arrays):
    """Two batches of four examples; the arrays' last four examples are the second."""
    return tf.data.Dataset.from_tensor_slices(arrays).batch(4)


def with_last(array, value):
    """A copy whose last element is another."""
    changed = np.array(array)
    changed.reshape(-1)[-1] = value
    return changed


def error_of(trainer, data, steps=4):
    """Trains; returns the text of the error, and the number of steps that were taken."""
    with pytest.raises(DataError) as error:
        trainer.train(data, steps)
    return str(error.value), trainer.totals.attempted


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("x", "y", "wanted"),
    [
        (with_last(ROWS, np.inf), LABELS, "finite numbers in part 0 of the batch"),
        (ROWS, with_last(LABELS, 3), "labels from 0 to 2; got"),
    ],
)
def test_a_wrong_batch_is_named_and_not_trained_on(x, y, wanted):
    """The run ends after the step before, and its variables are those behind that step."""
    trainer, other = trainer_of(seed=1), trainer_of(seed=1)
    message, steps = error_of(trainer, batches(x, y))

    assert steps == 1
    assert wanted in message
    other.train(batches(x, y), 1)
    ours, theirs = (
        [copy.tobytes() for copies in all_copies(each).values() for copy in copies]
        for each in (trainer, other)
    )
    assert ours == theirs


@pytest.mark.thorough
def test_weights_are_checked():
    """Weights must be finite, also those that `example_weights` computes; negative ones are fine."""

    class Weighted(Trainer):
        def example_weights(self, batch):
            return tf.math.log(batch[2])

    weights = np.array([0.5] * 7 + [0.0], np.float32)  # its logarithm is -inf
    trainer = Weighted(
        model=lambda: keras.Sequential([keras.Input([4]), keras.layers.Dense(3)]),
        optimizer="adam",
        loss_fn="mse",
        monitoring=Monitoring(check_data=True),
        verbose=False,
    )
    message, steps = error_of(trainer, batches(ROWS, ROWS[:, :3], weights))

    assert steps == 1
    assert "example_weights" in message


@given(
    st.sampled_from(["uint8", "int8", "int32", "int64", "float32", "bfloat16"]),
    st.lists(st.integers(-128, 255), max_size=4),
    st.integers(1, 1000),
    st.sampled_from([None, -1, 255]),
)
@example("uint8", [240], 999, None)  # 999 is 231 in uint8
@example("uint8", [255], 9, -1)  # and -1 is 255
def test_bounds_need_not_be_numbers_of_the_labels_dtype(dtype, numbers, high, ignored):
    """Labels are in range if they are so as Python numbers."""
    labels = tf.cast(tf.constant(numbers, tf.int64), dtype)
    found = [number for number in tf.cast(labels, tf.int64).numpy() if number != ignored]
    holds, _, _ = in_range("labels", labels, 0, high, ignored)

    assert bool(holds) == all(0 <= number <= high for number in found)


@pytest.mark.thorough
def test_each_of_several_outputs_has_its_own_range():
    """The labels are named by their output."""

    def model():
        x = keras.Input([4])
        few = keras.layers.Dense(3, activation="softmax", name="few")(x)
        many = keras.layers.Dense(5, activation="softmax", name="many")(x)
        return keras.Model(x, {"few": few, "many": many})

    losses = dict.fromkeys(("few", "many"), "sparse_categorical_crossentropy")
    trainer = Trainer(
        model=model,
        optimizer="sgd",
        loss_fn=losses,
        monitoring=Monitoring(check_data=True),
        verbose=False,
    )

    def data(few, many):
        return batches(ROWS, {"few": few, "many": many})

    assert trainer.train(data(LABELS, with_last(LABELS, 4)), 2).step == 2
    message, _ = error_of(trainer, data(with_last(LABELS, 4), LABELS), 5)
    assert "labels of few from 0 to 2" in message


@pytest.mark.thorough
def test_on_replicas_and_compiled(mirrored):
    """The check is on the global batch, outside of what XLA compiles."""
    for arguments in ({"strategy": mirrored(2)}, {"jit_compile": True}):
        message, steps = error_of(trainer_of(**arguments), batches(ROWS, with_last(LABELS, 3)), 4)
        assert steps == 1
        assert "labels from 0 to 2" in message


@pytest.mark.thorough
def test_batches_of_a_program():
    """`train_on_batch` checks as well, and goes on with the next batch."""
    trainer = trainer_of()
    trainer.train_on_batch((ROWS, LABELS))
    with pytest.raises(DataError, match="labels from 0 to 2"):
        trainer.train_on_batch((ROWS, with_last(LABELS, 3)))

    trainer.train_on_batch((ROWS, LABELS))
    assert trainer.totals.attempted == 2


@pytest.mark.parametrize(
    ("loss", "right", "wrong"),
    [
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=9), [0, 4, 9], [5]),
        (keras.losses.sparse_categorical_crossentropy, [0, 4], [9]),
        (keras.losses.BinaryCrossentropy(label_smoothing=0.1), [0, 1], [-1]),
        (keras.losses.categorical_focal_crossentropy, [0.0, 0.5, 1.0], [1.5]),
        (keras.losses.Hinge(), [-1, 1, 7], None),
    ],
    ids=name_of,
)
def test_ranges(loss, right, wrong):
    """Classes are counted by the outputs; probabilities lie between 0 and 1."""

    def holds(labels):
        rules = label_rules(loss, tf.constant(labels), lambda: tf.zeros([2, 5]))
        return all(bool(found) for found, _, _ in rules)

    assert holds(right)
    assert wrong is None or not holds(wrong)


def test_a_class_of_the_user_may_have_any_labels():
    """A name alone says nothing."""

    class BinaryCrossentropy(keras.losses.Loss):
        """Of labels -1 and 1."""

        def call(self, y_true, y_pred):
            return y_true * y_pred

    assert label_rules(BinaryCrossentropy(), tf.zeros([2]), lambda: tf.zeros([2, 5])) == []
