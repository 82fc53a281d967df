"""`LayerwiseLossScale`: how much a layer's gradient lacks, before the layer takes it down."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaling.base.argument_checks import as_tensor, check_scalar, is_number
from scaling.base.number_formats import (
    HALF_FLUSHED,
    HALF_MAX,
    check_power_of_two,
    floor_power_of_two,
)

SMALLEST_HALF = 2 * HALF_FLUSHED  # the smallest positive float16; the paper rounds it to 6e-8


@dataclasses.dataclass(frozen=True)
class LayerwiseLossScale:
    """By how much to multiply the gradient of a layer's outputs, before the layer takes it down.

    The layer multiplies it with its kernel, and products below 2^-24 are lost. If gradient
    and kernel are independent and normal about 0, a product's deviation is that of the one
    times that of the other. The scale is the one at which a share of `underflow_share` is
    lost, but at least 1 and at most `max_layer_scale`, rounded down to a power of two.

    It is less if a sum of such products could pass 65504, at the worst: of the gradient with
    the kernel, or with the layer's inputs, which is the kernel's own gradient. For that it
    may fall below 1 and give back what the layers above have gathered. All scales together
    stay within `[1, max_total_scale]`: in dense and convolutional layers no gradient is
    smaller than without the rule, and none overflows that would not.

    Attributes:
        max_layer_scale: the most that one layer multiplies by; a power of two, at least 1.
        max_total_scale: the most that all layers together multiply by; the same.
        underflow_share: the share of products that may be lost; between 0 and 1.

    Raises:
        ValueError: if a bound is no power of two or below 1, or the share not within (0, 1).

    Source:
        Zhao et al., "Adaptive Loss Scaling for Mixed Precision Training", 2019,
        https://arxiv.org/abs/1910.12385; the default bounds are theirs. Ours: a layer's own
        gradient is scaled as well, and leaves room; scales are given back.

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
        """Refuses bounds below 1, and a share that is none."""
        for name in ("max_layer_scale", "max_total_scale"):
            check_power_of_two(name, getattr(self, name))
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1; got {getattr(self, name)!r}. A layer is never "
                    "asked to shrink its gradient. Use 1.0 to scale nothing."
                )
        if not is_number(self.underflow_share) or not 0 < self.underflow_share < 1:
            raise ValueError(
                f"`underflow_share` must be between 0 and 1; got {self.underflow_share!r}. It is "
                "a share of products, and some are always lost. Use 1e-3."
            )

    def total_scale(
        self, gradient: tf.Tensor, inputs: tf.Tensor, kernels: Sequence[Any], above: Any
    ) -> tf.Tensor:
        """Returns what the gradient of a layer's outputs should be multiplied by in all.

        Args:
            gradient: of the layer's outputs, times `above`; any shape, any float dtype.
            inputs: of the layer; any shape and dtype.
            kernels: of the layer; rank 2 or more, inputs and outputs last, as in `Dense` and
                `Conv`. Of several, the smallest decides against underflow, the largest
                against overflow. A layer without any is taken to pass its gradient on.
            above: the total scale of the layer above; shape (), float32; 1 for the last.

        Returns:
            Shape (), float32: a power of two within `[1, max_total_scale]`, at most
            `max_layer_scale` times `above`; `above` itself if the gradient is not finite.

        Raises:
            TypeError: if the gradient is not of a float dtype, or something is no tensor.
            ValueError: if a kernel has fewer dimensions than two, or `above` has any.
        """
        gradient, inputs = as_tensor("gradient", gradient), as_tensor("inputs", inputs)
        if not gradient.dtype.is_floating:
            raise TypeError(
                f"`gradient` must be of a float dtype; got {gradient.dtype.name}. It is what "
                "float16 may flush. Pass the gradient of the layer's outputs."
            )
        check_scalar(
            "above",
            as_tensor("above", above),
            "It is one factor for all of the gradient.",
            "Pass the total scale of the layer above, 1.0 for the last",
        )
        kernels = [tf.cast(as_tensor("kernels", kernel), tf.float32) for kernel in kernels]
        for kernel in kernels:
            if len(kernel.shape) < 2:
                raise ValueError(
                    f"`kernels` must be of rank 2 or more; got shape {tuple(kernel.shape)}. "
                    "Gradients are multiplied with matrices. Pass a list, without biases."
                )
        deviation, largest = _deviation(gradient), _largest(gradient)
        if kernels:
            rows = tf.cast(tf.size(gradient) // tf.shape(gradient)[-1], tf.float32)
            input_size = tf.maximum(_largest(inputs), 1.0) if inputs.dtype.is_floating else 1.0
            sums = [rows * input_size, *(_largest(kernel) * _terms(kernel) for kernel in kernels)]
            deviation *= tf.reduce_min([_deviation(kernel) for kernel in kernels])
            largest *= tf.reduce_max(sums)
        # So many deviations about 0 hold a share of `underflow_share` of normal numbers.
        width = statistics.NormalDist().inv_cdf((1 + self.underflow_share) / 2)
        wished = tf.math.divide_no_nan(SMALLEST_HALF / width, deviation)
        wished = tf.clip_by_value(wished, 1.0, self.max_layer_scale)
        scale = floor_power_of_two(tf.minimum(wished, HALF_MAX / largest))
        total = tf.clip_by_value(above * scale, 1.0, self.max_total_scale)
        return tf.where(tf.math.is_finite(largest) & tf.math.is_finite(deviation), total, above)


def _deviation(tensor: tf.Tensor) -> tf.Tensor:
    """The standard deviation about 0: shape (), float32."""
    return tf.sqrt(tf.reduce_mean(tf.square(tf.cast(tensor, tf.float32))))


def _largest(tensor: tf.Tensor) -> tf.Tensor:
    """The largest magnitude: shape (), float32."""
    return tf.cast(tf.reduce_max(tf.abs(tensor)), tf.float32)


def _terms(kernel: tf.Tensor) -> float:
    """How many products add up to one element of the gradient of a layer's inputs."""
    return math.prod(kernel.shape) / kernel.shape[-2]
