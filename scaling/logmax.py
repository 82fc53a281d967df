"""`LogMaxLossScale`: the scale follows the statistics of the largest gradient magnitude."""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaling.half import HALF_MAX, is_number, two_to_the
from scaling.rule import check_bounds, keep_unless, magnitude_of
from scaling.verdict import VerdictLike, as_verdict

LOG2_HALF_MAX = math.log2(HALF_MAX)
# What an overflow counts as: a gradient that would not fit without any scaling either.
LOG2_OVERFLOW = 16.0


class LogMaxLossScaleState(NamedTuple):
    """What `LogMaxLossScale` remembers: running sums over log2 of the largest magnitudes.

    Example:
        >>> int(LogMaxLossScale().initial_state().steps)
        0
    """

    loss_scale: tf.Tensor  # shape=(), float32
    steps: tf.Tensor  # shape=(), int32: steps that entered the sums
    mean: tf.Tensor  # shape=(), float32: decays with `mean_decay`
    slow_mean: tf.Tensor  # shape=(), float32: decays with `deviation_decay`
    slow_square: tf.Tensor  # shape=(), float32: the same, of squares


@dataclasses.dataclass(frozen=True)
class LogMaxLossScale:
    """Chooses the scale by the mean and deviation of the largest gradient's logarithm.

    After each step, x = log2 of the largest gradient magnitude enters a running mean m and
    a running standard deviation s; the scale is the largest power of two at which
    m + `deviations` * s still fits into float16, within `[min_scale, max_scale]`. A step
    that overflowed has no magnitude: it counts as x = 16, and the scale is at most half of
    what it was. A step whose gradients are all zero has no logarithm, and one that was not
    finite for a cause no scale can cure (see `Cause`) says nothing: both change nothing.

    Two faults of the rule as OpenSeq2Seq published it are mended: it feeds an overflow as
    x = 2^16, which held the scale at its minimum for 11,177 steps, and a single zero
    gradient turns its scale into NaN for ever. A third difference: powers of two only.

    Attributes:
        initial_scale: the first scale, until a step was finite; a power of two.
        min_scale: the floor; a power of two, at least 2^-126.
        max_scale: the ceiling; a power of two, at most 2^126.
        mean_decay: of the running mean, in [0, 1).
        deviation_decay: of the running standard deviation, in [0, 1).
        deviations: how many standard deviations to leave; 0 or more. 3.09 leaves one
            normally distributed step in a thousand to overflow.

    Raises:
        ValueError: if a constant is out of range or not a power of two.

    Source:
        Kuchaiev et al., "Mixed-Precision Training for NLP and Speech Recognition with
        OpenSeq2Seq", 2018, section 3 ("LogMax"), https://arxiv.org/abs/1805.10387.

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
        """Refuses constants under which the scale could leave its bounds, or sums their memory."""
        check_bounds(self)
        for name in ("mean_decay", "deviation_decay"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < 1:
                raise ValueError(
                    f"`{name}` must be a number in [0, 1); got {value!r}. It is what a running "
                    "mean keeps of itself at each step. Use 0.99 for a memory of a hundred steps."
                )
        if not is_number(self.deviations) or not 0 <= self.deviations < math.inf:
            raise ValueError(
                f"`deviations` must be a number of at least 0; got {self.deviations!r}. It is the "
                "room to leave, in standard deviations. 3.09 is usual."
            )

    def initial_state(self) -> LogMaxLossScaleState:
        """Returns the state before the first step."""
        return LogMaxLossScaleState(
            loss_scale=tf.constant(self.initial_scale, tf.float32),
            steps=tf.constant(0, tf.int32),
            mean=tf.constant(0.0),
            slow_mean=tf.constant(0.0),
            slow_square=tf.constant(0.0),
        )

    def advance(self, state: LogMaxLossScaleState, verdict: VerdictLike) -> LogMaxLossScaleState:
        """Moves the loss scale after one step. Pure: nothing but the return value changes.

        Args:
            state: the state before the step.
            verdict: a `Verdict` with `max_magnitude`, unscaled; it is not read if the step
                was not finite.

        Returns:
            The state after the step.

        Raises:
            ValueError: if the verdict has no magnitude.
        """
        verdict = as_verdict(verdict)
        magnitude = magnitude_of(verdict, "LogMaxLossScale")
        overflowed = verdict.overflowed
        log2_magnitude = tf.math.log(magnitude) / math.log(2.0)
        x = tf.where(overflowed, LOG2_OVERFLOW, log2_magnitude)

        def running(mean: tf.Tensor, value: tf.Tensor, decay: float) -> tf.Tensor:
            return decay * mean + (1.0 - decay) * value

        moved = LogMaxLossScaleState(
            loss_scale=state.loss_scale,
            steps=state.steps + 1,
            mean=running(state.mean, x, self.mean_decay),
            slow_mean=running(state.slow_mean, x, self.deviation_decay),
            slow_square=running(state.slow_square, x * x, self.deviation_decay),
        )
        fitting = self._fitting_scale(moved)
        halved = tf.maximum(state.loss_scale * 0.5, self.min_scale)
        scale = tf.where(overflowed, tf.minimum(fitting, halved), fitting)
        known = overflowed | (verdict.grads_finite & (magnitude > 0))
        return keep_unless(known, moved._replace(loss_scale=scale), state)

    def _fitting_scale(self, state: LogMaxLossScaleState) -> tf.Tensor:
        """Returns the largest power of two that fits the statistics: shape (), float32."""
        steps = tf.cast(state.steps, tf.float32)
        # What the sums have forgotten of their zero start: Adam's bias correction.
        mean = state.mean / (1.0 - self.mean_decay**steps)
        weight = 1.0 - self.deviation_decay**steps
        variance = state.slow_square / weight - tf.square(state.slow_mean / weight)
        deviation = tf.sqrt(tf.maximum(variance, 0.0))
        exponent = tf.floor(LOG2_HALF_MAX - (mean + self.deviations * deviation))
        lowest, highest = math.log2(self.min_scale), math.log2(self.max_scale)
        return two_to_the(tf.cast(tf.clip_by_value(exponent, lowest, highest), tf.int32))
