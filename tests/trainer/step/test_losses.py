"""What `compute_loss` returned: checked, named and weighted."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

import strategies
from trainer.step.losses import (
    by_objective,
    check_losses,
    losses_and_aux,
    mask_weightless,
    shared_with,
    weighted_mean,
    weighted_sum,
)
from trainer.step.objective import ONLY, Objective

SINGLE = [Objective(ONLY, None, (0,))]
TWO = [Objective("a", None, (0,)), Objective("b", None, (1,))]
BATCH = {"x": tf.ones([3, 2])}


def share_of(weights):
    """A share of examples with these weights."""
    weights = tf.constant(weights, tf.float32)
    return strategies.whole(tf.zeros([len(weights)]), weights)


@given(
    st.lists(
        st.tuples(st.integers(-8, 8), st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 4),
)
@example([(3, 0.0)], 2)  # no weight at all, and an empty share
def test_shares_add_up_to_the_weighted_mean(examples, parts):
    """L8: the means of all shares, empty ones included, add up to the mean over the global batch, or to
    0 if all weights are 0.
    """
    losses, weights = np.float32(list(zip(*examples, strict=True)))
    whole = strategies.whole(tf.constant(losses), tf.constant(weights))
    total = 0.0
    for index in range(parts):
        share = strategies.take(whole, index, parts)
        total += float(weighted_mean(share.batch, share, tf.constant(weights.sum())))
    expected = np.average(losses, weights=weights) if weights.any() else 0.0

    assert total == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_example_of_weight_0_does_not_count(bad):
    """A bad loss at weight 0 adds nothing and is masked; at another weight it shows."""
    losses = tf.constant([bad, 3.0])

    assert float(weighted_sum(losses, share_of([0.0, 2.0]))) == 6.0
    assert mask_weightless(losses, share_of([0.0, 2.0])).numpy().tolist() == [0.0, 3.0]
    assert not math.isfinite(weighted_sum(losses, share_of([1.0, 2.0])))
    assert not math.isfinite(mask_weightless(losses, share_of([1.0, 2.0])).numpy()[0])


def test_losses_may_come_with_aux():
    """Losses come alone or in a pair with aux, which is () if there is none."""
    losses, aux = tf.ones([3]), {"outputs": tf.zeros([3, 2])}
    alone, nothing = losses_and_aux(losses, BATCH, SINGLE)
    paired, found = losses_and_aux((losses, aux), BATCH, SINGLE)

    assert alone[ONLY].numpy().tolist() == paired[ONLY].numpy().tolist() == [1.0] * 3
    assert (nothing, found) == ((), aux)
    of_two, nothing = losses_and_aux(tf.ones([2]), {"x": tf.ones([2, 2])}, SINGLE)  # no pair
    assert (of_two[ONLY].shape, nothing) == ([2], ())


def test_a_loss_under_two_names_is_recognized():
    """Also behind identities, and as two outputs of a `tf.function`. Two calls give two losses, and an
    objective may have none.
    """

    @tf.function(autograph=False)
    def twice(x):
        return x, x

    @tf.function(autograph=False)
    def traced(x):
        one, other = twice(x), twice(x)
        cases = [
            ({"a": x, "b": x}, {"b"}),
            ({"a": x, "b": tf.identity(x)}, {"b"}),
            ({"a": one[0], "b": tf.identity(one[1])}, {"b"}),
            ({"a": one[0], "b": other[0]}, set()),
            ({"a": x, "b": x + 0.0}, set()),
            ({"a": x}, set()),
        ]
        for losses, shared in cases:
            assert shared_with(losses, ["a"], TWO[1:]) == shared_with((losses, ()), ["a"], TWO[1:])
            assert shared_with(losses, ["a"], TWO[1:]) == shared
        assert shared_with(x, ["a"], TWO[1:]) == set()
        return x

    traced(tf.ones([3]))


def test_losses_are_found_by_name():
    """Each objective gets the losses of its name, in the objectives' order; others are ignored."""
    losses = {"b": 2, "c": 3, "a": 1}

    assert list(by_objective(losses, TWO).items()) == [("a", 1), ("b", 2)]
    assert by_objective(2, SINGLE) == {ONLY: 2}


