"""The interface of a rule, and the helpers and argument checks that rules share.

A rule answers three questions: where the scale starts (`initial_state`), how a step's
verdict moves it (`advance`), and whether it needs the largest gradient magnitude
(`needs_magnitude`). A rule holds no variables. Each rule has its own NamedTuple type for its
state, whose first field is always `loss_scale`: shape (), float32, a power of two.
"""

import dataclasses
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from scaling.base.argument_checks import as_tensor, check_integer, check_scalar, shown
from scaling.base.number_formats import (
    LARGEST_SCALE,
    as_float,
    check_power_of_two,
    is_power_of_two,
    nearest_power_of_two,
    power_of_two_text,
)
from scaling.base.types import RuleState
from scaling.base.verdict import Verdict, VerdictLike

MAX_COUNT = 2**30  # counters are int32

# Values that errors suggest if the power of two nearest to the rejected value is unsuitable.
USUAL_INITIAL_SCALE = 2.0**15
USUAL_MIN_SCALE = 2.0**-14
USUAL_MAX_SCALE = 2.0**24

State = TypeVar("State", bound=RuleState)


class LossScaleRule(Protocol):
    """The interface of a rule. Any class with these three members can be used as a rule.

    `advance` runs in the graph of a step, so it chooses with `tf.where`, not with `if`. The loss
    scale must always be a power of two between 2^-126 and 2^126: others round the gradients. A
    `Trainer` tries a few steps of your rule before training, and refuses one that breaks this.

    Example:
        A scale that halves at every overflow and never grows, for a `LossScaler` or a Trainer:

        >>> import scaling
        >>> class OnlyDown:
        ...     needs_magnitude = False
        ...     def initial_state(self):
        ...         return scaling.FixedLossScaleState(tf.constant(2.0**15))
        ...     def advance(self, state, verdict):
        ...         factor = tf.where(scaling.as_verdict(verdict).overflowed, 0.5, 1.0)
        ...         return state._replace(loss_scale=tf.maximum(state.loss_scale * factor, 1.0))
        >>> rule = OnlyDown()
        >>> float(rule.advance(rule.initial_state(), False).loss_scale)
        16384.0
    """

    @property
    def needs_magnitude(self) -> bool:
        """Whether `advance` reads `Verdict.max_magnitude`, which takes a pass over gradients."""

    def initial_state(self) -> RuleState:
        """Returns the state before the first step: a NamedTuple of tensors."""

    # `state` is Any because each rule accepts only its own type of state.
    def advance(self, state: Any, verdict: VerdictLike) -> RuleState:
        """Returns the state after a step; same type, shapes and dtypes as `state`."""


def select_state(condition: tf.Tensor, if_true: State, if_false: State) -> State:
    """Returns one of two states, field by field.

    Args:
        condition: shape (), bool.
        if_true: the state to return if the condition is true.
        if_false: the state to return otherwise.
    """
    pairs = zip(if_true, if_false, strict=True)
    return type(if_false)(*(tf.where(condition, new, old) for new, old in pairs))


def require_magnitude(verdict: Verdict, rule: str, loss_scale: tf.Tensor) -> tf.Tensor:
    """Returns the verdict's largest magnitude: float32, with the shape of `loss_scale`, ().

    Raises:
        TypeError: if the magnitude has no float dtype.
        ValueError: if the verdict has no magnitude, or it is no scalar.
    """
    if verdict.max_magnitude is None:
        raise ValueError(
            f"`verdict.max_magnitude` must be given to {rule}; got None. This rule chooses the "
            "scale from the largest unscaled gradient magnitude. Pass "
            "scaling.Verdict(grads_finite, cause, max_magnitude)."
        )
    magnitude = as_tensor("verdict.max_magnitude", verdict.max_magnitude)
    why = "It is the largest magnitude of all gradients."
    remedy = "Pass a float32 tensor of shape ()"
    if not magnitude.dtype.is_floating:
        raise TypeError(
            f"`verdict.max_magnitude` must have a float dtype; got {magnitude.dtype.name}. {why} "
            f"{remedy}."
        )
    if tf.convert_to_tensor(loss_scale).shape.rank == 0:  # a state may hold many scales at once
        check_scalar("verdict.max_magnitude", magnitude, why, remedy)
    return tf.cast(magnitude, tf.float32)


