"""The interface of a rule, and the helpers and argument checks that rules share.

A rule answers three questions: where the scale starts (`initial_state`), how a step's
verdict moves it (`advance`), and whether it needs the largest gradient magnitude
(`needs_magnitude`). A rule holds no variables. Each rule has its own NamedTuple type for its
state, whose first field is always `loss_scale`: shape (), float32, a power of two.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from scaling.base.argument_checks import check_integer, shown
from scaling.base.number_formats import check_power_of_two
from scaling.base.verdict import Cause, Verdict, VerdictLike

MAX_COUNT = 2**30  # counters are int32
TRIED_STEPS = 3  # of each kind, by `try_rule`


class RuleState(Protocol):
    """What a rule remembers between steps: a NamedTuple of tensors, `loss_scale` first."""

    @property
    def loss_scale(self) -> tf.Tensor:
        """Shape (), float32: the scale of the next step, a power of two."""

    def __iter__(self) -> Iterator[tf.Tensor]:
        """Iterates over the fields."""

    @property
    def _replace(self) -> Callable[..., "RuleState"]:
        """Returns a copy with some fields replaced, as for any NamedTuple."""

    def _asdict(self) -> Mapping[str, tf.Tensor]:
        """Returns a dict of the fields, keyed by name, as for any NamedTuple."""


State = TypeVar("State", bound=RuleState)


class LossScaleRule(Protocol):
    """The interface of a rule. Any class with these three members can be used as a rule.

    `advance` runs in the graph of a step, so it chooses with `tf.where`, not with `if`. The loss
    scale must always be a power of two between 2^-126 and 2^126: others round the gradients. A
    `LossScaler` tries a few steps of your rule, and refuses one that breaks this.

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


def require_magnitude(verdict: Verdict) -> tf.Tensor:
    """Returns the verdict's largest magnitude: shape (), float32.

    Raises:
        ValueError: if the verdict has none.
    """
    if verdict.max_magnitude is None:
        raise ValueError("`verdict.max_magnitude` must be given to this rule; got None")
    return tf.cast(verdict.max_magnitude, tf.float32)


def moves_by_magnitude(verdict: Verdict, magnitude: tf.Tensor) -> tf.Tensor:
    """Returns whether a step may move a rule that goes by magnitudes: shape (), bool.

    A finite step whose largest magnitude is inf or NaN contradicts itself, so it moves nothing.
    In the statistics of a rule, such a number would never go away.
    """
    measured = tf.convert_to_tensor(verdict.grads_finite) & tf.math.is_finite(magnitude)
    return verdict.overflowed | measured


def check_constants(rule: Any, **least: int) -> None:
    """Raises ValueError, naming the constant, unless a rule's scale stays exact and within bounds.

    Args:
        rule: its scales and factors must be powers of two, which change no bits of a gradient. Its
            bounds must be in order, and its factors on their sides of 1.
        **least: the smallest value of each constant that is a count; the largest is 2^30.
    """
    for field in dataclasses.fields(rule):
        if field.name.endswith(("_scale", "_factor")):
            check_power_of_two(field.name, getattr(rule, field.name))
    initial, low, high = rule.initial_scale, rule.min_scale, rule.max_scale
    if low > high:
        raise ValueError(f"`min_scale` must be at most `max_scale`; got {low} and {high}")
    if not low <= initial <= high:
        raise ValueError(f"`initial_scale` must be from {low} to {high}, the bounds; got {initial}")
    if (growth := getattr(rule, "growth_factor", 2.0)) <= 1:
        raise ValueError(f"`growth_factor` must be greater than 1; got {shown(growth)}")
    if (backoff := getattr(rule, "backoff_factor", 0.5)) >= 1:
        raise ValueError(f"`backoff_factor` must be less than 1; got {shown(backoff)}")
    for name, smallest in least.items():
        check_integer(name, getattr(rule, name), smallest, MAX_COUNT)


def normalize_numbers(rule: Any) -> None:
    """Converts a rule's NumPy numbers, ints and bools to the Python types of its fields.

    Otherwise the state's tensors would get the dtypes of the numbers that the caller passed, and
    equal rules would have different texts, by which a resumed run knows them.
    """
    for field in dataclasses.fields(rule):
        if field.type in (float, int, bool):
            object.__setattr__(rule, field.name, field.type(getattr(rule, field.name)))


def try_rule(rule: LossScaleRule) -> None:
    """Takes a few steps of a rule of the user's own: overflows, then finite steps.

    A scale that is no power of two would round every gradient of a run.

    Raises:
        ValueError: if a loss scale is not a power of two.
    """
    if type(rule).__module__.startswith("scaling."):  # their tests do it
        return
    state = rule.initial_state()
    check_power_of_two("rule.initial_state().loss_scale", float(state.loss_scale))
    for grads_finite in [False] * TRIED_STEPS + [True] * TRIED_STEPS:
        cause = Cause.NONE if grads_finite else Cause.BACKWARD
        magnitude = tf.constant(1.0 if grads_finite else float("inf"))
        state = rule.advance(state, Verdict(tf.constant(grads_finite), cause, magnitude))
        check_power_of_two("rule.advance().loss_scale", float(state.loss_scale))
