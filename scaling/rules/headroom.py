"""`HeadroomLossScale`: looks how much room the largest gradient leaves before it grows."""

import dataclasses
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import check_state
from scaling.base.number_formats import HALF_BITS, HALF_MAX, floor_power_of_two
from scaling.base.verdict import VerdictLike, as_verdict
from scaling.rules.rule import (
    check_bounds,
    check_count,
    check_factors,
    keep_unless,
    magnitude_of,
    use_plain_numbers,
)

# One search step: half of float16's range, so that no search jumps over all of it.
SEARCH_FACTOR = 2.0 ** (HALF_BITS // 2)


class HeadroomLossScaleState(NamedTuple):
    """What `HeadroomLossScale` remembers.

    Example:
        >>> bool(HeadroomLossScale().initial_state().found)
        False
    """

    loss_scale: tf.Tensor  # shape=(), float32
    finite_steps: tf.Tensor  # shape=(), int32: finite steps since the scale was last considered
    peak: tf.Tensor  # shape=(), float32: the largest magnitude in those steps, unscaled
    found: tf.Tensor  # shape=(), bool: whether some step has shown where the scale belongs


@dataclasses.dataclass(frozen=True)
class HeadroomLossScale:
    """Grows only while the largest gradient leaves room, and finds its first scale by measuring.

    The first finite step with a gradient that is not zero sets the scale: to the largest
    power of two at which that gradient stays `headroom_bits` factors of two below the
    largest float16. Until then an overflow divides the scale by 2^20 and all-zero
    gradients multiply it by 2^20: half the width of float16's range, so one or two steps
    find it, where halving from 2^40 takes twenty.

    From then on the scale is considered after every `growth_interval` finite steps in a
    row: it is multiplied by `growth_factor` if the largest gradient of those steps would
    still leave `headroom_bits`, and stays otherwise. An overflow multiplies it by
    `backoff_factor`: activations' gradients can overflow in the middle of the network, where
    no variable's gradient shows it. The scale never leaves `[min_scale, max_scale]`. A step
    that was not finite for a cause no scale can cure (see `Cause`) changes nothing.

    Attributes:
        initial_scale: the first scale; a power of two within the bounds.
        headroom_bits: factors of two to leave between the largest gradient and 65504.
        growth_interval: finite steps in a row before the scale is considered; at least 1.
        growth_factor: what growth multiplies by; a power of two above 1.
        backoff_factor: what backoff multiplies by; a power of two between 0 and 1.
        min_scale: the floor; a power of two, at least 2^-126.
        max_scale: the ceiling; a power of two, at most 2^126.

    Raises:
        ValueError: if a constant is out of range or not a power of two.

    Source:
        Ours. That the largest magnitude should choose a half-precision scale is in Kuchaiev
        et al., 2018, https://arxiv.org/abs/1805.10387, and in the delayed scaling of
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
        >>> float(state.loss_scale) == 2.0**17  # four bits below 2^21, the last that fits
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
        """Refuses constants under which the scale could leave its bounds or never move."""
        check_bounds(self)
        check_factors(self.growth_factor, self.backoff_factor)
        check_headroom_bits(self.headroom_bits)
        check_count(
            "growth_interval", self.growth_interval, "It counts finite steps.", "100 is usual"
        )
        use_plain_numbers(self)

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
        """Moves the loss scale after one step. Pure: nothing but the return value changes.

        Args:
            state: the state before the step.
            verdict: a `Verdict` with `max_magnitude`, unscaled; it is not read if the step
                was not finite.

        Returns:
            The state after the step.

        Raises:
            TypeError: if the state is not this rule's.
            ValueError: if the verdict has no magnitude.
        """
        check_state(state, HeadroomLossScaleState)
        verdict = as_verdict(verdict)
        magnitude = magnitude_of(verdict, "HeadroomLossScale")
        following = self._follow(state, verdict.overflowed, magnitude)
        searching = self._search(state, verdict.overflowed, magnitude)
        moved = keep_unless(state.found, following, searching)
        return keep_unless(verdict.moves_scale, moved, state)

    def _search(
        self, state: HeadroomLossScaleState, overflowed: tf.Tensor, magnitude: tf.Tensor
    ) -> HeadroomLossScaleState:
        """Returns the state after a step before the scale was found."""
        flushed = ~overflowed & (magnitude == 0)
        blind = state.loss_scale * tf.where(overflowed, 1.0 / SEARCH_FACTOR, SEARCH_FACTOR)
        measured = floor_power_of_two(self._room() / magnitude)
        return HeadroomLossScaleState(
            loss_scale=self._clip(tf.where(overflowed | flushed, blind, measured)),
            finite_steps=tf.constant(0),
            peak=tf.constant(0.0),
            found=~overflowed & ~flushed,
        )

    def _follow(
        self, state: HeadroomLossScaleState, overflowed: tf.Tensor, magnitude: tf.Tensor
    ) -> HeadroomLossScaleState:
        """Returns the state after a step since the scale was found."""
        finite_steps = state.finite_steps + 1
        peak = tf.maximum(state.peak, magnitude)
        considers = ~overflowed & (finite_steps >= self.growth_interval)
        grows = considers & (peak * self.growth_factor <= self._room() / state.loss_scale)
        factor = tf.where(overflowed, self.backoff_factor, tf.where(grows, self.growth_factor, 1.0))
        starts_again = overflowed | considers
        return HeadroomLossScaleState(
            loss_scale=self._clip(state.loss_scale * factor),
            finite_steps=tf.where(starts_again, 0, finite_steps),
            peak=tf.where(starts_again, 0.0, peak),
            found=state.found,
        )

    def _room(self) -> float:
        """The largest scaled gradient that leaves the headroom."""
        return HALF_MAX / 2.0**self.headroom_bits

    def _clip(self, loss_scale: tf.Tensor) -> tf.Tensor:
        return tf.clip_by_value(loss_scale, self.min_scale, self.max_scale)


def check_headroom_bits(bits: int) -> None:
    """Raises ValueError unless so many factors of two fit between float16's ends."""
    check_count("headroom_bits", bits, "It counts factors of two.", "4 is usual", least=0)
    if bits > HALF_BITS:
        raise ValueError(
            f"`headroom_bits` must be at most {HALF_BITS}; got {bits!r}. Float16 has no more "
            "between its smallest and its largest number. 4 is usual."
        )
