"""Casts to float8 and back, at a scale. What is too large saturates."""

import tensorflow as tf

from scaling.base.argument_checks import as_tensor
from scaling.float8.formats import format_of


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
        ValueError: if `dtype` is not one of the two.
        TypeError: if `x` does not have a float dtype.

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
        dtype: of the result, and of the product.

    Returns:
        The shape of `x`. With a scale that is a power of two, exactly what `x` stands for, if the
        dtype can represent it.

    Raises:
        TypeError: if `x` does not have a float dtype.

    Example:
        >>> x = quantize(tf.constant([0.3, 3.0]), 2.0**-8, "float8_e4m3fn")
        >>> dequantize(x, 2.0**-8).numpy().tolist()
        [0.3125, 1.75]
    """
    return tf.cast(checked(x), dtype) * tf.cast(scale, dtype)


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
        ValueError: if `dtype` is not one of the two.
        TypeError: if `x` does not have a float dtype.

    Example:
        >>> x = tf.constant([0.0, 2.0**-12, 1.0, 448.0, 500.0])
        >>> [int(count) for count in losses_of_cast(x, 1.0, "float8_e4m3fn")]
        [1, 1]
    """
    form, ratio = format_of(dtype), divided(x, scale)
    # TensorFlow's own cast, which does not saturate.
    plain = tf.cast(tf.cast(ratio, form.dtype), tf.float32)
    saturated = ~tf.math.is_finite(plain) & ~tf.math.is_nan(ratio)
    flushed = (plain == 0) & (ratio != 0)
    return count(saturated), count(flushed)


def count(flags: tf.Tensor) -> tf.Tensor:
    """Returns the number of true flags: shape (), int32."""
    return tf.math.count_nonzero(flags, dtype=tf.int32)


def divided(x: tf.Tensor, scale: tf.Tensor | float) -> tf.Tensor:
    """Returns a tensor, divided by its scale in its own dtype, but at least float32."""
    x = checked(x)
    x = tf.cast(x, tf.float64 if x.dtype == tf.float64 else tf.float32)
    return x / tf.cast(scale, x.dtype)


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