def moves_by_magnitude(verdict: Verdict, magnitude: tf.Tensor) -> tf.Tensor:
    """Returns whether a step may move a rule that goes by magnitudes: shape (), bool.

    A finite step whose largest magnitude is inf or NaN contradicts itself, so it moves nothing.
    In the statistics of a rule, such a number would never go away.
    """
    measured = tf.convert_to_tensor(verdict.grads_finite) & tf.math.is_finite(magnitude)
    return verdict.overflowed | measured


def check_bounds(rule: Any) -> None:
    """Checks the `initial_scale`, `min_scale` and `max_scale` of a rule.

    Raises:
        ValueError: if a value is not a power of two, or the values are not in order.
    """
    initial, low, high = rule.initial_scale, rule.min_scale, rule.max_scale
    # Suggest only scales within these limits: no others are useful for float16 gradients.
    check_power_of_two(
        "initial_scale",
        initial,
        nearest_power_of_two(initial, USUAL_INITIAL_SCALE, low=2.0**-24, high=2.0**40),
    )
    # Suggest bounds that differ by at least a factor of 2, so that the scale can move.
    start = as_float(initial)
    highest_floor = (as_float(high) if is_power_of_two(high) else LARGEST_SCALE) / 2
    usual = min(USUAL_MIN_SCALE, start, highest_floor)
    check_power_of_two("min_scale", low, nearest_power_of_two(low, usual, high=highest_floor))
    lowest_ceiling = min(2 * as_float(low), LARGEST_SCALE)
    usual = max(USUAL_MAX_SCALE, start, lowest_ceiling)
    check_power_of_two("max_scale", high, nearest_power_of_two(high, usual, low=lowest_ceiling))
    if low > high:
        raise ValueError(
            f"`min_scale` must be at most `max_scale`; got {shown(low)} and {high!r}. No scale "
            "could satisfy both bounds. Lower `min_scale` or raise `max_scale`."
        )
    if not low <= initial <= high:
        bound, limit = ("max_scale", high) if initial > high else ("min_scale", low)
        raise ValueError(
            f"`initial_scale` must lie between `min_scale` ({power_of_two_text(low)}) and "
            f"`max_scale` ({power_of_two_text(high)}); got {shown(initial)}. The scale never "
            f"leaves these bounds. Set `initial_scale` to {power_of_two_text(limit)}, or `{bound}` "
            f"to {power_of_two_text(initial)}."
        )


def check_factors(growth_factor: float, backoff_factor: float) -> None:
    """Raises ValueError unless both are powers of two, one above 1 and the other below 1."""
    check_power_of_two("growth_factor", growth_factor, suggestion=2.0)
    check_power_of_two("backoff_factor", backoff_factor, suggestion=0.5)
    if growth_factor <= 1:
        raise ValueError(
            f"`growth_factor` must be greater than 1; got {shown(growth_factor)}. A factor of 1 or "
            "less would never raise the scale. Use 2.0, which doubles it."
        )
    if backoff_factor >= 1:
        raise ValueError(
            f"`backoff_factor` must be less than 1; got {shown(backoff_factor)}. A factor of 1 or "
            "more would never lower the scale after an overflow. Use 0.5, which halves it."
        )


def check_rule(rule: Any) -> None:
    """Raises TypeError unless `rule` has the methods of a rule."""
    is_rule = hasattr(rule, "initial_state") and hasattr(rule, "advance")
    if not is_rule or isinstance(rule, type):
        raise TypeError(
            f"`rule` must be a loss-scale rule; got {shown(rule)}. A rule is an object with the "
            "methods initial_state() and advance(). Use for instance "
            "scaling.DynamicLossScale(growth_interval=500)."
        )


def normalize_numbers(rule: Any) -> None:
    """Converts a rule's NumPy numbers, ints and bools to the Python types of its fields.

    Otherwise the state's tensors would get the dtypes of the numbers that the caller passed, and
    equal rules would have different texts, by which a resumed run knows them.
    """
    for field in dataclasses.fields(rule):
        if field.type in (float, int, bool):
            object.__setattr__(rule, field.name, field.type(getattr(rule, field.name)))


def check_count(name: str, value: Any, why: str, remedy: str, least: int = 1) -> None:
    """Raises ValueError, naming the argument, unless `value` is an int from `least` to 2^30."""
    check_integer(name, value, least, why, remedy)
    if value > MAX_COUNT:
        raise ValueError(
            f"`{name}` must be at most 2^30; got {shown(value)}. {why} Counters are int32. "
            f"{remedy}."
        )
