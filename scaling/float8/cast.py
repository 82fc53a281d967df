"""The two float8 formats, and casts to them and back, at a scale. What is too large saturates."""

from typing import NamedTuple

import tensorflow as tf


class Format(NamedTuple):
    """A float8 format.

    Source:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 3,
        https://arxiv.org/abs/2209.05433.

    Example:
        >>> FORMATS["float8_e4m3fn"].largest, FORMATS["float8_e5m2"].largest
        (448.0, 57344.0)
    """

    dtype: tf.DType
    largest: float  # the largest finite number


FORMATS = {
    # Three bits of fraction and no inf: for activations and weights.
    "float8_e4m3fn": Format(tf.dtypes.experimental.float8_e4m3fn, 448.0),
    # Two bits of fraction and the exponents of float16: for gradients.
    "float8_e5m2": Format(tf.dtypes.experimental.float8_e5m2, 57344.0),
}


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

    Example:
        >>> x = quantize(tf.constant([1.0, 465.0, -1e9]), 1.0, "float8_e4m3fn")
        >>> dequantize(x, 1.0).numpy().tolist()
        [1.0, 448.0, -448.0]
    """
    form = FORMATS[dtype]
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

    Example:
        >>> x = quantize(tf.constant([0.3, 3.0]), 2.0**-8, "float8_e4m3fn")
        >>> dequantize(x, 2.0**-8).numpy().tolist()
        [0.3125, 1.75]
    """
    wide = tf.float64 if dtype == tf.float64 else tf.float32
    return tf.cast(tf.cast(x, wide) * tf.cast(scale, wide), dtype)


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

    Example:
        >>> x = tf.constant([0.0, 2.0**-12, 1.0, 448.0, 500.0])
        >>> [int(count) for count in losses_of_cast(x, 1.0, "float8_e4m3fn")]
        [1, 1]
    """
    form, ratio = FORMATS[dtype], divided(x, scale)
    flushed = (plain_cast(ratio, form) == 0) & (tf.convert_to_tensor(x) != 0)
    return count(saturates(ratio, form)), count(flushed)


def saturates(ratio: tf.Tensor, form: Format) -> tf.Tensor:
    """Returns where numbers lie beyond those that rounding alone brings to a finite float8 number.

    Args:
        ratio: any shape, float32 or float64: numbers, divided by their scale.
        form: the format.

    Returns:
        The shape of `ratio`, bool; false for NaN.

    Example:
        >>> saturates(tf.constant([464.0, 465.0]), FORMATS["float8_e4m3fn"]).numpy().tolist()
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
    x = tf.convert_to_tensor(x)
    x = tf.cast(x, tf.float64 if x.dtype == tf.float64 else tf.float32)
    return x / tf.cast(scale, x.dtype)


def clipped(x: tf.Tensor, largest: float) -> tf.Tensor:
    """Returns a tensor within bounds; NaN stays NaN."""
    return tf.where(tf.math.is_nan(x), x, tf.clip_by_value(x, -largest, largest))
