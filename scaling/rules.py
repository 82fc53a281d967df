"""The rules that choose the loss scale: frozen constants, and one pure transition each.

A rule answers three questions: where the scale starts (`initial_state`), how a step's
verdict moves it (`advance`), and whether it wants to know the largest gradient magnitude
(`needs_magnitude`). It holds no variables; what it must remember is its own NamedTuple,
whose first field is always `loss_scale`: shape (), float32, a power of two.
"""

import dataclasses
import math
import numbers
from typing import Any, ClassVar, NamedTuple, Protocol

import tensorflow as tf

from scaling.verdict import VerdictLike, as_verdict

# Every scale and its reciprocal is a normal float32, so scaling loses no bit.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


class LossScaleRule(Protocol):
    """What a rule must offer. A rule of one's own needs nothing else."""

    @property
    def needs_magnitude(self) -> bool:
        """Whether `advance` reads `Verdict.max_magnitude`; it costs a pass over the gradients."""

    def initial_state(self) -> Any:
        """Returns the state before the first step: a NamedTuple of tensors."""

    def advance(self, state: Any, verdict: VerdictLike) -> Any:
        """Returns the state after a step; same type, shapes and dtypes as `state`."""


class DynamicLossScaleState(NamedTuple):
    """What `DynamicLossScale` remembers."""

    loss_scale: tf.Tensor  # shape=(), float32
    finite_steps: tf.Tensor  # shape=(), int32: finite steps in a row since the scale last moved
    overflows_left: tf.Tensor  # shape=(), int32: overflows until the scale backs off


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """Raises the loss scale while gradients are finite, and lowers it when they overflow.

    The `growth_interval`-th finite step in a row multiplies the scale by
    `growth_factor`. An overflow starts that count again; the `hysteresis`-th one since the
    last growth, and each after it, multiplies the scale by `backoff_factor`. The scale
    never leaves `[min_scale, max_scale]`. A step that was not finite for a cause no scale
    can cure (see `Cause`) changes nothing.

    Attributes:
        initial_scale: the first scale; a power of two within the bounds.
        growth_interval: finite steps in a row before the scale grows; at least 1.
        growth_factor: what growth multiplies by; a power of two above 1.
        backoff_factor: what backoff multiplies by; a power of two between 0 and 1.
        min_scale: the floor; a power of two, at least 2^-126.
        max_scale: the ceiling; a power of two, at most 2^126. The default is Apex's.
        hysteresis: overflows it takes to back off for the first time after a growth; 1
            backs off at once.

    Raises:
        ValueError: if a constant is out of range or not a power of two.

    Source:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2,
        https://arxiv.org/abs/1710.03740; the bounds and hysteresis are Megatron-LM's and
        DeepSpeed's.

    Example:
        >>> rule = DynamicLossScale(initial_scale=8.0, growth_interval=2)
        >>> state = rule.advance(rule.initial_state(), False)
        >>> float(state.loss_scale)
        4.0
        >>> state = rule.advance(rule.advance(state, True), True)
        >>> float(state.loss_scale)
        8.0
    """

    initial_scale: float = 2.0**15
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    hysteresis: int = 1

    needs_magnitude: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuses constants under which the scale could leave its bounds or never move."""
        for name in ("min_scale", "max_scale", "initial_scale"):
            check_power_of_two(name, getattr(self, name))
        check_power_of_two("growth_factor", self.growth_factor, suggestion=2.0)
        check_power_of_two("backoff_factor", self.backoff_factor, suggestion=0.5)
        if self.min_scale > self.max_scale:
            raise ValueError(
                f"`min_scale` must be at most `max_scale`; got {self.min_scale!r} and "
                f"{self.max_scale!r}. No scale lies between them. Lower `min_scale` or raise "
                "`max_scale`."
            )
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"`initial_scale` must lie in [min_scale, max_scale] = [{self.min_scale!r}, "
                f"{self.max_scale!r}]; got {self.initial_scale!r}. The scale never leaves its "
                "bounds, so it cannot start outside. Move `initial_scale` or widen the bounds."
            )
        if self.growth_factor <= 1:
            raise ValueError(
                f"`growth_factor` must be greater than 1; got {self.growth_factor!r}. A factor of "
                "1 or less never raises the scale again after a backoff. Use 2.0 for the usual "
                "doubling."
            )
        if self.backoff_factor >= 1:
            raise ValueError(
                f"`backoff_factor` must be less than 1; got {self.backoff_factor!r}. A factor of 1 "
                "or more never gets out of an overflow. Use 0.5 for the usual halving."
            )
        check_at_least_one(
            "growth_interval", self.growth_interval, "It counts finite steps.", "2000 is usual"
        )
        check_at_least_one(
            "hysteresis", self.hysteresis, "It counts overflows.", "1 backs off at once"
        )

    def initial_state(self) -> DynamicLossScaleState:
        """Returns the state before the first step."""
        return DynamicLossScaleState(
            loss_scale=tf.constant(self.initial_scale, tf.float32),
            finite_steps=tf.constant(0, tf.int32),
            overflows_left=tf.constant(self.hysteresis, tf.int32),
        )

    def advance(self, state: DynamicLossScaleState, verdict: VerdictLike) -> DynamicLossScaleState:
        """Moves the loss scale after one step. Pure: nothing but the return value changes.

        Args:
            state: the state before the step.
            verdict: a `Verdict`, or shape (), bool: whether every gradient on every
                replica was finite.

        Returns:
            The state after the step.

        Raises:
            TypeError, ValueError: if the verdict is not one bool.
        """
        verdict = as_verdict(verdict)
        finite_steps = state.finite_steps + 1
        # `>=` and not `==`: a run that goes on with a shorter interval must still grow.
        grows = verdict.grads_finite & (finite_steps >= self.growth_interval)
        overflows_left = tf.maximum(state.overflows_left - 1, 0)
        backs_off = verdict.overflowed & (overflows_left == 0)

        scale = state.loss_scale
        scale = tf.where(grows, tf.minimum(scale * self.growth_factor, self.max_scale), scale)
        scale = tf.where(backs_off, tf.maximum(scale * self.backoff_factor, self.min_scale), scale)
        moved = DynamicLossScaleState(
            loss_scale=scale,
            finite_steps=tf.where(grows | verdict.overflowed, 0, finite_steps),
            overflows_left=tf.where(
                grows,
                self.hysteresis,
                tf.where(verdict.overflowed, overflows_left, state.overflows_left),
            ),
        )
        return DynamicLossScaleState(
            *(
                tf.where(verdict.moves_scale, new, old)
                for new, old in zip(moved, state, strict=True)
            )
        )


class FixedLossScaleState(NamedTuple):
    """What `FixedLossScale` remembers: the scale that never moves."""

    loss_scale: tf.Tensor  # shape=(), float32


@dataclasses.dataclass(frozen=True)
class FixedLossScale:
    """Keeps one loss scale for the whole run; steps that overflow are skipped all the same.

    Attributes:
        loss_scale: a power of two in [2^-126, 2^126].

    Raises:
        ValueError: if the scale is not a power of two in that range.

    Example:
        >>> rule = FixedLossScale(1024.0)
        >>> float(rule.advance(rule.initial_state(), False).loss_scale)
        1024.0
    """

    loss_scale: float

    needs_magnitude: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuses a scale that would round the gradients."""
        check_power_of_two("loss_scale", self.loss_scale)

    def initial_state(self) -> FixedLossScaleState:
        """Returns the one state there is."""
        return FixedLossScaleState(tf.constant(self.loss_scale, tf.float32))

    def advance(self, state: FixedLossScaleState, verdict: VerdictLike) -> FixedLossScaleState:
        """Returns `state`, whatever the verdict."""
        as_verdict(verdict)
        return state


