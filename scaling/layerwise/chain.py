"""`layerwise_gradients`: every layer of a chain has a scale of its own, found as it is needed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from scaling.base.argument_checks import as_tensor, check_bool
from scaling.layerwise.rule import LayerwiseLossScale
from scaling.ops.gradients import unscale_gradients
from scaling.rules.constant import FixedLossScaleState


class LayerwiseGradients(NamedTuple):
    """What `layerwise_gradients` returns.

    Example:
        >>> LayerwiseGradients._fields
        ('loss', 'gradients', 'total_scales')
    """

    loss: tf.Tensor  # as `loss_fn` returned it
    gradients: list[list[Any]]  # for each layer, like its trainable variables; float32, unscaled
    total_scales: tf.Tensor  # shape=(layers,), float32: what each layer's were multiplied by


def layerwise_gradients(
    layers: Any,
    inputs: Any,
    loss_fn: Callable[[tf.Tensor], tf.Tensor],
    rule: LayerwiseLossScale | None = None,
    *,
    training: bool = True,
) -> LayerwiseGradients:
    """Differentiates a chain of layers, each with a loss scale of its own.

    It is backpropagation, written out: from the last layer to the first, the gradient of the
    layer's outputs is multiplied as `rule` says, and the layer's gradients are divided, in
    float32, by all that they were multiplied by so far. Powers of two cost no bit.

    An ordinary loss scale goes around it: let `loss_fn` return `scale_loss(loss, state)` and
    hand the gradients to `unscale_gradients`. An overflow shows in them as inf or NaN. The
    layers' `losses` (regularizers) are not part of it.

    Args:
        layers: a `keras.Sequential`, or a list of callables, each of which takes what the
            one before returns; those with `variables` and `trainable_variables` are trained.
        inputs: a tensor: what the first layer takes.
        loss_fn: takes what the last layer returns; its sum is what is differentiated.
        rule: a `LayerwiseLossScale`; None for one with the paper's bounds.
        training: handed to those layers that are Keras's.

    Returns:
        The loss, the gradients and each layer's total scale.

    Raises:
        TypeError: if another argument is not what it is said to be.
        ValueError: if `layers` is another model, empty, or trains a layer twice; if no
            gradient reaches a layer that is trained.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
        >>> result = layerwise_gradients(model, tf.ones([3, 4]), tf.reduce_mean)
        >>> [[gradient.shape.as_list() for gradient in layer] for layer in result.gradients]
        [[[4, 2], [2]], [[2, 1], [1]]]
    """
    rule = LayerwiseLossScale() if rule is None else rule
    layers = _chain(layers)
    _check_rest(loss_fn, rule, training)
    passes: list[_Pass] = []
    outputs = as_tensor("inputs", inputs)
    for layer in layers:
        passes.append(_forward(layer, outputs, training, is_first=not passes))
        outputs = passes[-1].outputs
    _check_once(layers)
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        loss = loss_fn(outputs)
    gradient, total = tape.gradient(loss, outputs), tf.constant(1.0)
    gradients, totals = [], []
    for done in reversed(passes):
        gradient, of_layer, total = _backward(done, gradient, total, rule)
        gradients.append(of_layer)
        totals.append(total)
    return LayerwiseGradients(loss, gradients[::-1], tf.stack(totals[::-1]))


class _Pass(NamedTuple):
    """One layer's forward pass, and the tape that saw it and nothing else."""

    layer: Any
    inputs: tf.Tensor
    below: list[tf.Tensor]  # the inputs, if a gradient goes further down
    outputs: tf.Tensor
    tape: tf.GradientTape


def _forward(layer: Any, inputs: tf.Tensor, training: bool, is_first: bool) -> _Pass:
    """Calls a layer."""
    below = [inputs] if inputs.dtype.is_floating and not is_first else []
    keywords = {"training": training} if isinstance(layer, tf.keras.layers.Layer) else {}
    with tf.GradientTape() as tape:
        tape.watch(below)
        outputs = layer(inputs, **keywords)
    return _Pass(layer, inputs, below, outputs, tape)


def _backward(
    done: _Pass, gradient: Any, above: tf.Tensor, rule: LayerwiseLossScale
) -> tuple[Any, list[Any], tf.Tensor]:
    """Returns the gradient of a layer's inputs, scaled, those of its variables, and the scale."""
    variables = list(getattr(done.layer, "trainable_variables", ()))
    if gradient is None:
        if variables:
            raise ValueError(
                f"`layers` must pass a gradient down to {done.layer!r}; got None. Something "
                "between it and the loss has no gradient. Freeze it, or mend that."
            )
        return None, [], above
    kernels = [kernel for kernel in getattr(done.layer, "variables", ()) if _is_kernel(kernel)]
    total = rule.total_scale(gradient, done.inputs, kernels, above)
    # In float32: in half precision the scale alone can be infinite.
    gradient = tf.cast(tf.cast(gradient, tf.float32) * (total / above), done.outputs.dtype)
    below, of_layer = done.tape.gradient(done.outputs, (done.below, variables), gradient)
    of_layer = unscale_gradients(of_layer, FixedLossScaleState(total))
    return (below[0] if below else None), of_layer, total


def _chain(layers: Any) -> list[Any]:
    """Returns the layers of a chain, first to last, or refuses what is none."""
    chain = layers.layers if isinstance(layers, tf.keras.Sequential) else layers
    if not isinstance(chain, list | tuple) or not chain or not all(map(callable, chain)):
        raise ValueError(
            "`layers` must be a keras.Sequential or a list of callables, each fed by the one "
            f"before; got {layers!r}. Branches that join would need equal scales. Make one layer "
            "of what branches, and a list of the layers."
        )
    return list(chain)


def _check_rest(loss_fn: Any, rule: Any, training: Any) -> None:
    """Refuses what would be found out only after the forward pass, or never."""
    if not callable(loss_fn):
        raise TypeError(
            f"`loss_fn` must be a function of the last layer's outputs; got {loss_fn!r}. It is "
            "differentiated once, as it stands. Pass for instance tf.reduce_mean."
        )
    if not isinstance(rule, LayerwiseLossScale):
        raise TypeError(
            f"`rule` must be a LayerwiseLossScale; got {type(rule).__name__}. It looks at one "
            "layer at a time, where other rules look at steps. Pass LayerwiseLossScale(), or None."
        )
    check_bool("training", training, "Keras's layers are told so.", "True is usual")


def _check_once(layers: list[Any]) -> None:
    """Refuses a layer that is trained in two places, now that all layers have their variables."""
    trained = [layer for layer in layers if getattr(layer, "trainable_variables", ())]
    for place, layer in enumerate(trained):
        if any(layer is other for other in trained[:place]):
            raise ValueError(
                f"`layers` must hold a layer once; got {layer!r} twice. Its two gradients have "
                "two scales. Give each place a layer of its own."
            )


def _is_kernel(variable: Any) -> bool:
    """Whether a variable is one that gradients are multiplied with: a float matrix, or more."""
    return len(variable.shape) >= 2 and tf.as_dtype(variable.dtype).is_floating
