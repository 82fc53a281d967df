"""What every rule is: frozen constants, a first state, and one pure transition.

A rule answers three questions: where the scale starts (`initial_state`), how a step's
verdict moves it (`advance`), and whether it wants to know the largest gradient magnitude
(`needs_magnitude`). It holds no variables; what it must remember is its own NamedTuple,
whose first field is always `loss_scale`: shape (), float32, a power of two.
"""

import dataclasses
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from scaling.base.argument_checks import check_integer
from scaling.base.number_formats import check_power_of_two
from scaling.base.verdict import Verdict, VerdictLike

LARGEST_COUNT = 2**30

State = TypeVar("State", bound=tuple)


class LossScaleRule(Protocol):
    """What a rule must offer. A rule of one's own needs nothing else.

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
        """Whether `advance` reads `Verdict.max_magnitude`; it costs a pass over the gradients."""

    def initial_state(self) -> Any:
        """Returns the state before the first step: a NamedTuple of tensors."""

    def advance(self, state: Any, verdict: VerdictLike) -> Any:
        """Returns the state after a step; same type, shapes and dtypes as `state`."""


def keep_unless(moves: tf.Tensor, moved: State, state: State) -> State:
    """Returns `moved` where the verdict may move the scale, and else `state`, field by field."""
    pairs = zip(moved, state, strict=True)
    return type(state)(*(tf.where(moves, new, old) for new, old in pairs))


def magnitude_of(verdict: Verdict, rule: str) -> tf.Tensor:
    """Returns the verdict's largest magnitude: shape (), float32.

    Raises:
        ValueError: if nobody has measured it.
    """
    if verdict.max_magnitude is None:
        raise ValueError(
            f"`verdict.max_magnitude` must be given to {rule}; got None. The rule moves by the "
            "largest gradient magnitude. Pass scaling.Verdict(grads_finite, cause, "
            "max_magnitude), unscaled."
        )
    return tf.cast(verdict.max_magnitude, tf.float32)


def check_bounds(rule: Any) -> None:
    """Refuses an `initial_scale`, `min_scale` or `max_scale` with which the scale could go astray.

    Raises:
        ValueError: if one is no power of two, or they are not in order.
    """
    for name in ("min_scale", "max_scale", "initial_scale"):
        check_power_of_two(name, getattr(rule, name))
    if rule.min_scale > rule.max_scale:
        raise ValueError(
            f"`min_scale` must be at most `max_scale`; got {rule.min_scale!r} and "
            f"{rule.max_scale!r}. No scale lies between them. Lower `min_scale` or raise "
            "`max_scale`."
        )
    if not rule.min_scale <= rule.initial_scale <= rule.max_scale:
        raise ValueError(
            f"`initial_scale` must lie in [min_scale, max_scale] = [{rule.min_scale!r}, "
            f"{rule.max_scale!r}]; got {rule.initial_scale!r}. The scale never leaves its "
            "bounds, so it cannot start outside. Move `initial_scale` or widen the bounds."
        )


def check_factors(growth_factor: float, backoff_factor: float) -> None:
    """Refuses factors that are no powers of two, or would never grow or never back off.

    Raises:
        ValueError: naming the argument.
    """
    check_power_of_two("growth_factor", growth_factor, suggestion=2.0)
    check_power_of_two("backoff_factor", backoff_factor, suggestion=0.5)
    if growth_factor <= 1:
        raise ValueError(
            f"`growth_factor` must be greater than 1; got {growth_factor!r}. A factor of "
            "1 or less never raises the scale again after a backoff. Use 2.0 for the usual "
            "doubling."
        )
    if backoff_factor >= 1:
        raise ValueError(
            f"`backoff_factor` must be less than 1; got {backoff_factor!r}. A factor of 1 "
            "or more never gets out of an overflow. Use 0.5 for the usual halving."
        )


def check_rule(rule: Any) -> None:
    """Raises TypeError unless `rule` is one, of this room or of somebody's own."""
    is_rule = hasattr(rule, "initial_state") and hasattr(rule, "advance")
    if not is_rule or isinstance(rule, type):
        raise TypeError(
            f"`rule` must be a loss-scale rule; got {rule!r}. A rule has initial_state() and "
            "advance(). Use for instance scaling.DynamicLossScale(growth_interval=500)."
        )


def use_plain_numbers(rule: Any) -> None:
    """Turns a rule's numbers, which may be NumPy's or ints, into its fields' types, once for all.

    TensorFlow would take the dtype of a state from them.
    """
    for field in dataclasses.fields(rule):
        if field.type in (float, int):
            object.__setattr__(rule, field.name, field.type(getattr(rule, field.name)))


def check_count(name: str, value: int, why: str, remedy: str, least: int = 1) -> None:
    """Raises ValueError, naming the argument, unless `value` is an int from `least` to 2^30."""
    check_integer(name, value, least, why, remedy)
    if value > LARGEST_COUNT:
        raise ValueError(
            f"`{name}` must be at most 2^30; got {value!r}. {why} Counters are int32, and no run "
            "is that long. Use 2**30 for what shall never come."
        )
