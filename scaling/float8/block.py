"""`BlockScaling`: a scale for each block of a float8 tensor, from the block's largest magnitude."""

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import as_tensor, is_integer, shown
from scaling.float8.magnitudes import (
    as_amax,
    check_constants,
    check_shape,
    check_state,
    magnitude_bits,
    own_scale,
)

LARGEST_BLOCK = 2**20
MOST_AXES = 8


class BlockScalingState(NamedTuple):
    """The state of `BlockScaling`, which remembers nothing: no checkpoint needs it.

    Example:
        >>> BlockScaling().initial_state()
        BlockScalingState()
    """


@dataclasses.dataclass(frozen=True)
class BlockScaling:
    """Chooses a scale for each block of a tensor by the largest magnitude that the block has now.

    An outlier makes small numbers 0 only in its own block. The last block along an axis may be
    smaller than the others.

    If a batch is divided between blocks, as it always is if the block size along the batch's axis
    is 1, every share has the scales that it would have in the whole batch: replicas and
    microbatches need no maximum over all of them.

    Attributes:
        dtype: the float8 format, "float8_e4m3fn" or "float8_e5m2".
        block: the size of a block along each of `axes`, from 1 to 2^20. (1, 128) is for inputs and
            gradients: a scale for each example and 128 features; (128, 128) is for kernels.
        axes: the axes that `block` is about; None for the last ones. Along all other axes a block
            has size 1.
        margin: number of factors of two that are left free above the largest magnitude, from -64
            to 64.
        power_of_two: whether scales are powers of two, which divide and multiply without rounding,
            and which have the same bits under every compiler.

    Raises:
        ValueError: if a constant is out of range.
        TypeError: if `power_of_two` is not a bool.

    Source:
        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3, https://arxiv.org/abs/2412.19437:
        tiles of 1x128 and blocks of 128x128, all in e4m3, with scales found while casting.

    Example:
        Two blocks of two numbers; one scale for all four would make 0 of the small ones:

        >>> from scaling import float8
        >>> rule = BlockScaling("float8_e4m3fn", block=(1, 2))
        >>> state, x = rule.initial_state(), tf.constant([[2.0**-12, 2.0**-11, 448.0, 30.0]])
        >>> scale = rule.choose_scale(state, rule.amax(x))
        >>> scale.numpy().tolist() == [[2.0**-19, 1.0]]
        True
        >>> spread = rule.spread(scale, x)
        >>> product_sees = float8.dequantize(float8.quantize(x, spread, rule.dtype), spread)
        >>> product_sees.numpy().tolist() == x.numpy().tolist()
        True
        >>> [int(count) for count in float8.losses_of_cast(x, 1.0, rule.dtype)]
        [0, 2]
    """

    dtype: str = "float8_e4m3fn"
    block: tuple[int, ...] = (1, 128)
    axes: tuple[int, ...] | None = None
    margin: int = 0
    power_of_two: bool = True

    def __post_init__(self) -> None:
        """Rejects constants that are out of range."""
        check_constants(self)
        if not is_sizes(self.block):
            raise ValueError(
                "`block` must be a tuple of 1 to 8 ints from 1 to 2^20; got "
                f"{shown(self.block)}. It is the size of a block along each axis. Use (1, 128) for "
                "inputs and gradients, (128, 128) for kernels."
            )
        object.__setattr__(self, "block", tuple(int(size) for size in self.block))
        if self.axes is None:
            return
        if not is_axes(self.axes, len(self.block)):
            raise ValueError(
                "`axes` must be None or as many different ints as `block` has; got "
                f"{shown(self.axes)} for {self.block}. They are the axes that a block extends "
                "over. Use None, the default, for the last axes."
            )
        object.__setattr__(self, "axes", tuple(int(axis) for axis in self.axes))

    def initial_state(self, shape: tuple[int, ...] = ()) -> BlockScalingState:
        """Returns the only state.

        Args:
            shape: the shape of the scale, for which other rules make room.

        Raises:
            ValueError: if the shape is no tuple of ints.
        """
        check_shape(shape)
        return BlockScalingState()

    def amax(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the largest magnitude of each block; NaN or inf if the block has one.

        Args:
            x: a known rank with all of `axes`, any float dtype.

        Returns:
            The shape of `x`, divided by the block sizes and rounded up, float32.

        Raises:
            TypeError: if `x` does not have a float dtype.
            ValueError: if `x` lacks one of the axes.
        """
        found = magnitude_bits(x)
        for axis, size in self._sizes(found):
            found = maximum_of_blocks(found, axis, size)
        return tf.bitcast(found, tf.float32)

    def choose_scale(self, state: BlockScalingState, amax: tf.Tensor | float) -> tf.Tensor:
        """Returns the scales for blocks with these largest magnitudes.

        Args:
            state: the state before the step.
            amax: what `amax` returned; if shares of a batch divide blocks, the maximum over them.

        Returns:
            The shape of `amax`, float32, within [2^-126, 2^126]. It is 1 where `amax` is 0, inf or
            NaN: no scale helps a block that is not finite, so its step had better be skipped.

        Raises:
            TypeError: if the state is not a `BlockScalingState`, or `amax` is not a float.
        """
        check_state(state, BlockScalingState)
        return own_scale(as_amax(amax), self.dtype, self.margin, self.power_of_two)

    def spread(self, scale: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        """Returns each element's scale, as `quantize`, `dequantize` and `losses_of_cast` take it.

        Args:
            scale: what `choose_scale` returned for `x`.
            x: the tensor, in any dtype: only its shape counts.

        Returns:
            The shape of `x` and the dtype of `scale`.

        Raises:
            ValueError: if `x` lacks one of the axes, or `scale` does not have a number per block.
        """
        x, spread = as_tensor("x", x), as_tensor("scale", scale)
        sizes = self._sizes(x)
        self._check_shape(spread.shape, x.shape, sizes)
        for axis, size in sizes:
            length = x.shape[axis] if x.shape[axis] is not None else tf.shape(x)[axis]
            spread = tf.gather(spread, tf.range(length) // size, axis=axis)
        return spread

    def advance(self, state: BlockScalingState, amax: tf.Tensor | float) -> BlockScalingState:
        """Returns the state after a step, which is the same.

        Raises:
            TypeError: as for `choose_scale`.
        """
        check_state(state, BlockScalingState)
        as_amax(amax)
        return state

    def _sizes(self, x: tf.Tensor) -> list[tuple[int, int]]:
        """Returns pairs of an axis, not negative, and the block size along it."""
        axes = self.axes if self.axes is not None else range(-len(self.block), 0)
        rank = x.shape.rank
        found = [] if rank is None else [axis % rank for axis in axes if -rank <= axis < rank]
        if len(set(found)) != len(self.block):
            raise ValueError(
                f"`x` must have the axes of the rule's blocks, {tuple(axes)}; got shape {x.shape}. "
                "A block extends over these axes, each once. Make the rule with other `axes`, and "
                "a `block` of as many sizes."
            )
        return [(axis, size) for axis, size in zip(found, self.block, strict=True) if size > 1]

    def _check_shape(
        self, found: tf.TensorShape, shape: tf.TensorShape, sizes: list[tuple[int, int]]
    ) -> None:
        """Raises ValueError unless scales have the shape of a tensor's blocks, as far as known."""
        wanted = shape.as_list()
        for axis, size in sizes:
            wanted[axis] = None if wanted[axis] is None else -(-wanted[axis] // size)
        if not found.is_compatible_with(wanted):
            raise ValueError(
                f"`scale` must have a number for each block, shape {tuple(wanted)}; got "
                f"{found}. A tensor of shape {shape} is divided into such blocks. Pass what "
                "choose_scale() returned for this tensor."
            )


def maximum_of_blocks(x: tf.Tensor, axis: int, size: int) -> tf.Tensor:
    """Returns the largest number of each block along one axis; the last block may be smaller.

    Args:
        x: any shape, int32; not negative.
        axis: not negative.
        size: of a block.

    Example:
        >>> maximum_of_blocks(tf.constant([3, 1, 2, 9, 4]), 0, 2).numpy().tolist()
        [3, 9, 4]
    """
    static = x.shape.as_list()
    shape = [tf.shape(x)[at] if length is None else length for at, length in enumerate(static)]
    if static[axis] is not None:  # a block may be larger than the tensor, which is not padded then
        size = min(size, max(static[axis], 1))
    blocks = -(-shape[axis] // size)
    missing = [[0, 0] for _ in static]
    missing[axis][1] = blocks * size - shape[axis]
    divided = [*shape[:axis], blocks, size, *shape[axis + 1 :]]
    return tf.reduce_max(tf.reshape(tf.pad(x, missing), divided), axis=axis + 1)


def is_sizes(value: Any) -> bool:
    """Returns whether a value is a tuple of block sizes."""
    return (
        isinstance(value, tuple)
        and 1 <= len(value) <= MOST_AXES
        and all(is_integer(size) and 1 <= size <= LARGEST_BLOCK for size in value)
    )


def is_axes(value: Any, number: int) -> bool:
    """Returns whether a value is a tuple of so many different axes."""
    return (
        isinstance(value, tuple)
        and all(is_integer(axis) and -MOST_AXES <= axis <= MOST_AXES for axis in value)
        and len(value) == number == len(set(value))
    )
