"""`DelayedScaling`: the scale of a float8 tensor from its largest magnitudes of earlier steps."""

import dataclasses
from typing import Literal, NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import check_bool, check_integer, shown
from scaling.float8.cast import FORMATS
from scaling.float8.magnitudes import (
    check_constants,
    is_usable,
    largest_magnitude,
    power_of_two_scale,
)

LONGEST_HISTORY = 2**20
FLAGS = ("includes_newest", "keeps_nonfinite", "fast_reciprocal")


class DelayedScalingState(NamedTuple):
    """The state of `DelayedScaling` for tensors of one kind.

    Example:
        >>> state = DelayedScaling(history_length=3).initial_state()
        >>> float(state.scale), state.history.numpy().tolist()
        (1.0, [0.0, 0.0, 0.0])
    """

    scale: tf.Tensor  # shape=shape, float32: what to divide by in the next step
    history: tf.Tensor  # shape=(history_length, *shape), float32: newest first, then oldest first


@dataclasses.dataclass(frozen=True)
class DelayedScaling:
    """Chooses the scale of a tensor by the largest magnitudes that it had in earlier steps.

    A tensor is divided by its scale, cast to float8 and multiplied by it again. The scale brings
    the largest magnitude of the history to the largest float8 number. So a step needs no pass over
    the tensor before the cast, and a tensor that grows saturates for a step.

    Under several replicas or microbatches, pass the maximum over all of them to `advance`: the
    state is then that of one device with the whole batch, bit for bit.

    Attributes:
        dtype: the float8 format, "float8_e4m3fn" or "float8_e5m2".
        history_length: number of steps that are remembered, from 1 to 2^20.
        algorithm: "max" for the largest magnitude of the history, "most_recent" for the newest.
        margin: number of factors of two that are left free above the largest magnitude, from -64
            to 64.
        power_of_two: whether scales are powers of two, which divide and multiply without rounding,
            and which have the same bits under every compiler. Other scales are rounded; XLA may
            round their last bit differently.
        includes_newest: whether a step's largest magnitude moves the scale of the next step.
            Keras's moves that of the step after it.
        keeps_nonfinite: whether an inf or NaN enters the history. While it is among the numbers
            that `algorithm` looks at, the scale stays as it is. Otherwise it moves nothing.
        fast_reciprocal: whether a scale that is no power of two is a `tf.math.reciprocal`, as in
            Keras. On a CPU its last bit is not always rounded right, and depends on the processor.

    Raises:
        ValueError: if a constant is out of range.
        TypeError: if a flag is not a bool.

    Source:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, https://arxiv.org/abs/2209.05433,
        and the delayed recipe in the documentation of Transformer Engine. For powers of two see
        torchao's issue 1670.

    Example:
        >>> rule = DelayedScaling("float8_e4m3fn", history_length=2)
        >>> state = rule.initial_state()
        >>> for amax in [448.0, 7.0, 3.5, 3.5]:
        ...     state = rule.advance(state, amax)
        ...     print(float(state.scale))
        1.0
        1.0
        0.015625
        0.0078125
    """

    dtype: str = "float8_e4m3fn"
    history_length: int = 1024
    algorithm: Literal["max", "most_recent"] = "max"
    margin: int = 0
    power_of_two: bool = True
    includes_newest: bool = True
    keeps_nonfinite: bool = False
    fast_reciprocal: bool = False

    def __post_init__(self) -> None:
        """Rejects constants that are out of range."""
        check_constants(self)
        check_integer("history_length", self.history_length, 1, LONGEST_HISTORY)
        if self.algorithm not in ("max", "most_recent"):
            raise ValueError(
                f'`algorithm` must be "max" or "most_recent"; got {shown(self.algorithm)}'
            )
        for name in FLAGS:
            check_bool(name, getattr(self, name))

    def initial_state(self, shape: tuple[int, ...] = ()) -> DelayedScalingState:
        """Returns the state before the first step: a scale of 1, and a history of zeros.

        Args:
            shape: the shape of the scale; with (n,), one state holds n tensors' scales.
        """
        return DelayedScalingState(tf.ones(shape), tf.zeros([self.history_length, *shape]))

    def amax(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the largest magnitude of a tensor: shape (), float32; NaN or inf if it has one.

        Args:
            x: any shape, any float dtype.
        """
        return largest_magnitude(x)

    def choose_scale(self, state: DelayedScalingState, amax: tf.Tensor | float) -> tf.Tensor:
        """Returns the scale of this step, which is in the state already.

        Args:
            state: the state before the step.
            amax: as for `advance`. Rules that look at the tensor itself need it here.
        """
        del amax
        return state.scale

    def advance(self, state: DelayedScalingState, amax: tf.Tensor | float) -> DelayedScalingState:
        """Moves the scale after one step. Pure: it changes no variables.

        Args:
            state: the state before the step, whose scale the step used.
            amax: the largest magnitude of the tensor in that step, before the cast; the maximum
                over replicas and microbatches: the shape of the scale, float32.

        Returns:
            The state after the step.
        """
        newest = tf.cast(amax, tf.float32)
        # A ring: the oldest number stands behind the newest.
        history = tf.concat([newest[None], state.history[2:], state.history[:1]], axis=0)
        history = history[: self.history_length]
        seen = history if self.includes_newest else state.history
        largest = tf.reduce_max(seen, axis=0) if self.algorithm == "max" else seen[0]
        moved = DelayedScalingState(self._scale_for(largest, state.scale), history)
        if self.keeps_nonfinite:
            return moved
        finite = tf.math.is_finite(newest)
        return DelayedScalingState(
            tf.where(finite, moved.scale, state.scale),
            tf.where(finite, moved.history, state.history),
        )

    def _scale_for(self, largest: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        """Returns the scale for a largest magnitude; the old one for 0, inf and NaN."""
        usable, limit = is_usable(largest), FORMATS[self.dtype].largest
        if self.power_of_two:
            found = power_of_two_scale(tf.where(usable, largest, limit), limit, self.margin)
            return tf.where(usable, found, scale)
        # In the order of Keras and Flax, which keep the reciprocal: other orders round differently.
        inverse = tf.where(usable, limit / largest / 2.0**self.margin, self._reciprocal(scale))
        found = self._reciprocal(inverse)
        # Theirs becomes 0 for magnitudes below 2^-119 or so, and every later number NaN.
        return tf.clip_by_value(found, 2.0**-126, 2.0**126)

    def _reciprocal(self, x: tf.Tensor) -> tf.Tensor:
        """Returns 1 / x, rounded as the rule says."""
        if self.fast_reciprocal:
            return tf.math.reciprocal(x)
        # In float32, TensorFlow's graphs would make a `tf.math.reciprocal` of it.
        return tf.cast(1.0 / tf.cast(x, tf.float64), tf.float32)
