"""`LogMaxLossScale`: the scale follows the statistics of the largest gradient magnitude."""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import check_state, is_number
from scaling.base.number_formats import HALF_MAX, two_to_the
from scaling.base.verdict import VerdictLike, as_verdict
from scaling.rules.rule import check_bounds, keep_unless, magnitude_of, use_plain_numbers

LOG2_HALF_MAX = math.log2(HALF_MAX)


class LogMaxLossScaleState(NamedTuple):
    """What `LogMaxLossScale` remembers: running statistics of x, log2 of the largest magnitude.

    Example:
        >>> int(LogMaxLossScale().initial_state().steps)
        0
    """

    loss_scale: tf.Tensor  # shape=(), float32
    steps: tf.Tensor  # shape=(), int32: steps that entered the statistics
    mean: tf.Tensor  # shape=(), float32: of x, with `mean_decay`
    slow_mean: tf.Tensor  # shape=(), float32: of x, with `deviation_decay`
    variance: tf.Tensor  # shape=(), float32: of x about `slow_mean`, with `deviation_decay`


@dataclasses.dataclass(frozen=True)
class LogMaxLossScale:
    """Chooses the scale by the mean and deviation of the largest gradient's logarithm.

    After each step, x = log2 of the largest gradient magnitude enters a running mean m and
    a running standard deviation s; the scale is the largest power of two at which
    m + `deviations` * s still fits into float16, within `[min_scale, max_scale]`. A step
    that overflowed has no magnitude: it counts as the x that would have been one bit too
    large, and the scale is at most half of what it was. If all gradients are zero, the
    statistics learn nothing and the scale doubles, since what was there has been flushed. A
    step that was not finite for a cause no scale can cure (see `Cause`) changes nothing.

    Two faults of the rule as OpenSeq2Seq published it are mended. It feeds an overflow as
    x = 2^16, which held the scale at its minimum for 11,177 steps; but x = 16, which it may
    have meant, still throws the scale of a young run down by 20 bits. And a single zero
    gradient turns its scale into NaN for ever. A third difference: powers of two only.

    Attributes:
        initial_scale: the first scale, until a step was finite; a power of two.
        min_scale: the floor; a power of two, at least 2^-126.
        max_scale: the ceiling; a power of two, at most 2^126.
        mean_decay: of the running mean, in [0, 1).
        deviation_decay: of the running standard deviation, in [0, 1).
        deviations: how many standard deviations to leave; from 0 to 100. 3.09 leaves one
            normally distributed step in a thousand to overflow, if nothing else overflows
            before the variables' gradients do.

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
        """Refuses constants under which the scale could leave its bounds, or sums their memory."""
        check_bounds(self)
        for name in ("mean_decay", "deviation_decay"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < 1:
                raise ValueError(
                    f"`{name}` must be a number in [0, 1); got {value!r}. It is what a running "
                    "mean keeps of itself at each step. Use 0.99 for a memory of a hundred steps."
                )
        if not is_number(self.deviations) or not 0 <= self.deviations <= 100:
            raise ValueError(
                f"`deviations` must be a number from 0 to 100; got {self.deviations!r}. It is the "
                "room to leave, in standard deviations. 3.09 is usual."
            )
        use_plain_numbers(self)

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
        check_state(state, LogMaxLossScaleState)
        verdict = as_verdict(verdict)
        magnitude = magnitude_of(verdict, "LogMaxLossScale")
        scale, overflowed = state.loss_scale, verdict.overflowed
        x = tf.where(overflowed, LOG2_HALF_MAX - log2(scale) + 1.0, log2(magnitude))
        learned = self._learn(state, x)
        fitting = self._fitting_scale(learned)
        learned = learned._replace(
            loss_scale=tf.where(overflowed, tf.minimum(fitting, self._clip(scale * 0.5)), fitting)
        )
        blind = state._replace(loss_scale=self._clip(scale * 2.0))
        moved = keep_unless(overflowed | (magnitude > 0), learned, blind)
        return keep_unless(verdict.moves_scale, moved, state)

    def _learn(self, state: LogMaxLossScaleState, x: tf.Tensor) -> LogMaxLossScaleState:
        """Returns the statistics with one more value in them."""
        steps = state.steps + 1
        share = newest_share(self.mean_decay, steps)
        slow_share = newest_share(self.deviation_decay, steps)
        surprise = x - state.slow_mean
        return state._replace(
            steps=steps,
            mean=state.mean + share * (x - state.mean),
            slow_mean=state.slow_mean + slow_share * surprise,
            # West's way: the mean of squares less the square of the mean would cancel.
            variance=(1.0 - slow_share) * (state.variance + slow_share * tf.square(surprise)),
        )

    def _fitting_scale(self, state: LogMaxLossScaleState) -> tf.Tensor:
        """Returns the largest power of two that fits the statistics: shape (), float32."""
        x = state.mean + self.deviations * tf.sqrt(state.variance)
        lowest, highest = math.log2(self.min_scale), math.log2(self.max_scale)
        exponent = tf.clip_by_value(tf.floor(LOG2_HALF_MAX - x), lowest, highest)
        return two_to_the(tf.cast(exponent, tf.int32))

    def _clip(self, loss_scale: tf.Tensor) -> tf.Tensor:
        return tf.clip_by_value(loss_scale, self.min_scale, self.max_scale)


def log2(x: tf.Tensor) -> tf.Tensor:
    """Returns the logarithm to base 2, in float32."""
    return tf.math.log(x) / math.log(2.0)


def newest_share(decay: float, steps: tf.Tensor) -> tf.Tensor:
    """Returns what the newest of some values weighs in their decaying mean: 1 for the first.

    It is (1 - decay) / (1 - decay^steps), written so that a decay near 1 loses no digits.
    """
    if decay == 0:
        return tf.ones([])
    share = (1.0 - decay) / -tf.math.expm1(tf.cast(steps, tf.float32) * math.log(decay))
    return tf.minimum(share, 1.0)  # the first one's may be rounded up
