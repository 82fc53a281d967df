"""What the default methods ask of a batch, with errors that name the argument of each method."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import linear_model

from trainer import Monitoring, Trainer
from trainer.losses.default_batch import (
    check_inputs,
    described,
    from_library,
    reason_in,
    unpack,
)

ONE = np.ones([4, 1], np.float32)


def made(**arguments):
    """A trainer of a model with one input."""
    arguments = {"model": linear_model, "optimizer": "sgd", "loss_fn": "mse"} | arguments
    return Trainer(
        verbose=False, monitoring=Monitoring(check_gradients=False), jit_compile=False, **arguments
    )


CALLS = {
    "train_data": lambda data: made().train(data, 1, global_batch=4),
    "eval_data": lambda data: made().train((ONE, ONE), 1, global_batch=4, eval_data=data),
    "data": lambda data: made().evaluate(data, global_batch=4),
    "batch": lambda data: made().train_on_batch(data),
}


@pytest.mark.sampled
@pytest.mark.parametrize("argument", CALLS)
@pytest.mark.parametrize(
    ("data", "kind", "rule"),
    [
        ((ONE * 1j, ONE), TypeError, "must hold real numbers for a model with inputs of real"),
        ((np.array([["a"]] * 4), ONE), TypeError, "must hold real numbers for a model with inputs"),
        ((ONE, ONE * 1j), TypeError, "must have labels that are real numbers"),
        ((ONE, ONE, ONE[:, 0] * 1j), TypeError, "must have weights that are real numbers"),
        ((np.ones([4, 2]), ONE), ValueError, "must fit the model; got inputs "),
        (ONE, ValueError, r"must yield \(x, y\) or \(x, y, sample_weight\)"),
    ],
    ids=["complex", "text", "complex labels", "complex weights", "wide", "no labels"],
)
def test_a_batch_that_does_not_fit_is_refused_by_name(argument, data, kind, rule):
    """The error names the argument that the user has passed, in training and evaluation."""
    with pytest.raises(kind, match=f"^`{argument}` {rule}"):
        CALLS[argument](data)


def test_evaluation_data_without_labels_is_refused_before_training(tmp_path):
    """Not at the end of the run; and not after a checkpoint has been waited for."""
    trainer = made()
    with pytest.raises(ValueError, match=r"^`eval_data` must yield"):
        trainer.train((ONE, ONE), 1, global_batch=4, eval_data=ONE)
    with pytest.raises(RuntimeError, match="has not seen any data"):
        _ = trainer.totals
    with pytest.raises(ValueError, match=r"^`data` must yield"):
        made(model_dir=tmp_path).evaluate_continuously(ONE, global_batch=4, timeout_secs=0.1)


def test_the_error_of_a_model_that_does_not_fit():
    """It holds the shapes, and Keras's own sentence without the rest of its message."""
    with pytest.raises(ValueError, match="must fit the model") as error:
        made().predict(np.ones([4, 2], np.float32), global_batch=4)

    assert str(error.value).startswith(
        "`data` must fit the model; got inputs float32 (4, 2). The model raised ValueError: Input "
        "0 with name 'None' of layer 'dense"
    )
    assert str(error.value).endswith(
        "but received input with shape (4, 2). Compare them with what the model's first layer "
        "takes; calling the model on one batch shows where it fails."
    )


def test_an_error_of_the_users_own_model_stays_what_it_is():
    """What a line of the model raises is not blamed on the data."""

    class Broken(keras.Model):
        def call(self, inputs):
            raise KeyError("head")

    class Careless(keras.Model):
        def call(self, inputs):
            raise ValueError("my own check")

    with pytest.raises(KeyError, match="head"):
        made(model=Broken).predict(ONE, global_batch=4)
    with pytest.raises(ValueError, match="my own check") as error:
        made(model=Careless).predict(ONE, global_batch=4)
    assert "must fit" not in str(error.value)


def test_a_ragged_last_dimension_is_refused_where_the_model_has_a_fixed_one():
    """TensorFlow would fail in the middle of the step. A ragged dimension before the last is none."""
    ragged = tf.ragged.constant([[1.0], [1.0, 2.0]])
    with pytest.raises(TypeError) as error:
        made().evaluate(tf.data.Dataset.from_tensors((ragged, ONE[:2])))

    assert str(error.value) == (
        "`data` must have a last dimension of a fixed size for this model; got float32 (2, None), "
        "which is ragged there, for an input of shape (None, 1). Its products need rows of one "
        "size. Pad the data with to_tensor(), or make the last dimension of keras.Input None."
    )
    check_inputs(linear_model(), tf.RaggedTensor.from_tensor(ONE[None], ragged_rank=1), "data")


