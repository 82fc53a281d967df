"""A rule of the user's own is tried before it is used, and an error names what is wrong with it."""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import scaling
from scaling.rules.trial import try_rule

State = scaling.FixedLossScaleState


class Counted(NamedTuple):
    """A state with a counter."""

    loss_scale: tf.Tensor
    count: tf.Tensor


def raising(error):
    """Raises an error."""
    raise error


def start():
    """Returns a state at 2^15."""
    return State(tf.constant(2.0**15))


def counted():
    """Returns a state with a counter."""
    return Counted(tf.constant(4.0), tf.constant(0))


def rule(initial_state, advance, needs_magnitude=False):
    """Returns a rule made of two functions."""
    members = {
        "needs_magnitude": needs_magnitude,
        "initial_state": lambda _: initial_state(),
        "advance": lambda _, state, verdict: advance(state, verdict),
    }
    return type("Mine", (), members)()


BROKEN = {
    "another factor": (
        rule(start, lambda state, _: State(state.loss_scale * 0.3)),
        "`Mine.advance` must return a loss_scale that is a power of two between 2^-126 and 2^126; "
        "got 9830.400390625 after an overflow. Only powers of two scale and unscale gradients "
        "without changing their bits. Multiply and divide by powers of two, and bound the result.",
    ),
    "three after a finite step": (
        rule(
            start,
            lambda state, verdict: State(tf.where(verdict.grads_finite, 3.0, state.loss_scale)),
        ),
        "`Mine.advance` must return a loss_scale that is a power of two between 2^-126 and 2^126; "
        "got 3.0 after a finite step. Only powers of two scale and unscale gradients without "
        "changing their bits. Multiply and divide by powers of two, and bound the result.",
    ),
    "unbounded": (
        rule(start, lambda state, _: State(state.loss_scale * 2.0**60)),
        "`Mine.advance` must return a loss_scale that is a power of two between 2^-126 and 2^126; "
        "got inf after an overflow. Only powers of two scale and unscale "
        "gradients without changing their bits. Multiply and divide by powers of two, and bound "
        "the result.",
    ),
    "initial": (
        rule(lambda: State(tf.constant(3.0)), lambda state, _: state),
        "`Mine.initial_state` must return a loss_scale that is a power of two between 2^-126 and "
        "2^126; got 3.0. Only powers of two scale and unscale gradients without changing their "
        "bits. Multiply and divide by powers of two, and bound the result.",
    ),
    "another dtype": (
        rule(counted, lambda state, _: state._replace(count=tf.cast(state.count, tf.int64))),
        "`Mine.advance` must keep the shape and dtype of each field; got count of shape () and "
        "int64, where the state had () and int32. The state is kept in variables from step to "
        "step. Cast the new value with tf.cast.",
    ),
    "another type": (
        rule(start, lambda _state, _: 8.0),
        "`Mine.advance` must return a FixedLossScaleState, the type of its state; got 8.0. The "
        "state is kept in variables from step to step. Return state._replace(...).",
    ),
    "no state": (
        rule(lambda: 8.0, lambda state, _: state),
        "`Mine.initial_state` must return a NamedTuple whose first field is loss_scale; got 8.0. "
        "Each field becomes a variable, which checkpoints know by its name. Define a NamedTuple of "
        "tensors for the rule's state.",
    ),
    "integer": (
        rule(lambda: State(tf.constant(8)), lambda state, _: state),
        "`Mine.initial_state` must return a loss_scale of shape () and dtype float32; got shape () "
        "and int32. It multiplies a float32 loss. Use tf.constant(2.0**15).",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_says_what_a_rule_breaks(name):
    """A scale that rounds, and a state that no variable can keep, are refused with their values."""
    broken, message = BROKEN[name]
    with pytest.raises((TypeError, ValueError)) as error:
        try_rule(broken)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("advance", "reason"),
    [
        (
            lambda state, verdict: state if verdict.grads_finite else State(state.loss_scale / 2),
            "OperatorNotAllowedInGraphError: Using a symbolic",
        ),
        (lambda state, _: State(np.maximum(state.loss_scale, 1.0)), "NotImplementedError: Cannot"),
        (lambda *_: raising(NotImplementedError()), "NotImplementedError: "),
    ],
)
def test_a_rule_that_cannot_be_traced_is_named(advance, reason):
    """Python conditions and NumPy are an error that names the rule and what to use."""
    with pytest.raises(TypeError) as error:
        try_rule(rule(start, advance))
    text = str(error.value)
    assert text.startswith(
        "`Mine.advance` must be a function of tensors, without Python conditions on their values "
        f"or NumPy; got {reason}"
    )
    assert text.endswith(
        "It runs in the graph of a step. Use tf.where in place of `if`, and TensorFlow's functions "
        "in place of NumPy's."
    )


def test_good_rules_pass():
    """Rules that count, and that read the magnitude, are accepted; ours are not tried at all."""
    try_rule(
        rule(
            counted,
            lambda state, verdict: Counted(
                tf.where(verdict.overflowed, state.loss_scale / 2, state.loss_scale),
                state.count + 1,
            ),
        )
    )
    try_rule(
        rule(
            start,
            lambda state, verdict: State(
                tf.where(verdict.max_magnitude > 1.0, state.loss_scale / 2, state.loss_scale)
            ),
            needs_magnitude=True,
        )
    )
    ours = scaling.DynamicLossScale()
    object.__setattr__(ours, "initial_scale", 3.0)
    try_rule(ours)
