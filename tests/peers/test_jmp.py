"""The cases of jmp 0.0.4's tests (`loss_scale_test.py` and `policy_test.py`)."""

import warnings

import pytest
import tensorflow as tf

from scaling import DynamicLossScale, FixedLossScale


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_scales_that_are_no_powers_of_two(scale):
    """Scales of 0 and 3, which jmp accepts, are refused here: one stops all learning, the other
    rounds every gradient twice.
    """
    for make in (FixedLossScale, lambda value: DynamicLossScale(initial_scale=value)):
        with pytest.raises(ValueError, match="must be a power of two"):
            make(scale)


def test_no_warnings():
    """Creating a rule warns about nothing."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        DynamicLossScale(initial_scale=2.0**15)

    assert not found


def test_state_is_a_tree():
    """The state is a structure of tensors: the scale first, then counters. The constants belong to
    the rule.
    """
    state = DynamicLossScale().initial_state()
    copied = tf.nest.map_structure(tf.identity, state)
    leaves = [leaf.numpy().item() for leaf in tf.nest.flatten(state)]

    assert leaves == [2.0**15, 0, 1]
    assert type(copied) is type(state)
    assert [leaf.numpy().item() for leaf in tf.nest.flatten(copied)] == leaves
