"""`DynamicLossScale`: the rule by which nearly everybody trains in float16."""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import check_state
from scaling.base.number_formats import check_power_of_two
from scaling.base.verdict import VerdictLike, as_verdict
from scaling.rules.rule import (
    check_bounds,
    check_count,
    check_factors,
    keep_unless,
    use_plain_numbers,
)


class DynamicLossScaleState(NamedTuple):
    """What `DynamicLossScale` remembers.

    Example:
        >>> state = DynamicLossScale(hysteresis=2, grace_steps=1).initial_state()
        >>> float(state.loss_scale), int(state.finite_steps), int(state.overflows_left)
        (32768.0, -1, 2)
    """

    loss_scale: tf.Tensor  # shape=(), float32
    finite_steps: tf.Tensor  # shape=(), int32: finite steps in a row; starts at -grace_steps
    overflows_left: tf.Tensor  # shape=(), int32: overflows until the scale backs off


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """Raises the loss scale while gradients are finite, and lowers it when they overflow.

    The `growth_interval`-th finite step in a row multiplies the scale by
    `growth_factor`. An overflow starts that count again; the `hysteresis`-th one since the
    last refill, and each after it, multiplies the scale by `backoff_factor`. The scale
    never leaves `[min_scale, max_scale]`. A step that was not finite for a cause no scale
    can cure (see `Cause`) changes nothing.

    Attributes:
        initial_scale: the first scale; a power of two within the bounds.
        growth_interval: finite steps in a row before the scale grows; at least 1.
        growth_factor: what growth multiplies by; a power of two above 1.
        backoff_factor: what backoff multiplies by; a power of two between 0 and 1.
        min_scale: the floor; a power of two, at least 2^-126.
        max_scale: the ceiling; a power of two, at most 2^126. The default is Apex's.
        hysteresis: overflows it takes to back off; 1 backs off at once.
        hysteresis_refill: what gives the overflows back. With "growth", all overflows since
            the last growth count together, in a row or not; with "finite_step", only
            overflows in a row do.
        grace_steps: finite steps that do not count towards growth, at the start and after
            each overflow; 0 counts them all.
        low_scale_intervals: pairs (scale, interval): below that scale, the growth interval is
            the pair's if it is the shorter. Empty: one interval for all scales.

    Raises:
        ValueError: if a constant is out of range or not a power of two.

    Source:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2,
        https://arxiv.org/abs/1710.03740. Bounds and hysteresis are Megatron-LM's and
        DeepSpeed's; the refill by a finite step is that of Apex's
        `update_scale_hysteresis` and DeepSpeed's `consecutive_hysteresis`; the grace is
        DeepSpeed's since 0.17.1; the shorter intervals are icefall's, which grows every 25
        batches below 2, 100 below 8 and 400 below 32.

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
    hysteresis_refill: Literal["growth", "finite_step"] = "growth"
    grace_steps: int = 0
    low_scale_intervals: tuple[tuple[float, int], ...] = ()

    needs_magnitude: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuses constants under which the scale could leave its bounds or never move."""
        check_bounds(self)
        check_factors(self.growth_factor, self.backoff_factor)
        check_count(
            "growth_interval", self.growth_interval, "It counts finite steps.", "2000 is usual"
        )
        check_count("hysteresis", self.hysteresis, "It counts overflows.", "1 backs off at once")
        if self.hysteresis_refill not in ("growth", "finite_step"):
            raise ValueError(
                '`hysteresis_refill` must be "growth" or "finite_step"; got '
                f"{self.hysteresis_refill!r}. It says what gives absorbed overflows back. Use "
                '"growth", as Megatron-LM and DeepSpeed do by default.'
            )
        check_count(
            "grace_steps", self.grace_steps, "It counts finite steps.", "0 counts them all", least=0
        )
        pairs = self.low_scale_intervals
        if not isinstance(pairs, tuple | list) or not all(
            isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
        ):
            raise ValueError(
                f"`low_scale_intervals` must be pairs (scale, interval); got {pairs!r}. Below the "
                "scale, that interval counts. Use for instance ((2.0, 25), (8.0, 100))."
            )
        for scale, interval in pairs:
            check_power_of_two("low_scale_intervals", scale)
            check_count("low_scale_intervals", interval, "It counts finite steps.", "25 is usual")
        use_plain_numbers(self)

    def initial_state(self) -> DynamicLossScaleState:
        """Returns the state before the first step."""
        return DynamicLossScaleState(
            loss_scale=tf.constant(self.initial_scale),
            finite_steps=tf.constant(-self.grace_steps),
            overflows_left=tf.constant(self.hysteresis),
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
            TypeError, ValueError: if the state is not this rule's, or the verdict not one bool.
        """
        check_state(state, DynamicLossScaleState)
        verdict = as_verdict(verdict)
        finite_steps = state.finite_steps + 1
        # `>=` and not `==`: a run that goes on with a shorter interval must still grow.
        grows = verdict.grads_finite & (finite_steps >= self._interval_at(state.loss_scale))
        left = tf.minimum(state.overflows_left, self.hysteresis)
        overflows_left = tf.maximum(left - 1, 0)
        backs_off = verdict.overflowed & (overflows_left == 0)
        refills = grows if self.hysteresis_refill == "growth" else verdict.grads_finite

        factor = tf.where(backs_off, self.backoff_factor, tf.where(grows, self.growth_factor, 1.0))
        moved = DynamicLossScaleState(
            # Clipped on every step: a state saved under other constants finds into these.
            loss_scale=tf.clip_by_value(state.loss_scale * factor, self.min_scale, self.max_scale),
            finite_steps=tf.where(
                verdict.overflowed, -self.grace_steps, tf.where(grows, 0, finite_steps)
            ),
            overflows_left=tf.where(
                refills,
                self.hysteresis,
                tf.where(verdict.overflowed, overflows_left, left),
            ),
        )
        return keep_unless(verdict.moves_scale, moved, state)

    def _interval_at(self, loss_scale: tf.Tensor) -> tf.Tensor:
        """Returns the growth interval in force at a scale: shape (), int32."""
        interval = tf.constant(self.growth_interval)
        for below, shorter in self.low_scale_intervals:
            interval = tf.where(loss_scale < below, tf.minimum(interval, shorter), interval)
        return interval