@pytest.mark.parametrize("as_dict", [False, True])
def test_inputs_in_a_dict_are_checked_by_their_names(as_dict):
    """The order of the data's keys and of the model's inputs may differ."""
    ends, fixed = keras.Input([None], name="a"), keras.Input([2], name="z")
    model = keras.Model({"a": ends, "z": fixed} if as_dict else [fixed, ends], [ends, fixed])
    ragged, dense = tf.ragged.constant([[1.0], [1.0, 2.0]]), tf.ones([2, 2])

    check_inputs(model, {"z": dense, "a": ragged}, "data")
    with pytest.raises(TypeError, match=r"for an input of shape \(None, 2\)"):
        check_inputs(model, {"a": dense, "z": ragged}, "data")


def test_inputs_in_the_place_of_labels_are_refused():
    """A data set of pairs holds inputs and labels, also for a model of two inputs, as in `fit`."""
    first, second = keras.Input([1]), keras.Input([1])
    trainer = made(model=keras.Model([first, second], first + second))
    with pytest.raises(ValueError, match="`data`"):
        trainer.predict(tf.data.Dataset.from_tensor_slices((ONE, ONE)).batch(4))
    assert trainer.predict(([ONE, ONE],), global_batch=4).tolist() == (2 * ONE).tolist()


def test_text_is_taken_by_a_model_with_inputs_of_text():
    """Only declared inputs of real numbers refuse it."""
    layer = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    model = keras.Sequential([keras.Input([1], dtype="string"), layer, keras.layers.Dense(1)])

    assert made(model=model).predict(np.array([["a"], ["b"]]), global_batch=2).shape == (2, 1)


def test_the_form_of_a_batch():
    """A pair, or three items; weights are None if there are none."""
    assert unpack((1, 2)) == (1, 2, None)
    assert unpack((1, 2, 3)) == (1, 2, 3)
    with pytest.raises(ValueError, match="got a tuple of 1"):
        unpack((tf.ones([4]),))
    assert described((tf.ones([2]), {"x": None})) == "(float32 (2,), {'x': None})"


def test_who_has_raised_an_error():
    """A plain error counts as a library's if its last line is there."""
    with pytest.raises(tf.errors.InvalidArgumentError) as library:
        tf.reshape(tf.ones([3]), [2])
    with pytest.raises(ValueError, match="mine") as own:
        raise ValueError("mine")

    assert reason_in("one\ntwo") == "one"
    assert reason_in("") == "no message"
    assert not from_library(own.value)
    assert from_library(library.value)


@pytest.mark.parametrize("count", [2, 3])
def test_predict_takes_the_inputs_of_a_model(count):
    """An array for each of several inputs, in a tuple or a list, is what the model is called with,
    as in Keras; so are a dict, and a tuple of inputs with labels.
    """

    def model():
        inputs = [keras.Input([1], name=f"x{at}") for at in range(count)]
        weighted = [10.0**at * each for at, each in enumerate(inputs)]
        return keras.Model(inputs, keras.layers.add(weighted))

    arrays = [np.full([4, 1], at + 1.0, np.float32) for at in range(count)]
    expected = sum(10.0**at * (at + 1) for at in range(count))
    named = {f"x{at}": each for at, each in enumerate(arrays)}
    for data in (tuple(arrays), arrays, (tuple(arrays),), named, (tuple(arrays), ONE)):
        found = made(model=model, optimizer=None).predict(data, global_batch=2)
        np.testing.assert_array_equal(found, np.full([4, 1], expected))


def test_an_own_predict_batch_gets_the_data_as_it_is():
    """Two arrays for a model of two inputs reach a method of the user's as they are."""

    class Own(Trainer):
        def predict_batch(self, batch):
            first, second = batch
            return self.model([first, 2 * second])

    def model():
        inputs = [keras.Input([1]), keras.Input([1])]
        return keras.Model(inputs, keras.layers.add(inputs))

    found = Own(model=model, verbose=False).predict((ONE, ONE), global_batch=2)
    np.testing.assert_array_equal(found, 3 * ONE)
