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
    microbatch_inputs,
    present,
    real_rows,
    unless_empty,
    with_missing,
    with_written,
    zeros_like_spec,
)
from trainer.step.microbatch import Contribution


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


def test_each_microbatch_reads_what_the_one_before_wrote():
    """Two microbatches move BatchNorm's mean twice; an empty one does not move it."""
    model = keras_model()
    norm = model.layers[1]
    position = None
    for parts, moves in [(1, 1), (2, 2), (3, 2)]:
        plan = plan_of(model, num_microbatches=parts)
        position = [id(variable) for variable in plan.held_back].index(id(norm.moving_mean))
        found = accumulated(plan, tf.ones([2, 2]), parts).written[str(position)]
        mean = model.layers[0](tf.ones([1, 2])).numpy()[0]
        expected = mean * (1 - norm.momentum**moves)

        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


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
        return accumulate(plan.groups[0].differentiate, inputs).aux

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
    second = microbatch_inputs(inputs._replace(keys=keys), 1, ["new"])

    assert second.share.batch.numpy().tolist() == [[3.0]]
    assert second.keys.numpy().tolist() == [[2, 3]]
    assert second.values == ["new"]
    assert second.global_batch is inputs.global_batch


def test_with_written():
    """Written values replace those at their positions."""
    assert with_written([1, 2, 3], {"1": 5}) == [1, 5, 3]


@pytest.mark.parametrize(("examples", "expected"), [(0, 1.0), (2, 5.0)])
def test_an_empty_share_writes_nothing(examples, expected):
    """A share without examples keeps the values before it."""
    share = strategies.Share((), (), tf.constant(examples))

    assert float(unless_empty(share, {"0": tf.constant(5.0)}, [tf.constant(1.0)])["0"]) == expected


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
