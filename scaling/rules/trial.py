"""Tries a rule of the user's own before it is used in a step.

A mistake in `advance` would otherwise show in the middle of training, as an error of TensorFlow
that does not name the rule, or as a scale that rounds gradients.
"""

from typing import Any

import tensorflow as tf

from scaling.base.argument_checks import shown
from scaling.base.number_formats import is_power_of_two
from scaling.base.verdict import Cause, Verdict

# Steps of each kind that the rule is tried on: overflows, then finite steps.
TRIED_STEPS = 3


def try_rule(rule: Any) -> None:
    """Raises an error unless a few steps of a rule keep its promises.

    The rules of this package are not tried; their tests do that.

    Args:
        rule: an object with the methods of a `LossScaleRule`.

    Raises:
        TypeError: if `advance` cannot be traced, or changes the type, a shape or a dtype of the
            state.
        ValueError: if a loss scale is not a power of two.
    """
    if type(rule).__module__.startswith("scaling."):
        return
    name = type(rule).__name__
    state = checked_initial_state(rule, name)
    needs = bool(getattr(rule, "needs_magnitude", False))

    def advance(state: Any, grads_finite: tf.Tensor) -> Any:
        cause = tf.where(grads_finite, int(Cause.NONE), int(Cause.BACKWARD))
        magnitude = tf.where(grads_finite, 1.0, float("inf")) if needs else None
        return checked_next(
            rule.advance(state, Verdict(grads_finite, cause, magnitude)), state, name
        )

    try:
        traced = tf.function(advance, autograph=False).get_concrete_function(
            state, tf.TensorSpec([], tf.bool)
        )
    except RuleError:
        raise
    except Exception as error:
        raise RuleError(
            f"`{name}.advance` must be a function of tensors, without Python conditions on their "
            f"values or NumPy; got {type(error).__name__}: {first_line(error)} It runs "
            "in the graph of a step. Use tf.where in place of `if`, and TensorFlow's functions in "
            "place of NumPy's."
        ) from error
    for grads_finite in [False] * TRIED_STEPS + [True] * TRIED_STEPS:
        state = type(state)(*tf.nest.flatten(traced(state, tf.constant(grads_finite))))
        outcome = "a finite step" if grads_finite else "an overflow"
        check_scale(state, f"{name}.advance", f" after {outcome}")


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text, which may be empty."""
    return next(iter(str(error).splitlines()), "")


class RuleError(TypeError):
    """Raised when a rule of the user's own cannot be used."""


def checked_initial_state(rule: Any, name: str) -> Any:
    """Returns a rule's state before the first step, checked."""
    state = rule.initial_state()
    if not isinstance(state, tuple) or getattr(state, "_fields", ())[:1] != ("loss_scale",):
        raise RuleError(
            f"`{name}.initial_state` must return a NamedTuple whose first field is loss_scale; got "
            f"{shown(state)}. Each field becomes a variable, which checkpoints know by its name. "
            "Define a NamedTuple of tensors for the rule's state."
        )
    scale = tf.convert_to_tensor(state[0])
    if scale.dtype != tf.float32 or scale.shape.rank != 0:
        raise RuleError(
            f"`{name}.initial_state` must return a loss_scale of shape () and dtype float32; got "
            f"shape {scale.shape} and {scale.dtype.name}. It multiplies a float32 loss. Use "
            "tf.constant(2.0**15)."
        )
    state = type(state)(*(tf.convert_to_tensor(field) for field in state))
    check_scale(state, f"{name}.initial_state", "")
    return state


def checked_next(after: Any, before: Any, name: str) -> Any:
    """Returns the state after a step; raises RuleError unless it is like the one before."""
    if type(after) is not type(before):
        raise RuleError(
            f"`{name}.advance` must return a {type(before).__name__}, the type of its state; got "
            f"{shown(after)}. The state is kept in variables from step to step. Return "
            "state._replace(...)."
        )
    tensors = [tf.convert_to_tensor(field) for field in after]
    for field, new, old in zip(before._fields, tensors, before, strict=True):
        if new.dtype != old.dtype or not new.shape.is_compatible_with(old.shape):
            raise RuleError(
                f"`{name}.advance` must keep the shape and dtype of each field; got {field} of "
                f"shape {new.shape} and {new.dtype.name}, where the state had {old.shape} and "
                f"{old.dtype.name}. The state is kept in variables from step to step. Cast the "
                "new value with tf.cast."
            )
    return after


def check_scale(state: Any, place: str, when: str) -> None:
    """Raises ValueError unless the loss scale of a state is a power of two."""
    known = tf.get_static_value(state.loss_scale)  # None in a graph, for what is computed there
    scale = None if known is None else float(known)
    if scale is not None and not is_power_of_two(scale):
        raise ValueError(
            f"`{place}` must return a loss_scale that is a power of two between 2^-126 and 2^126; "
            f"got {shown(scale)}{when}. Only powers of two scale and unscale gradients without "
            "changing their bits. Multiply and divide by powers of two, and bound the result."
        )
