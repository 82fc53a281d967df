"""`TolerantLossScale`: backs off only when too large a fraction of the steps overflows."""

import dataclasses
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import check_bool, is_number, shown
from scaling.base.verdict import VerdictLike, as_verdict
from scaling.rules.rule import (
    MAX_COUNT,
    check_constants,
    normalize_numbers,
    select_state,
)


class TolerantLossScaleState(NamedTuple):
    """The state of `TolerantLossScale`.

    Example:
        >>> state = TolerantLossScale(growth_interval=256).initial_state()
        >>> float(state.loss_scale), int(state.growth_interval)
        (32768.0, 256)
    """

    loss_scale: tf.Tensor  # shape=(), float32
    finite_steps: tf.Tensor  # shape=(), int32: finite steps since the last overflow
    steps: tf.Tensor  # shape=(), int32: steps since the scale last moved, at most 2^30
    overflows: tf.Tensor  # shape=(), int32: overflows since the scale last backed off
    growth_interval: tf.Tensor  # shape=(), int32: constant unless `scale_interval` is set


@dataclasses.dataclass(frozen=True)
class TolerantLossScale:
    """Tolerates isolated overflows, and backs off when their fraction reaches `tolerance`.

    Each `growth_interval`-th finite step since the last overflow multiplies the scale by
    `growth_factor`. After an overflow, the number of overflows since the last backoff is
    divided by the number of steps since the scale last moved; if the result is `tolerance` or
    more, the scale is multiplied by `backoff_factor`. The step is skipped in either case. The
    scale never leaves `[min_scale, max_scale]`. A non-finite step whose cause no scale can
    cure (see `Cause`) changes nothing.

    Attributes:
        initial_scale: the first scale; a power of two within the bounds.
        growth_interval: number of finite steps after which the scale grows, from 1 to 2^30.
        growth_factor: the factor by which the scale grows; a power of two above 1.
        backoff_factor: the factor by which the scale backs off; a power of two below 1.
        min_scale: the lower bound of the scale; a power of two, at least 2^-126. Fairseq
            calls it `threshold_loss_scale`.
        max_scale: the upper bound of the scale; a power of two, at most 2^126.
        tolerance: the fraction of steps, in [0, 1), that may overflow; with 0 the scale backs
            off at every overflow.
        scale_interval: whether the growth interval grows and shrinks with the scale, so that
            growth is tried again sooner after a backoff.

    Raises:
        ValueError: if a constant is out of range or not a power of two.

    Source:
        fairseq, `fairseq/optim/dynamic_loss_scaler.py` (`tolerance`); metaseq, the same file
        (`scale_window`), used for Zhang et al., "OPT", 2022, https://arxiv.org/abs/2205.01068.

    Example:
        >>> rule = TolerantLossScale(initial_scale=8.0, tolerance=0.5)
        >>> state = rule.initial_state()
        >>> for finite in [True, True, False, False]:
        ...     state = rule.advance(state, finite)
        ...     print(float(state.loss_scale), int(state.overflows), int(state.steps))
        8.0 0 1
        8.0 0 2
        8.0 1 3
        4.0 0 0
    """

    initial_scale: float = 2.0**15
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    tolerance: float = 0.05
    scale_interval: bool = False

    needs_magnitude: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Rejects constants with which the scale could leave its bounds or never move."""
        check_constants(self, growth_interval=1)
        # With 1 the scale would never back off.
        if not is_number(self.tolerance) or not 0 <= self.tolerance < 1:
            raise ValueError(f"`tolerance` must be a number in [0, 1); got {shown(self.tolerance)}")
        check_bool("scale_interval", self.scale_interval)
        normalize_numbers(self)

    def initial_state(self) -> TolerantLossScaleState:
        """Returns the state before the first step."""
        return TolerantLossScaleState(
            loss_scale=tf.constant(self.initial_scale),
            finite_steps=tf.constant(0),
            steps=tf.constant(0),
            overflows=tf.constant(0),
            growth_interval=tf.constant(self.growth_interval),
        )

    def advance(
        self, state: TolerantLossScaleState, verdict: VerdictLike
    ) -> TolerantLossScaleState:
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
        overflowed = verdict.overflowed
        interval = state.growth_interval if self.scale_interval else self.growth_interval
        # int32 must not wrap: `steps` stops at 2^30; `finite_steps` then forgets whole intervals.
        finite_steps, steps = state.finite_steps + 1, tf.minimum(state.steps, MAX_COUNT - 1) + 1
        overflows = state.overflows + tf.cast(overflowed, tf.int32)
        phase = finite_steps % interval
        grows = verdict.grads_finite & (phase == 0)
        # Divide in float64, like fairseq, so that 1/20 reaches a tolerance of 0.05.
        share = tf.cast(overflows, tf.float64) / tf.cast(steps, tf.float64)
        backs_off = overflowed & (share >= self.tolerance)

        factor = tf.where(backs_off, self.backoff_factor, tf.where(grows, self.growth_factor, 1.0))
        moved = TolerantLossScaleState(
            # Clip on every step: the state may have been saved with other bounds.
            loss_scale=tf.clip_by_value(state.loss_scale * factor, self.min_scale, self.max_scale),
            finite_steps=tf.where(
                overflowed, 0, tf.where(finite_steps < MAX_COUNT, finite_steps, phase)
            ),
            steps=tf.where(grows | backs_off, 0, steps),
            overflows=tf.where(backs_off, 0, overflows),
            growth_interval=self._next_interval(state.growth_interval, grows, backs_off),
        )
        return select_state(verdict.moves_scale, moved, state)

    def _next_interval(
        self, interval: tf.Tensor, grows: tf.Tensor, backs_off: tf.Tensor
    ) -> tf.Tensor:
        """Returns the growth interval after a step: shape (), int32."""
        if not self.scale_interval:
            return interval
        backoff = tf.cast(tf.minimum(1 / self.backoff_factor, MAX_COUNT), tf.int32)
        growth = tf.cast(tf.minimum(self.growth_factor, MAX_COUNT), tf.int32)
        shorter = tf.maximum(interval // backoff, 1)
        longer = tf.minimum(interval, MAX_COUNT // growth) * growth
        return tf.where(backs_off, shorter, tf.where(grows, longer, interval))
