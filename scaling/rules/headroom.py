"""`HeadroomLossScale`: grows only if the largest gradient leaves enough headroom."""

import dataclasses
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import check_integer
from scaling.base.number_formats import HALF_BITS, HALF_MAX, floor_power_of_two
from scaling.base.verdict import VerdictLike, as_verdict
from scaling.rules.rule import (
    check_constants,
    moves_by_magnitude,
    normalize_numbers,
    require_magnitude,
    select_state,
)

# Half of float16's range in factors of two, so that a search step cannot jump past the range.
SEARCH_FACTOR = 2.0 ** (HALF_BITS // 2)


class HeadroomLossScaleState(NamedTuple):
    """The state of `HeadroomLossScale`.

    Example:
        >>> bool(HeadroomLossScale().initial_state().found)
        False
    """

    loss_scale: tf.Tensor  # shape=(), float32
    finite_steps: tf.Tensor  # shape=(), int32: finite steps since the last growth check
    peak: tf.Tensor  # shape=(), float32: the largest magnitude in those steps, unscaled
    found: tf.Tensor  # shape=(), bool: whether a nonzero gradient has been measured yet


@dataclasses.dataclass(frozen=True)
class HeadroomLossScale:
    """Derives its first scale from a measured gradient, and grows only while headroom remains.

    The first finite step with a nonzero gradient sets the scale to the largest power of two
    at which that gradient stays `headroom_bits` factors of two below the largest float16.
    Until then an overflow divides the scale by 2^20, and all-zero gradients multiply it by
    2^20. That is half of float16's range, so the search takes one or two steps, while halving
    from 2^40 would take twenty.

    From then on, growth is considered after every `growth_interval` finite steps in a row.
    The scale is multiplied by `growth_factor` if the largest gradient of those steps would
    still leave that headroom, and stays the same otherwise. An overflow multiplies it by
    `backoff_factor`: gradients of activations can overflow in the middle of the network
    although every variable's gradient leaves headroom. The scale never leaves
    `[min_scale, max_scale]`. A non-finite step whose cause no scale can cure (see `Cause`)
    changes nothing.

    Attributes:
        initial_scale: the scale at which the search starts; a power of two within the bounds.
        headroom_bits: number of factors of two to leave between the largest gradient and
            65504, from 0 to 40.
        growth_interval: number of finite steps in a row after which growth is considered,
            from 1 to 2^30.
        growth_factor: the factor by which the scale grows; a power of two above 1.
        backoff_factor: the factor by which the scale backs off; a power of two below 1.
        min_scale: the lower bound of the scale; a power of two, at least 2^-126.
        max_scale: the upper bound of the scale; a power of two, at most 2^126.

    Raises:
        ValueError: if a constant is out of range or not a power of two.

    Source:
        This project. Choosing a half-precision scale by the largest magnitude goes back to
        Kuchaiev et al., 2018, https://arxiv.org/abs/1805.10387, and the delayed scaling of
        NVIDIA's Transformer Engine.

    Example:
        >>> import scaling
        >>> rule = HeadroomLossScale(initial_scale=2.0**40, max_scale=2.0**40)
        >>> state = rule.advance(rule.initial_state(), scaling.Verdict(
        ...     tf.constant(False), max_magnitude=tf.constant(float("inf"))))
        >>> float(state.loss_scale) == 2.0**20
        True
        >>> state = rule.advance(state, scaling.Verdict(
        ...     tf.constant(True), max_magnitude=tf.constant(2.0**-6)))
        >>> float(state.loss_scale) == 2.0**17  # four bits below 2^21, the largest that fits
        True
    """

    initial_scale: float = 2.0**15
    headroom_bits: int = 4
    growth_interval: int = 100
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24

    needs_magnitude: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Rejects constants with which the scale could leave its bounds or never move."""
        check_constants(self, growth_interval=1)
        check_integer("headroom_bits", self.headroom_bits, 0, HALF_BITS)
        normalize_numbers(self)

    def initial_state(self) -> HeadroomLossScaleState:
        """Returns the state before the first step."""
        return HeadroomLossScaleState(
            loss_scale=tf.constant(self.initial_scale),
            finite_steps=tf.constant(0),
            peak=tf.constant(0.0),
            found=tf.constant(False),
        )

    def advance(
        self, state: HeadroomLossScaleState, verdict: VerdictLike
    ) -> HeadroomLossScaleState:
        """Moves the loss scale after one step. Pure: it changes no variables.

        Args:
            state: the state before the step.
            verdict: a `Verdict` with an unscaled `max_magnitude`, which is ignored if the step
                was not finite. On a finite step, an inf or NaN moves nothing.

        Returns:
            The state after the step.

        Raises:
            ValueError: if `max_magnitude` is None, or `grads_finite` is not a single bool.
        """
        verdict = as_verdict(verdict)
        magnitude = require_magnitude(verdict)
        tracked = self._track(state, verdict.overflowed, magnitude)
        searched = self._search(state, verdict.overflowed, magnitude)
        moved = select_state(state.found, tracked, searched)
        return select_state(moves_by_magnitude(verdict, magnitude), moved, state)

    def _search(
        self, state: HeadroomLossScaleState, overflowed: tf.Tensor, magnitude: tf.Tensor
    ) -> HeadroomLossScaleState:
        """Returns the state after a step of the search for the first nonzero gradient."""
        flushed = ~overflowed & (magnitude == 0)
        jumped = state.loss_scale * tf.where(overflowed, 1.0 / SEARCH_FACTOR, SEARCH_FACTOR)
        measured = floor_power_of_two(self._max_scaled_magnitude() / magnitude)
        return HeadroomLossScaleState(
            loss_scale=self._clip(tf.where(overflowed | flushed, jumped, measured)),
            finite_steps=tf.constant(0),
            peak=tf.constant(0.0),
            found=~overflowed & ~flushed,
        )

    def _track(
        self, state: HeadroomLossScaleState, overflowed: tf.Tensor, magnitude: tf.Tensor
    ) -> HeadroomLossScaleState:
        """Returns the state after a step, once the search is over."""
        finite_steps = state.finite_steps + 1
        peak = tf.maximum(state.peak, magnitude)
        checks_growth = ~overflowed & (finite_steps >= self.growth_interval)
        has_room = peak * self.growth_factor <= self._max_scaled_magnitude() / state.loss_scale
        grows = checks_growth & has_room
        factor = tf.where(overflowed, self.backoff_factor, tf.where(grows, self.growth_factor, 1.0))
        restarts = overflowed | checks_growth
        return HeadroomLossScaleState(
            loss_scale=self._clip(state.loss_scale * factor),
            finite_steps=tf.where(restarts, 0, finite_steps),
            peak=tf.where(restarts, 0.0, peak),
            found=state.found,
        )

    def _max_scaled_magnitude(self) -> float:
        """Returns the largest scaled gradient magnitude that leaves the headroom."""
        return HALF_MAX / 2.0**self.headroom_bits

    def _clip(self, loss_scale: tf.Tensor) -> tf.Tensor:
        return tf.clip_by_value(loss_scale, self.min_scale, self.max_scale)
