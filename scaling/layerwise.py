"""A separate loss scale for every layer of a chain, after Zhao et al., 2019.

It helps when the gradients of the layers differ so much that no single scale fits all of them; the
README of this package shows when that is. Nothing else in `scaling` imports this.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import is_number, shown
from scaling.base.number_formats import (
    HALF_FLUSHED,
    HALF_MAX,
    check_power_of_two,
    floor_power_of_two,
)
from scaling.ops.gradients import Gradient, unscale_gradients
from scaling.rules.constant import FixedLossScaleState

__all__ = ["LayerwiseGradients", "LayerwiseLossScale", "layerwise_gradients"]

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


class LayerwiseGradients(NamedTuple):
    """The result of `layerwise_gradients`.

    Example:
        >>> LayerwiseGradients._fields
        ('loss', 'gradients', 'total_scales')
    """

    loss: tf.Tensor  # the result of `loss_fn`
    # One list per layer, in the order of its trainable variables; float32, unscaled.
    gradients: list[list[Gradient]]
    total_scales: tf.Tensor  # shape=(layers,), float32: the scale of each layer's gradients


def layerwise_gradients(
    layers: Any,
    inputs: Any,
    loss_fn: Callable[[tf.Tensor], tf.Tensor],
    rule: LayerwiseLossScale | None = None,
    *,
    training: bool = True,
) -> LayerwiseGradients:
    """Differentiates a chain of layers, each with its own loss scale.

    The function backpropagates layer by layer. From the last layer to the first, the gradient of
    the layer's outputs is scaled as `rule` says. The gradients of the layer's variables are
    then divided, in float32, by the total scale so far. All scales are powers of two, so this
    changes no bits.

    To use an ordinary loss scale in addition, let `loss_fn` return `scale_loss(loss, state)`
    and pass the gradients to `unscale_gradients`. An overflow appears in the gradients as inf
    or NaN. The layers' `losses` (regularizers) are not included.

    Args:
        layers: a `keras.Sequential`, or a list of callables, each of which takes the output of
            the previous one. Gradients are computed for the layers' `trainable_variables`.
        inputs: a tensor, the input of the first layer.
        loss_fn: a function of the last layer's output. If its result is not a scalar, the sum
            of its elements is differentiated.
        rule: a `LayerwiseLossScale`; None means `LayerwiseLossScale()`.
        training: passed to Keras layers.

    Returns:
        The loss, the gradients and each layer's total scale.

    Raises:
        ValueError: if `layers` contains a trainable layer twice.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
        >>> result = layerwise_gradients(model, tf.ones([3, 4]), tf.reduce_mean)
        >>> [[gradient.shape.as_list() for gradient in layer] for layer in result.gradients]
        [[[4, 2], [2]], [[2, 1], [1]]]
    """
    rule = LayerwiseLossScale() if rule is None else rule
    layers = list(layers.layers if isinstance(layers, tf.keras.Sequential) else layers)
    passes: list[_LayerPass] = []
    outputs = tf.convert_to_tensor(inputs)
    for layer in layers:
        passes.append(_forward(layer, outputs, training, is_first=not passes))
        outputs = passes[-1].outputs
    # Two gradients of one variable would have different scales.
    trained = [layer for layer in layers if getattr(layer, "trainable_variables", ())]
    if len({id(layer) for layer in trained}) < len(trained):
        raise ValueError(f"`layers` must contain each trained layer once; got {shown(layers)}")
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        loss = tf.convert_to_tensor(loss_fn(outputs))
    gradient, total = tape.gradient(loss, outputs), tf.constant(1.0)
    gradients, totals = [], []
    for layer_pass in reversed(passes):
        gradient, layer_gradients, total = _backward(layer_pass, gradient, total, rule)
        gradients.append(layer_gradients)
        totals.append(total)
    return LayerwiseGradients(loss, gradients[::-1], tf.stack(totals[::-1]))


class _LayerPass(NamedTuple):
    """One layer's forward pass, and the tape that recorded only this layer."""

    layer: Callable[..., tf.Tensor]
    inputs: tf.Tensor
    watched_inputs: list[tf.Tensor]  # the inputs if they need a gradient, otherwise empty
    outputs: tf.Tensor
    tape: tf.GradientTape


def _forward(
    layer: Callable[..., tf.Tensor], inputs: tf.Tensor, training: bool, is_first: bool
) -> _LayerPass:
    """Calls a layer and records its forward pass."""
    watched_inputs = [inputs] if inputs.dtype.is_floating and not is_first else []
    keywords = {"training": training} if isinstance(layer, tf.keras.layers.Layer) else {}
    with tf.GradientTape() as tape:
        tape.watch(watched_inputs)
        outputs = tf.convert_to_tensor(layer(inputs, **keywords))
    return _LayerPass(layer, inputs, watched_inputs, outputs, tape)


def _backward(
    layer_pass: _LayerPass, gradient: Gradient, above: tf.Tensor, rule: LayerwiseLossScale
) -> tuple[Gradient, list[Gradient], tf.Tensor]:
    """Backpropagates through one layer.

    Args:
        layer_pass: the layer's forward pass.
        gradient: the gradient of the layer's outputs, scaled by `above`; None if there is none.
        above: the total scale of the layer above; shape (), float32.
        rule: chooses the layer's scale.

    Returns:
        The scaled gradient of the layer's inputs, or None; the unscaled gradients of its
        trainable variables; and the layer's total scale.
    """
    variables = list(getattr(layer_pass.layer, "trainable_variables", ()))
    if gradient is None:
        return None, [None] * len(variables), above
    kernels = _kernels_of(layer_pass.layer)
    total = rule.total_scale(gradient, layer_pass.inputs, kernels, above)
    # Multiply in float32: in half precision, the scale itself could be infinite.
    gradient = tf.cast(tf.cast(gradient, tf.float32) * (total / above), layer_pass.outputs.dtype)
    input_gradients, variable_gradients = layer_pass.tape.gradient(
        layer_pass.outputs, (layer_pass.watched_inputs, variables), gradient
    )
    variable_gradients = unscale_gradients(variable_gradients, FixedLossScaleState(total))
    return (input_gradients[0] if input_gradients else None), variable_gradients, total


def _kernels_of(layer: Callable[..., tf.Tensor]) -> list[Any]:
    """Returns a layer's kernels, with the input and output dimensions last."""
    kernels = [variable for variable in getattr(layer, "variables", ()) if _is_kernel(variable)]
    keras = tf.keras.layers
    transposed = keras.Conv1DTranspose, keras.Conv2DTranspose, keras.Conv3DTranspose
    if isinstance(layer, transposed):
        return [tf.linalg.matrix_transpose(kernel) for kernel in kernels]
    return kernels


def _is_kernel(variable: Any) -> bool:
    """Returns whether a variable is a kernel: floats, of rank 2 or more."""
    return len(variable.shape) >= 2 and tf.as_dtype(variable.dtype).is_floating
