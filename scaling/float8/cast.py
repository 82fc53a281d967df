"""Casts to float8 and back, at a scale. What is too large saturates."""

import math

import tensorflow as tf

from scaling.base.argument_checks import as_tensor, is_number, shown
from scaling.float8.formats import Format, format_of


def quantize(x: tf.Tensor, scale: tf.Tensor | float, dtype: str) -> tf.Tensor:
    """Divides a tensor by its scale and casts it to float8; what is too large saturates.

    TensorFlow's own cast makes NaN of 465 in float8_e4m3fn, and inf of 61440 in float8_e5m2. Here
    both become the largest finite number, and so does inf. NaN stays NaN.

    Args:
        x: any shape, any float dtype.
        scale: shape (), or one that broadcasts to that of `x`; float32, positive.
        dtype: "float8_e4m3fn" or "float8_e5m2".

    Returns:
        The shape of `x`, float8.

    Raises:
        ValueError: if `dtype` is not one of the two, or `scale` is not positive or does not
            broadcast to `x`.
        TypeError: if `x` does not have a float dtype, or `scale` is no number.

    Example:
        >>> x = quantize(tf.constant([1.0, 465.0, -1e9]), 1.0, "float8_e4m3fn")
        >>> dequantize(x, 1.0).numpy().tolist()
        [1.0, 448.0, -448.0]
    """
    form = format_of(dtype)
    return tf.cast(clipped(divided(x, scale), form.largest), form.dtype)


def dequantize(x: tf.Tensor, scale: tf.Tensor | float, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Casts a float8 tensor to a wider dtype and multiplies it by its scale.

    Args:
        x: any shape, float8.
        scale: as for `quantize`.
        dtype: of the result. The product is computed in float32 at least, since a scale can be
            out of the range of float16.

    Returns:
        The shape of `x`. With a scale that is a power of two, exactly what `x` stands for, if the
        dtype can represent it.

    Raises:
        ValueError: if `scale` is not positive or does not broadcast to `x`.
        TypeError: if `x` or `dtype` is no float, or `scale` is no number.

    Example:
        >>> x = quantize(tf.constant([0.3, 3.0]), 2.0**-8, "float8_e4m3fn")
        >>> dequantize(x, 2.0**-8).numpy().tolist()
        [0.3125, 1.75]
    """
    x = checked(x)
    if not isinstance(dtype, tf.DType) or not dtype.is_floating or dtype.size < 2:
        raise TypeError(
            f"`dtype` must be a float dtype of 16 bits or more; got {shown(dtype)}. The result has "
            "this dtype. Pass tf.float32, the default, or tf.bfloat16."
        )
    wide = tf.float64 if dtype == tf.float64 else tf.float32
    return tf.cast(tf.cast(x, wide) * tf.cast(checked_scale(scale, x), wide), dtype)


def losses_of_cast(
    x: tf.Tensor, scale: tf.Tensor | float, dtype: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts what `quantize` would change most: numbers that saturate, and that become 0.

    Args:
        x: any shape, any float dtype.
        scale: as for `quantize`.
        dtype: as for `quantize`.

    Returns:
        The number of elements, NaN aside, that rounding alone does not bring to a finite float8
        number; and of those that are not 0 and become 0: shape (), int32, each.

    Raises:
        ValueError: if `dtype` is not one of the two, or `scale` is not positive or does not
            broadcast to `x`.
        TypeError: if `x` does not have a float dtype, or `scale` is no number.

    Example:
        >>> x = tf.constant([0.0, 2.0**-12, 1.0, 448.0, 500.0])
        >>> [int(count) for count in losses_of_cast(x, 1.0, "float8_e4m3fn")]
        [1, 1]
    """
    form, ratio = format_of(dtype), divided(x, scale)
    flushed = (plain_cast(ratio, form) == 0) & (checked(x) != 0)
    return count(saturates(ratio, form)), count(flushed)


def saturates(ratio: tf.Tensor, form: Format) -> tf.Tensor:
    """Returns where numbers lie beyond those that rounding alone brings to a finite float8 number.

    Args:
        ratio: any shape, float32 or float64: numbers, divided by their scale.
        form: the format.

    Returns:
        The shape of `ratio`, bool; false for NaN.

    Example:
        >>> saturates(tf.constant([464.0, 465.0]), format_of("float8_e4m3fn")).numpy().tolist()
        [False, True]
    """
    return ~tf.math.is_finite(plain_cast(ratio, form)) & ~tf.math.is_nan(ratio)


def plain_cast(ratio: tf.Tensor, form: Format) -> tf.Tensor:
    """Returns what TensorFlow's own cast makes of numbers, which does not saturate: float32."""
    return tf.cast(tf.cast(ratio, form.dtype), tf.float32)


def count(flags: tf.Tensor) -> tf.Tensor:
    """Returns the number of true flags: shape (), int32."""
    return tf.math.count_nonzero(flags, dtype=tf.int32)


def divided(x: tf.Tensor, scale: tf.Tensor | float) -> tf.Tensor:
    """Returns a tensor, divided by its scale in its own dtype, but at least float32."""
    x = checked(x)
    x = tf.cast(x, tf.float64 if x.dtype == tf.float64 else tf.float32)
    return x / tf.cast(checked_scale(scale, x), x.dtype)


def checked_scale(scale: tf.Tensor | float, x: tf.Tensor) -> tf.Tensor:
    """Returns a scale as a tensor.

    Raises:
        TypeError: if the scale is no number.
        ValueError: if it is a number that is not positive and finite, or if it does not broadcast.
    """
    found = as_tensor("scale", scale)
    remedy = "Pass what a rule's choose_scale() returned; for blocks, spread() of it"
    if not (found.dtype.is_floating or found.dtype.is_integer):
        raise TypeError(
            f"`scale` must have a float dtype; got {found.dtype.name}. A tensor is divided by its "
            f"scale. {remedy}."
        )
    if is_number(scale) and not 0 < scale < math.inf:
        raise ValueError(
            f"`scale` must be positive and finite; got {shown(scale)}. A tensor is divided by its "
            f"scale. {remedy}."
        )
    shape = found.shape
    if x.shape.rank is not None and shape.rank is not None:
        missing = x.shape.rank - shape.rank
        fits = missing >= 0 and all(
            one == 1 or one is None or other is None or one == other
            for one, other in zip(shape, x.shape[missing:], strict=True)
        )
        if not fits:
            raise ValueError(
                f"`scale` must broadcast to the shape of x, {x.shape}; got shape {shape}. Each "
                f"number is divided by one scale. {remedy}."
            )
    return found


def clipped(x: tf.Tensor, largest: float) -> tf.Tensor:
    """Returns a tensor within bounds; NaN stays NaN."""
    return tf.where(tf.math.is_nan(x), x, tf.clip_by_value(x, -largest, largest))


def checked(x: tf.Tensor) -> tf.Tensor:
    """Returns a float tensor; raises TypeError for another dtype."""
    x = as_tensor("x", x)
    if not x.dtype.is_floating:
        raise TypeError(
            f"`x` must have a float dtype; got {x.dtype.name}. Float8 stands for real numbers. "
            "Cast it to float32 first."
        )
    return x
