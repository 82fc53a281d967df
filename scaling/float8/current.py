"""`CurrentScaling`: the scale of a float8 tensor from its own largest magnitude."""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from scaling.float8.magnitudes import check_constants, largest_magnitude, own_scale


class CurrentScalingState(NamedTuple):
    """The state of `CurrentScaling`, which remembers nothing: no checkpoint needs it.

    Example:
        >>> CurrentScaling().initial_state()
        CurrentScalingState()
    """


@dataclasses.dataclass(frozen=True)
class CurrentScaling:
    """Chooses the scale of a tensor by the largest magnitude that it has now.

    Nothing saturates, also when a tensor grows suddenly. In return, each cast waits for a pass over
    the tensor, and under several replicas or microbatches for the maximum over all of them.

    A loop that works with this rule works with every rule of this package: `amax` measures,
    `choose_scale` says what to divide by, and `advance` returns the next state.

    Attributes:
        dtype: the float8 format, "float8_e4m3fn" or "float8_e5m2".
        margin: number of factors of two that are left free above the largest magnitude, from -64
            to 64.
        power_of_two: whether scales are powers of two, which divide and multiply without rounding,
            and which have the same bits under every compiler.

    Raises:
        ValueError: if a constant is out of range.
        TypeError: if `power_of_two` is not a bool.

    Source:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 4.2,
        https://arxiv.org/abs/2209.05433. torchao calls it dynamic scaling; with powers of two, the
        scales are the reciprocals of torchao's.

    Example:
        >>> from scaling import float8
        >>> rule = CurrentScaling("float8_e4m3fn")
        >>> state = rule.initial_state()
        >>> for x in [tf.constant([1.0, -30.0]), tf.constant([500.0, 2.0])]:
        ...     amax = rule.amax(x)  # under several replicas, the maximum over them
        ...     scale = rule.choose_scale(state, amax)
        ...     product_sees = float8.dequantize(float8.quantize(x, scale, rule.dtype), scale)
        ...     print(float(scale), product_sees.numpy().tolist())
        ...     state = rule.advance(state, amax)
        0.125 [1.0, -30.0]
        2.0 [512.0, 2.0]
    """

    dtype: str = "float8_e4m3fn"
    margin: int = 0
    power_of_two: bool = True

    def __post_init__(self) -> None:
        """Rejects constants that are out of range."""
        check_constants(self)

    def initial_state(self, shape: tuple[int, ...] = ()) -> CurrentScalingState:
        """Returns the only state.

        Args:
            shape: the shape of the scale, for which other rules make room.
        """
        del shape
        return CurrentScalingState()

    def amax(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the largest magnitude of a tensor: shape (), float32; NaN or inf if it has one.

        Args:
            x: any shape, any float dtype.
        """
        return largest_magnitude(x)

    def choose_scale(self, state: CurrentScalingState, amax: tf.Tensor | float) -> tf.Tensor:
        """Returns the scale for a tensor with this largest magnitude.

        Args:
            state: the state before the step.
            amax: the largest magnitude of this tensor; of all shares of a batch, the maximum.
                Any shape, float32.

        Returns:
            The shape of `amax`, float32, within [2^-126, 2^126]. It is 1 where `amax` is 0, inf or
            NaN: no scale helps a tensor that is not finite, so its step had better be skipped.
        """
        del state
        amax = tf.cast(amax, tf.float32)
        return own_scale(amax, self.dtype, self.margin, self.power_of_two)

    def advance(self, state: CurrentScalingState, amax: tf.Tensor | float) -> CurrentScalingState:
        """Returns the state after a step, which is the same."""
        del amax
        return state