class NoLossScaleState(NamedTuple):
    """What `NoLossScale` remembers: a scale of 1, which nobody multiplies by."""

    loss_scale: tf.Tensor  # shape=(), float32: always 1


@dataclasses.dataclass(frozen=True)
class NoLossScale:
    """No loss scaling: what float32 and bfloat16 want. Steps that are not finite are skipped.

    Example:
        >>> state = NoLossScale().initial_state()
        >>> float(state.loss_scale)
        1.0
    """

    needs_magnitude: ClassVar[bool] = False

    def initial_state(self) -> NoLossScaleState:
        """Returns the one state there is."""
        return NoLossScaleState(tf.constant(1.0, tf.float32))

    def advance(self, state: NoLossScaleState, verdict: VerdictLike) -> NoLossScaleState:
        """Returns `state`, whatever the verdict."""
        as_verdict(verdict)
        return state


def check_power_of_two(name: str, value: float, suggestion: float | None = None) -> None:
    """Raises ValueError, naming the argument, unless `value` is a power of two in range.

    Args:
        name: the argument.
        value: what was given.
        suggestion: what to use instead; None suggests the nearest power of two.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    in_range = is_number and SMALLEST_SCALE <= float(value) <= LARGEST_SCALE
    if not in_range or math.frexp(value)[0] != 0.5:
        raise ValueError(
            f"`{name}` must be a power of two between 2^-126 and 2^126; got {value!r}. Only "
            "multiplying by a power of two, and dividing again, returns the same bits. "
            f"Use {suggestion or nearest_power_of_two(value)!r}."
        )


def check_at_least_one(name: str, value: int, why: str, remedy: str) -> None:
    """Raises ValueError, naming the argument, unless `value` is an int of at least 1."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` must be an int of at least 1; got {value!r}. {why} {remedy}.")


def nearest_power_of_two(value: Any) -> float:
    """Returns the power of two to suggest in place of `value`."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value) or value <= 0:
        return 2.0**15
    return 2.0 ** min(max(round(math.log2(value)), -126), 126)
