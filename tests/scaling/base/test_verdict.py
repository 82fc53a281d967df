"""The cause of a step, and the verdict that rules receive."""

import itertools

import generators
import pytest
import tensorflow as tf

import scaling
from scaling import Cause, Verdict, as_verdict


def expected_cause(weights, loss, local, summed, unscaled, at_min):
    """The cause in plain Python: the first stage of the step that was not finite."""
    overflow = {Cause.BACKWARD, Cause.REDUCTION}
    stages = zip(list(Cause)[1:6], (weights, loss, local, summed, unscaled), strict=True)
    cause = next((cause for cause, finite in stages if not finite), Cause.NONE)
    return Cause.MODEL if at_min and cause in overflow else cause


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_the_cause_is_the_first_place_that_was_not_finite(mode):
    """L17: in all 64 combinations of flags the cause is the first stage that was not finite, and
    L15: eager, graph and XLA agree.
    """
    find = scaling.find_cause
    if mode != "eager":
        find = tf.function(find, jit_compile=mode == "xla")
    for flags in itertools.product([False, True], repeat=6):
        weights, loss, local, summed, unscaled, at_min = map(tf.constant, flags)
        cause = find(
            weights_finite=weights,
            loss_finite=loss,
            local_gradients_finite=local,
            summed_gradients_finite=summed,
            unscaled_gradients_finite=unscaled,
            at_min_scale=at_min,
        )

        assert expected_cause(*flags) == int(cause), flags
        assert ((), tf.int32) == (cause.shape, cause.dtype)


def test_weights_count_as_finite_by_default():
    """L17: `weights_finite` and `at_min_scale` may be left out."""
    cause = scaling.find_cause(
        loss_finite=True,
        local_gradients_finite=False,
        summed_gradients_finite=False,
        unscaled_gradients_finite=False,
    )

    assert int(cause) == Cause.BACKWARD


def test_which_causes_move_a_scale():
    """L17: steps that were not finite in the backward pass or the reduction are overflows. Only
    overflows and finite steps move the scale.
    """
    for finite, cause in itertools.product([False, True], Cause):
        verdict = Verdict(tf.constant(finite), cause)
        curable = cause in generators.CURABLE

        assert (not finite and curable) == bool(verdict.overflowed), (finite, cause)
        assert (finite or curable) == bool(verdict.moves_scale), (finite, cause)


def test_a_bool_becomes_a_verdict():
    """A bare False is an overflow, and a `Verdict` keeps its cause and its magnitude."""
    bare = as_verdict(False)
    whole = as_verdict(Verdict(tf.constant(False), Cause.MODEL, tf.constant(3.0)))

    assert (bool(bare.grads_finite), bare.cause, bare.max_magnitude) == (
        False,
        Cause.BACKWARD,
        None,
    )
    assert (bool(whole.grads_finite), whole.cause) == (False, Cause.MODEL)
    assert float(whole.max_magnitude) == 3.0


@pytest.mark.parametrize("verdict", [1.0, [True, False]])
def test_what_is_not_a_verdict_is_an_error(verdict):
    """A verdict for each gradient would give a scale for each."""
    for value, name in ((verdict, "verdict"), (Verdict(verdict), "verdict.grads_finite")):
        with pytest.raises(ValueError, match=f"^`{name}` must be"):
            as_verdict(value)