@pytest.mark.parametrize(("losses", "found"), [({"a": 1}, r"\['a'\]"), (1.0, "float")])
def test_each_objective_needs_a_loss(losses, found):
    """Losses without names, or without one of the names, are refused."""
    with pytest.raises(TypeError, match=f"must return a dict of losses with 'a', 'b'; got {found}"):
        by_objective(losses, TWO)


@pytest.mark.parametrize(
    ("losses", "error", "message"),
    [
        (tf.ones([3], tf.float16), TypeError, "`compute_loss`"),
        (tf.constant(1.0), ValueError, r"one loss per example, shape \(3,\); got shape \(\)"),
        (tf.ones([2]), ValueError, r"shape \(3,\); got shape \(2,\)"),
    ],
)
def test_losses_are_one_float32_per_example(losses, error, message):
    """Losses of another dtype or shape are refused."""
    with pytest.raises(error, match=message):
        check_losses(losses, BATCH)


def test_losses_of_unknown_size_are_checked_when_it_is_known():
    """Where the batch size is not static, the check is an op of the graph."""

    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None])])
    def checked(losses, batch):
        return check_losses(losses, batch)

    assert checked(tf.ones([2]), tf.ones([2])).numpy().tolist() == [1.0, 1.0]
    with pytest.raises(tf.errors.InvalidArgumentError, match="one loss per example"):
        checked(tf.ones([1]), tf.ones([2]))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_losses_that_hide_their_number_are_counted(jit_compile):
    """`tf.boolean_mask` does not tell how many losses it leaves, also in a batch of a known size. XLA
    cannot fail then: the losses are NaN, and the step is skipped.
    """

    @tf.function(jit_compile=jit_compile)
    def checked(mask):
        return check_losses(tf.boolean_mask(tf.ones([2]), mask), tf.ones([2]))

    assert checked(tf.constant([True, True])).numpy().tolist() == [1.0, 1.0]
    if jit_compile:
        assert np.isnan(checked(tf.constant([True, False]))).all()
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="one loss per example"):
            checked(tf.constant([True, False]))


@pytest.mark.parametrize(
    "losses",
    [None, (tf.ones([2]), {}, {}), [tf.ones([2]), tf.ones([2])], tf.ragged.constant([[1.0], []])],
    ids=lambda value: type(value).__name__,
)
def test_losses_are_one_tensor(losses):
    """A method without `return`, and three results instead of two, are named."""
    with pytest.raises(TypeError, match="`compute_loss`"):
        check_losses(losses, BATCH)


def test_losses_of_elements_need_weights_of_elements():
    """L8: losses of shape (examples, tokens) meet weights of that shape, and no others."""
    whole = strategies.whole(tf.zeros([3]), tf.constant([[1.0, 0.0], [2.0, 1.0], [0.0, 0.0]]))
    losses = tf.constant([[1.0, math.nan], [3.0, 5.0], [7.0, 9.0]])
    total = sum(
        float(weighted_sum(losses[one:other], strategies.take(whole, index, 2)))
        for index, (one, other) in enumerate([(0, 2), (2, 3)])
    )

    assert total == 12.0
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        weighted_sum(tf.ones([3, 2]), share_of([1.0, 1.0, 1.0]))
    assert str(error.value).startswith("`compute_loss` ")
    message = (
        "`compute_loss` must return losses of the shape of the weights; got shape (3,), and "
        "example_weights returned shape (3, 2). Each weight multiplies one loss. Leave out the mean "
        "over examples and elements, or sum the weights over the elements."
    )
    with pytest.raises(ValueError) as error:  # noqa: PT011
        weighted_sum(tf.ones([3]), whole)
    assert str(error.value) == message


def test_weights_of_elements_are_not_broadcast():
    """Where sizes are not static, an op of the graph compares those of losses and weights."""

    @tf.function(input_signature=[tf.TensorSpec([None, None]), tf.TensorSpec([None, None])])
    def summed(losses, weights):
        return weighted_sum(losses, strategies.whole(losses, weights))

    assert float(summed(tf.ones([2, 3]), tf.ones([2, 3]))) == 6.0
    with pytest.raises(tf.errors.InvalidArgumentError, match="losses of the shape of the weights"):
        summed(tf.ones([2, 3]), tf.ones([2, 1]))


def test_one_optimizer_takes_no_dict_of_losses():
    """Several losses of one optimizer are refused by an error that names them and the way out."""
    with pytest.raises(TypeError, match="`compute_loss`"):
        by_objective({"task": tf.ones([3]), "size": tf.ones([3])}, SINGLE)
