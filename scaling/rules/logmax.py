"""`LogMaxLossScale`: the scale follows statistics of the largest gradient magnitude."""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import is_number, shown
from scaling.base.number_formats import HALF_MAX, SMALLEST_NORMAL, two_to_the
from scaling.base.verdict import VerdictLike, as_verdict
from scaling.rules.rule import (
    MAX_COUNT,
    check_constants,
    moves_by_magnitude,
    normalize_numbers,
    require_magnitude,
    select_state,
)

LOG2_HALF_MAX = math.log2(HALF_MAX)
# Between the largest float16 and 65520, which rounds to inf. Logarithms are rounded, in eager mode
# in another way than in a graph, so that magnitudes of 65504 itself lie on either side of theirs.
LOG2_FITS = math.log2(65512.0)


class LogMaxLossScaleState(NamedTuple):
    """The state of `LogMaxLossScale`: running statistics of x = log2(largest magnitude).

    Example:
        >>> int(LogMaxLossScale().initial_state().steps)
        0
    """

    loss_scale: tf.Tensor  # shape=(), float32
    steps: tf.Tensor  # shape=(), int32: number of steps in the statistics, at most 2^30
    mean: tf.Tensor  # shape=(), float32: running mean of x, with `mean_decay`
    slow_mean: tf.Tensor  # shape=(), float32: running mean of x, with `deviation_decay`
    variance: tf.Tensor  # shape=(), float32: variance of x around `slow_mean`, same decay


