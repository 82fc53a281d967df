"""`DynamicLossScale`: the growth and backoff rule that most float16 training uses."""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import check_integer, shown
from scaling.base.number_formats import check_power_of_two
from scaling.base.verdict import VerdictLike, as_verdict
from scaling.rules.rule import MAX_COUNT, check_constants, normalize_numbers, select_state


class DynamicLossScaleState(NamedTuple):
    """The state of `DynamicLossScale`.

    Example:
        >>> state = DynamicLossScale(hysteresis=2, grace_steps=1).initial_state()
        >>> float(state.loss_scale), int(state.finite_steps), int(state.overflows_left)
        (32768.0, -1, 2)
    """

    loss_scale: tf.Tensor  # shape=(), float32
    finite_steps: tf.Tensor  # shape=(), int32: finite steps in a row; starts at -grace_steps
    overflows_left: tf.Tensor  # shape=(), int32: further overflows until the scale backs off


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """Raises the loss scale while gradients are finite, and lowers it when they overflow.

    After `growth_interval` finite steps in a row the scale is multiplied by `growth_factor`.
    An overflow restarts that count. The `hysteresis`-th overflow since the last refill, and
    every later one, multiplies the scale by `backoff_factor`. The scale never leaves
    `[min_scale, max_scale]`. A non-finite step whose cause no scale can cure (see `Cause`)
    changes nothing.

    Attributes:
        initial_scale: the first scale; a power of two within the bounds.
        growth_interval: number of finite steps in a row after which the scale grows, from 1
            to 2^30; in practice, 2^30 means never.
        growth_factor: the factor by which the scale grows; a power of two above 1.
        backoff_factor: the factor by which the scale backs off; a power of two below 1.
        min_scale: the lower bound of the scale; a power of two, at least 2^-126.
        max_scale: the upper bound of the scale; a power of two, at most 2^126. The default
            is that of Apex.
        hysteresis: number of overflows after which the scale backs off; with 1 it backs off at
            every overflow.
        hysteresis_refill: what resets the count of overflows. With "growth", it is reset when
            the scale grows, so overflows need not be in a row to count. With "finite_step", it
            is reset by every finite step, so only overflows in a row count.
        grace_steps: number of finite steps, at the start and after each overflow, that do not
            count towards growth.
        low_scale_intervals: pairs (scale, interval). While the loss scale is below `scale`,
            the growth interval is at most `interval`.

    Raises:
        ValueError: if a constant is out of range or not a power of two.

    Source:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2,
        https://arxiv.org/abs/1710.03740. Bounds and hysteresis follow Megatron-LM and
        DeepSpeed. The refill by a finite step follows Apex's `update_scale_hysteresis` and
        DeepSpeed's `consecutive_hysteresis`. `grace_steps` follows DeepSpeed since 0.17.1.
        `low_scale_intervals` follows icefall, which grows every 25 batches below 2, every 100
        below 8 and every 400 below 32.

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
        """Rejects constants with which the scale could leave its bounds or never move."""
        check_constants(self, growth_interval=1, hysteresis=1, grace_steps=0)
        if self.hysteresis_refill not in ("growth", "finite_step"):
            raise ValueError(
                '`hysteresis_refill` must be "growth" or "finite_step"; got '
                f"{shown(self.hysteresis_refill)}"
            )
        for scale, interval in self.low_scale_intervals:
            check_power_of_two("low_scale_intervals", scale)
            check_integer("low_scale_intervals", interval, 1, MAX_COUNT)
        pairs = tuple((float(scale), int(interval)) for scale, interval in self.low_scale_intervals)
        object.__setattr__(self, "low_scale_intervals", pairs)
        normalize_numbers(self)

    def initial_state(self) -> DynamicLossScaleState:
        """Returns the state before the first step."""
        return DynamicLossScaleState(
            loss_scale=tf.constant(self.initial_scale),
            finite_steps=tf.constant(-self.grace_steps),
            overflows_left=tf.constant(self.hysteresis),
        )

    def advance(self, state: DynamicLossScaleState, verdict: VerdictLike) -> DynamicLossScaleState:
        """Moves the loss scale after one step. Pure: it changes no variables.

        Args:
            state: the state before the step.
            verdict: a `Verdict`, or a bool (shape ()): whether every gradient on every
                replica was finite.

        Returns:
            The state after the step.

        Raises:
            ValueError: if `grads_finite` is not a single bool.
        """
        verdict = as_verdict(verdict)
        finite_steps = state.finite_steps + 1
        # `>=` and not `==`: the scale must still grow if the run resumes with a shorter interval.
        grows = verdict.grads_finite & (finite_steps >= self._interval_at(state.loss_scale))
        left = tf.minimum(state.overflows_left, self.hysteresis)
        overflows_left = tf.maximum(left - 1, 0)
        backs_off = verdict.overflowed & (overflows_left == 0)
        refills = grows if self.hysteresis_refill == "growth" else verdict.grads_finite

        factor = tf.where(backs_off, self.backoff_factor, tf.where(grows, self.growth_factor, 1.0))
        moved = DynamicLossScaleState(
            # Clip on every step: the state may have been saved with other bounds.
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
        return select_state(verdict.moves_scale, moved, state)

    def _interval_at(self, loss_scale: tf.Tensor) -> tf.Tensor:
        """Returns the growth interval that applies at a scale: shape (), int32."""
        interval = tf.convert_to_tensor(self.growth_interval)
        for threshold, shorter in self.low_scale_intervals:
            interval = tf.where(loss_scale < threshold, tf.minimum(interval, shorter), interval)
        return interval
