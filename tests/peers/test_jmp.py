"""The cases of jmp 0.0.4's tests (`loss_scale_test.py` and `policy_test.py`)."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import scaling
from scaling import DynamicLossScale, FixedLossScale, NoLossScale, Precision


def test_no_op_loss_scale():
    """No scaling returns the same values."""
    state = NoLossScale().initial_state()

    assert float(scaling.scale_loss(tf.constant(3.0), state)) == 3.0
    assert float(scaling.unscale_gradients({"a": tf.constant(3.0)}, state)["a"]) == 3.0


@pytest.mark.parametrize("scale", [2.0, 4.0])
@pytest.mark.parametrize("kind", ["fixed", "dynamic"])
def test_static_loss_scale(kind, scale):
    """1 scaled is the scale, and back."""
    rule = FixedLossScale(scale) if kind == "fixed" else DynamicLossScale(initial_scale=scale)
    state = rule.initial_state()

    assert float(scaling.scale_loss(tf.constant(1.0), state)) == scale
    assert float(scaling.unscale_gradients({"a": tf.constant(scale)}, state)["a"]) == 1.0


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


@pytest.mark.parametrize(("period", "factor"), [(20, 2.0), (30, 4.0)])
def test_adjust_increases_on_finite(period, factor):
    """The scale stays for all but the last finite step of a period, while the counter counts; on the
    last it grows and the counter restarts.
    """
    rule = scaling.preset(
        "jmp",
        initial_scale=8.0,
        growth_interval=period,
        growth_factor=factor,
        backoff_factor=1 / factor,
    )
    state = rule.initial_state()
    for count in range(1, period):
        state = rule.advance(state, True)
        assert (float(state.loss_scale), int(state.finite_steps)) == (8.0, count)
    state = rule.advance(state, True)

    assert (float(state.loss_scale), int(state.finite_steps)) == (8.0 * factor, 0)


@pytest.mark.parametrize("min_scale", [None, 0.25])
@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_adjust_reduces_on_nonfinite(factor, min_scale):
    """Every overflow divides the scale, down to 1 or to the given floor, for a hundred steps."""
    floor = {} if min_scale is None else {"min_scale": min_scale}
    rule = scaling.preset(
        "jmp", initial_scale=8.0, growth_factor=factor, backoff_factor=1 / factor, **floor
    )
    state = rule.initial_state()
    for count in range(100):
        state = rule.advance(state, False)
        expected = max(1.0 if min_scale is None else min_scale, 8.0 / factor ** (count + 1))
        assert (float(state.loss_scale), int(state.finite_steps)) == (expected, 0)


def test_an_integer_scale():
    """An integer scale becomes float32. In jmp it stays an integer, with a warning."""
    with warnings.catch_warnings(record=True) as found:
        state = DynamicLossScale(initial_scale=2, min_scale=1).initial_state()

    assert not found
    assert state.loss_scale.dtype == tf.float32


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_all_finite(value):
    """Nothing, and a tree of ones, are finite; one inf or NaN anywhere is not."""
    one, bad = tf.ones([]), tf.constant(value)

    assert all(map(bool, map(scaling.all_finite, [None, {}, {"a": one, "b": one}])))
    for tree in ({"a": bad}, {"a": one, "b": bad}, {"a": bad, "b": one}):
        assert not bool(scaling.all_finite(tree))


DTYPES = ["float16", "bfloat16", "float32"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [np.ones, tf.ones])
def test_policy_casts(make, dtype):
    """Floats are cast to the compute dtype, and variables are float32 in every precision."""
    precision = Precision(dtype if dtype == "float32" else f"mixed_{dtype}")
    tree = {"a": make([])}

    assert precision.compute_dtype == dtype
    assert precision.variable_dtype == "float32"
    assert precision.cast_to_compute(tree)["a"].dtype == dtype
    assert precision.cast_to_variable(precision.cast_to_compute(tree))["a"].dtype == tf.float32


def test_unknown_policy():
    """A name that is almost a precision is refused."""
    with pytest.raises(ValueError, match="must be one of"):
        Precision("compute_float16")


def test_casts_leave_other_leaves_alone():
    """Casts touch floats only: integers and objects stay as they are."""
    tree = {"h": tf.ones([], tf.float16), "f": tf.ones([]), "i": tf.ones([], tf.int16)}
    precision = Precision("mixed_float16")
    half, full = precision.cast_to_compute(tree), precision.cast_to_variable(tree)

    assert [half[key].dtype.name for key in "hfi"] == ["float16", "float16", "int16"]
    assert [full[key].dtype.name for key in "hfi"] == ["float32", "float32", "int16"]
