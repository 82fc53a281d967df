"""The microbatches of a share, one after the other."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from plans import Pair, keras_model, pass_inputs_of, plan_of

import strategies
from trainer.step.accumulate import (
    accumulate,
    any_rows,
    lowest,
    maxima,
    microbatch_inputs,
    present,
    real_rows,
    sums_and_first,
    with_missing,
    zeros_like_spec,
)
from trainer.step.microbatch import Contribution

pytestmark = pytest.mark.sampled


def accumulated(plan, batch, parts, weights=None):
    """The results of a whole batch in microbatches, in a graph."""
    inputs = pass_inputs_of(plan, batch, weights, parts=parts)

    @tf.function(autograph=False)
    def run():
        return accumulate(plan.groups[0].differentiate, inputs)

    return run()


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_microbatches_add_up_to_the_whole_batch(parts):
    """L8: gradients and losses are those of the whole batch, even if a microbatch is empty."""
    batch, weights = tf.constant([1.0, 2.0, 4.0]), [1.0, 2.0, 1.0]
    whole = accumulated(plan_of(Pair()), batch, 1, weights)
    summed = accumulated(plan_of(Pair(), num_microbatches=parts), batch, parts, weights)

    for expected, found in zip(
        tf.nest.flatten(whole.contribution), tf.nest.flatten(summed.contribution), strict=True
    ):
        assert float(found) == float(expected)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_statistics_move_once_in_a_step(parts):
    """L8: BatchNorm's mean moves as far with several microbatches as with the whole batch."""
    model = keras_model()
    norm = model.layers[1]
    batch = tf.constant([[1.0, 2.0], [3.0, 5.0], [-1.0, 4.0]])
    plan = plan_of(model, num_microbatches=parts)
    position = [id(variable) for variable in plan.held_back].index(id(norm.moving_mean))
    found = accumulated(plan, batch, parts).written[str(position)]
    mean = model.layers[0](batch).numpy().mean(axis=0)

    np.testing.assert_allclose(found, mean * (1 - norm.momentum), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("parts", "static"),
    [
        *[(parts, True) for parts in (1, 2, 3, 4)],
        *[(parts, False) for parts in (1, 2, 3, 4)],
    ],
)
def test_aux_is_that_of_the_real_examples(parts, static):
    """Aux of all microbatches is joined in order, without rows of empty microbatches."""
    model = Pair()

    def compute_loss(batch, training):
        del training
        return model.first.weight * model.second.weight * batch, {"twice": 2 * batch}

    plan = plan_of(model, compute_loss, num_microbatches=parts)

    @tf.function(input_signature=[tf.TensorSpec([3 if static else None])], autograph=False)
    def run(batch):
        weights = tf.ones_like(batch)
        inputs = pass_inputs_of(plan, tf.ones([3]), parts=parts)
        inputs = inputs._replace(share=strategies.whole(batch, weights))
        return accumulate(plan.groups[0].differentiate, inputs).rows.aux

    assert run(tf.constant([1.0, 2.0, 3.0]))["twice"].numpy().tolist() == [2.0, 4.0, 6.0]


def test_flags_are_summed():
    """Bad losses are counted over all microbatches."""
    plan = plan_of(Pair(), num_microbatches=2)
    found = accumulated(plan, tf.constant([np.nan, np.inf, 1.0, np.nan]), 2).nonfinite

    assert (float(found.loss), found.losses.numpy().tolist()) == (2.0, [1.0, 2.0])


def test_a_missing_gradient_stays_missing():
    """A variable that the loss does not reach has no gradient after several microbatches either."""
    model = Pair()

    def compute_loss(batch, training):
        del training
        return model.first.weight * batch

    plan = plan_of(model, compute_loss, num_microbatches=2)
    first, second = accumulated(plan, tf.constant([1.0, 3.0]), 2).contribution.gradients

    assert (float(first), second) == (2.0, None)


def test_microbatch_inputs():
    """A microbatch has its part of the examples, its own keys, and the given values."""
    plan = plan_of(keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]))
    inputs = pass_inputs_of(plan, tf.constant([[1.0], [2.0], [3.0]]), parts=2)
    keys = tf.reshape(tf.range(4, dtype=tf.int64), [2, 1, 2])
    second = microbatch_inputs(inputs._replace(keys=keys), 1)

    assert second.share.batch.numpy().tolist() == [[3.0]]
    assert second.keys.numpy().tolist() == [[2, 3]]
    assert second.values is inputs.values
    assert second.global_batch is inputs.global_batch


def test_the_first_microbatch_gives_the_integers():
    """A counter has no mean: it takes the first microbatch's value, and floats are summed."""
    total = {"0": tf.constant(7), "1": tf.constant(0.5)}
    new = {"0": tf.constant(9), "1": tf.constant(0.25)}
    found = [sums_and_first(total, new, tf.constant(index)) for index in (0, 1)]

    assert [(int(each["0"]), float(each["1"])) for each in found] == [(9, 0.75), (7, 0.75)]


@pytest.mark.parametrize(("examples", "expected"), [(0, [1.0, 2.0]), (2, [5.0, 2.0])])
def test_an_empty_share_has_no_maximum(examples, expected):
    """L20: values that replace variables are combined by their maximum, without empty shares."""
    share = strategies.Share((), (), tf.constant(examples))
    highest, new = {"0": tf.constant([1.0, 2.0])}, {"0": tf.constant([5.0, -3.0])}

    assert maxima(highest, new, share)["0"].numpy().tolist() == expected
    assert float(lowest(tf.TensorSpec([], tf.float32))) == tf.float32.min


@pytest.mark.parametrize("examples", [0, 1])
def test_the_row_of_an_empty_share_is_dropped(examples):
    """An empty share has one placeholder row, which is cut off."""
    share = strategies.Share((), (), tf.constant(examples))
    found = real_rows({"a": tf.zeros([1, 2])}, share)

    assert found["a"].shape == [examples, 2]


def test_missing_gradients_are_left_out_and_put_back():
    """What `present` leaves out, `with_missing` puts back in the same places."""
    gradients = [None, tf.constant(1.0), None, tf.constant(2.0)]
    whole = Contribution(gradients, tf.constant(0.0), tf.constant(0.0))
    left = present(whole)

    assert len(left.gradients) == 2
    assert with_missing(left, whole).gradients == gradients


def test_any_rows():
    """Only the first dimension is open."""
    assert any_rows(tf.TensorSpec([3, 2])).as_list() == [None, 2]
    assert zeros_like_spec(tf.TensorSpec([2], tf.float64)).numpy().tolist() == [0.0, 0.0]
