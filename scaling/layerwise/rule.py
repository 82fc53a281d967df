"""`LayerwiseLossScale`: chooses a scale for the gradient of each layer's outputs."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaling.base.argument_checks import is_number, shown
from scaling.base.number_formats import (
    HALF_FLUSHED,
    HALF_MAX,
    check_power_of_two,
    floor_power_of_two,
)

SMALLEST_HALF = 2 * HALF_FLUSHED  # the smallest positive float16; the paper rounds it to 6e-8


@dataclasses.dataclass(frozen=True)
class LayerwiseLossScale:
    """Chooses the scale for the gradient of a layer's outputs before backpropagation.

    Backpropagation through the layer multiplies this gradient by the kernel, and float16
    loses products below 2^-24. If gradient and kernel are independent and normally distributed
    around 0, the standard deviation of the products is the product of the standard deviations.
    The scale is the one at which a fraction `underflow_share` of the products is lost, but at
    least 1 and at most `max_layer_scale`, rounded down to a power of two.

    The scale is smaller if, in the worst case, a sum of these products could exceed 65504. Both
    kinds of products are considered: gradient times kernel, and gradient times the layer's
    inputs, which gives the kernel's gradient. To prevent overflow, a layer's scale may be
    less than 1, which undoes scaling by the layers above. The product of all scales stays within
    `[1, max_total_scale]`. So in dense layers, and in convolutional layers with channels last, with
    one kernel and an activation whose derivative is at most 1 (none, relu, tanh, sigmoid), no
    gradient is smaller than without the rule, and none overflows that would not overflow without
    it. The rule does not consider the derivatives of activations, so with selu or exponential a
    gradient may overflow.

    Attributes:
        max_layer_scale: upper bound of the scale of one layer; a power of two, at least 1.
        max_total_scale: upper bound of the product of all layers' scales; a power of two, at
            least 1.
        underflow_share: the fraction of products that may be lost; at least 1e-12, less than 1.

    Raises:
        ValueError: if a bound is not a power of two or is below 1, or the fraction is not
            in [1e-12, 1).

    Source:
        Zhao et al., "Adaptive Loss Scaling for Mixed Precision Training", 2019,
        https://arxiv.org/abs/1910.12385; the default bounds are the paper's. Differences from
        the paper: the gradients of a layer's own variables are scaled as well and kept from
        overflowing, and a layer may undo scaling by the layers above.

    Example:
        >>> rule = LayerwiseLossScale(max_layer_scale=2.0**10)
        >>> gradient = tf.constant([[2.0**-20, -(2.0**-20)]], tf.float16)
        >>> kernel = tf.constant([[0.25, -0.25]])
        >>> float(rule.total_scale(gradient, tf.ones([1, 1]), [kernel], above=1.0))
        128.0
    """

    max_layer_scale: float = 16.0
    max_total_scale: float = 1024.0
    underflow_share: float = 1e-3

    def __post_init__(self) -> None:
        """Rejects bounds below 1, and fractions outside [1e-12, 1)."""
        for name in ("max_layer_scale", "max_total_scale"):
            bound = getattr(self, name)
            check_power_of_two(name, bound)
            if bound < 1:  # it would shrink gradients
                raise ValueError(f"`{name}` must be at least 1; got {shown(bound)}")
        if not is_number(self.underflow_share) or not 1e-12 <= self.underflow_share < 1:
            raise ValueError(
                f"`underflow_share` must be in [1e-12, 1); got {shown(self.underflow_share)}"
            )

    def total_scale(
        self, gradient: tf.Tensor, inputs: tf.Tensor, kernels: Sequence[Any], above: Any
    ) -> tf.Tensor:
        """Returns the total scale for the gradient of a layer's outputs.

        Args:
            gradient: the gradient of the layer's outputs, already scaled by `above`; any shape,
                any float dtype.
            inputs: the layer's inputs; any shape and dtype.
            kernels: the layer's kernels; rank 2 or more, with the input and output dimensions
                last, as in `Dense` and `Conv`. If there are several, the one with the smallest
                standard deviation determines the scale that prevents underflow, and the one
                with the largest worst-case sum limits it to prevent overflow. A layer without
                kernels is assumed to pass its gradient on unchanged.
            above: the total scale of the layer above; shape (), float32; 1 for the last layer.

        Returns:
            Shape (), float32: a power of two within `[1, max_total_scale]`, at most
            `max_layer_scale` times `above`; `above` itself if the gradient is not finite.
        """
        above = tf.cast(above, tf.float32)
        kernels = [tf.cast(kernel, tf.float32) for kernel in kernels]
        deviation, largest = _deviation(gradient), _largest(gradient)
        if kernels:
            rows = tf.cast(tf.reduce_prod(tf.shape(gradient)[:-1]), tf.float32)
            input_size = tf.maximum(_largest(inputs), 1.0) if inputs.dtype.is_floating else 1.0
            sums = [rows * input_size, *(_largest(kernel) * _terms(kernel) for kernel in kernels)]
            deviation *= tf.reduce_min([_deviation(kernel) for kernel in kernels])
            largest *= tf.reduce_max(sums)
        # A fraction `underflow_share` of a normal distribution is within this many deviations of 0.
        width = statistics.NormalDist().inv_cdf((1 + self.underflow_share) / 2)
        wanted = tf.math.divide_no_nan(SMALLEST_HALF / width, deviation)
        wanted = tf.clip_by_value(wanted, 1.0, self.max_layer_scale)
        scale = floor_power_of_two(tf.minimum(wanted, HALF_MAX / largest))
        total = tf.clip_by_value(above * scale, 1.0, self.max_total_scale)
        return tf.where(tf.math.is_finite(largest) & tf.math.is_finite(deviation), total, above)


def _deviation(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the standard deviation around 0: shape (), float32."""
    values, largest = tf.cast(tensor, tf.float32), _largest(tensor)
    # As fractions of the largest: squares underflow below 2^-63 and overflow above 2^63.
    fractions = tf.math.divide_no_nan(values, largest)
    return largest * tf.sqrt(tf.reduce_mean(tf.square(fractions)))


def _largest(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the largest magnitude: shape (), float32."""
    return tf.cast(tf.reduce_max(tf.abs(tensor)), tf.float32)


def _terms(kernel: tf.Tensor) -> float:
    """Returns the number of products summed in each element of the gradient of a layer's inputs."""
    return float(math.prod(kernel.shape) / kernel.shape[-2])
