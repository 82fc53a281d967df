"""`layerwise_gradients`: differentiates a chain of layers with a separate scale for each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import shown
from scaling.base.types import Gradient
from scaling.layerwise.rule import LayerwiseLossScale
from scaling.ops.gradients import unscale_gradients
from scaling.rules.constant import FixedLossScaleState


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
    _check_trained_once(layers)
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


def _check_trained_once(layers: list[Callable[..., tf.Tensor]]) -> None:
    """Rejects a trainable layer that occurs twice. Called when all layers have been built."""
    trained = [layer for layer in layers if getattr(layer, "trainable_variables", ())]
    for index, layer in enumerate(trained):
        if any(layer is other for other in trained[:index]):
            raise ValueError(f"`layers` must contain each layer once; got {shown(layer)} twice")


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