@dataclasses.dataclass(frozen=True)
class LogMaxLossScale:
    """Chooses the scale by the mean and deviation of the largest gradient's logarithm.

    After each step, x = log2(largest gradient magnitude) updates a running mean m and a
    running standard deviation s. The scale becomes the largest power of two at which
    m + `deviations` * s still fits into float16, within `[min_scale, max_scale]`. A step
    that overflowed has no magnitude: for that step, x is taken to be one bit above what fits
    at its scale, and the scale is at least halved. If all gradients are zero, the rule assumes that
    float16 has flushed them: the statistics stay the same and the scale doubles. A non-finite
    step whose cause no scale can cure (see `Cause`) changes nothing.

    This version corrects two faults of the rule as published in OpenSeq2Seq. There, an
    overflow counts as x = 2^16, which kept the scale at its minimum for 11,177 steps; x = 16,
    which may have been intended, still lowers the scale by 20 bits early in a run. In
    addition, if all gradients are zero just once, the scale becomes NaN and stays NaN. A third
    difference is that here the scale is always a power of two.

    Attributes:
        initial_scale: the scale of the first step; a power of two.
        min_scale: the lower bound of the scale; a power of two, at least 2^-126.
        max_scale: the upper bound of the scale; a power of two, at most 2^126.
        mean_decay: decay of the running mean, in [0, 1).
        deviation_decay: decay of the running standard deviation, in [0, 1).
        deviations: number of standard deviations to leave as headroom, from 0 to 100. With
            3.09, one step in a thousand overflows if x is normally distributed, provided that
            nothing else overflows before the variables' gradients do.

    Raises:
        ValueError: if a constant is out of range or not a power of two.

    Source:
        Kuchaiev et al., "Mixed-Precision Training for NLP and Speech Recognition with
        OpenSeq2Seq", 2018, section 3 ("LogMax"), https://arxiv.org/abs/1805.10387. The running
        variance: West, "Updating Mean and Variance Estimates: An Improved Method", 1979.

    Example:
        >>> import scaling
        >>> rule = LogMaxLossScale()
        >>> fits = scaling.Verdict(tf.constant(True), max_magnitude=tf.constant(2.0**-5))
        >>> float(rule.advance(rule.initial_state(), fits).loss_scale) == 2.0**20
        True
    """

    initial_scale: float = 2.0**15
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    mean_decay: float = 0.99
    deviation_decay: float = 0.999
    deviations: float = 3.09

    needs_magnitude: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Rejects constants with which the scale could leave its bounds or a mean never change."""
        check_constants(self)
        for name in ("mean_decay", "deviation_decay"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < 1:
                raise ValueError(f"`{name}` must be a number in [0, 1); got {shown(value)}")
        if not is_number(self.deviations) or not 0 <= self.deviations <= 100:
            raise ValueError(
                f"`deviations` must be a number from 0 to 100; got {shown(self.deviations)}"
            )
        normalize_numbers(self)

    def initial_state(self) -> LogMaxLossScaleState:
        """Returns the state before the first step."""
        return LogMaxLossScaleState(
            loss_scale=tf.constant(self.initial_scale),
            steps=tf.constant(0),
            mean=tf.constant(0.0),
            slow_mean=tf.constant(0.0),
            variance=tf.constant(0.0),
        )

    def advance(self, state: LogMaxLossScaleState, verdict: VerdictLike) -> LogMaxLossScaleState:
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
        scale, overflowed = state.loss_scale, verdict.overflowed
        x = tf.where(overflowed, LOG2_HALF_MAX - log2(scale) + 1.0, log2(magnitude))
        updated = self._update_statistics(state, x)
        fitting = self._fitting_scale(updated)
        updated = updated._replace(
            loss_scale=tf.where(overflowed, tf.minimum(fitting, self._clip(scale * 0.5)), fitting)
        )
        doubled = state._replace(loss_scale=self._clip(scale * 2.0))
        # Some kernels take a subnormal magnitude for 0, whose logarithm would stay in the mean.
        measured = magnitude >= SMALLEST_NORMAL
        moved = select_state(overflowed | measured, updated, doubled)
        return select_state(moves_by_magnitude(verdict, magnitude), moved, state)

    def _update_statistics(self, state: LogMaxLossScaleState, x: tf.Tensor) -> LogMaxLossScaleState:
        """Returns the state with one more value in its statistics."""
        steps = tf.minimum(state.steps, MAX_COUNT - 1) + 1  # int32 must not wrap
        weight = newest_weight(self.mean_decay, steps)
        slow_weight = newest_weight(self.deviation_decay, steps)
        deviation = x - state.slow_mean
        return state._replace(
            steps=steps,
            mean=state.mean + weight * (x - state.mean),
            slow_mean=state.slow_mean + slow_weight * deviation,
            # West's formula. Subtracting the squared mean from the mean square would lose digits.
            variance=(1.0 - slow_weight) * (state.variance + slow_weight * tf.square(deviation)),
        )

    def _fitting_scale(self, state: LogMaxLossScaleState) -> tf.Tensor:
        """Returns the largest scale that fits the statistics: a power of two, shape (), float32."""
        x = state.mean + self.deviations * tf.sqrt(state.variance)
        lowest, highest = math.log2(self.min_scale), math.log2(self.max_scale)
        exponent = tf.clip_by_value(tf.floor(LOG2_FITS - x), lowest, highest)
        return two_to_the(tf.cast(exponent, tf.int32))

    def _clip(self, loss_scale: tf.Tensor) -> tf.Tensor:
        return tf.clip_by_value(loss_scale, self.min_scale, self.max_scale)


def log2(x: tf.Tensor) -> tf.Tensor:
    """Returns the logarithm to base 2, in float32."""
    return tf.math.log(x) / math.log(2.0)


def newest_weight(decay: float, steps: tf.Tensor) -> tf.Tensor:
    """Returns the weight of the newest of `steps` values in their decaying mean; 1 for the first.

    The weight is (1 - decay) / (1 - decay^steps), computed so that a decay near 1 loses no digits.
    """
    if decay == 0:
        return tf.ones([])
    weight = (1.0 - decay) / -tf.math.expm1(tf.cast(steps, tf.float32) * math.log(decay))
    return tf.minimum(weight, 1.0)  # rounding may lift the first weight above 1
