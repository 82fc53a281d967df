"""The two float8 formats, and their limits."""

from typing import NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import is_name_in, shown


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


def format_of(name: object) -> Format:
    """Returns a format by its name; raises ValueError for a name that is none."""
    if not is_name_in(name, FORMATS):
        raise ValueError(
            f'`dtype` must be "float8_e4m3fn" or "float8_e5m2"; got {shown(name)}. These are the '
            'float8 formats that TensorFlow has. Use "float8_e4m3fn" for activations and weights, '
            '"float8_e5m2" for gradients.'
        )
    return FORMATS[name]
