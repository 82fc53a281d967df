"""Keras's BatchNormalization of images, computed by TensorFlow's fused kernel.

Keras 3 computes it in about nine operations, each of which reads or writes every activation.
TensorFlow has one kernel for the forward pass in training and one for its gradient (Ioffe and
Szegedy, arXiv:1502.03167, section 3); docs/performance.md has measurements. Where XLA compiles the
pass, there is nothing to gain: XLA fuses Keras's operations itself, and would expand the
kernel into the same operations.
"""

import contextlib
import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from trainer.keras_compat import all_layers, replaced_calls
from trainer.step.types import Model

MIN_EPSILON = 1.001e-5  # the smallest epsilon that the kernel accepts on every device


def fused_batch_norm(model: Model, *, wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which BatchNormalization layers use the fused kernel in training.

    Layers that the kernel cannot compute keep Keras's operations. Results differ by rounding only.
    Trace a function inside the context; the layers are restored when the context ends.

    Args:
        model: the model whose layers to change; a `tf.Module` has none.
        wanted: whether to use the fused kernel; False makes the context do nothing.
    """
    wanted &= isinstance(model, keras.Layer)
    layers = [layer for layer in all_layers(model) if can_be_fused(layer)] if wanted else []
    return replaced_calls(layers, lambda layer: functools.partial(fused_call, layer, layer.call))


def can_be_fused(layer: keras.Layer) -> bool:
    """Returns whether a layer is Keras's own BatchNormalization, with supported settings."""
    return (
        type(layer) is keras.layers.BatchNormalization
        and layer.trainable
        and not layer.renorm
        and not layer.synchronized
        and layer.epsilon >= MIN_EPSILON
        and "call" not in vars(layer)  # not replaced already, for example by a layer probe
    )


def fused_call(
    layer: keras.layers.BatchNormalization,
    keras_call: Callable[..., tf.Tensor],
    inputs: tf.Tensor,
    training: bool | None = None,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    """Calls a layer, with the fused kernel if the inputs are images with channels last.

    Args:
        layer: the layer whose variables are read and written.
        keras_call: the layer's own `call`, for everything that the kernel cannot compute.
        inputs: for the kernel, shape (examples, height, width, channels).
        training: as in Keras.
        mask: as in Keras; the kernel does not support masks.
    """
    images = isinstance(inputs, tf.Tensor) and inputs.shape.rank == 4 and layer.axis in (-1, 3)
    supported = images and inputs.dtype in (tf.float32, tf.float16, tf.bfloat16)
    if not (training and mask is None and supported):
        return keras_call(inputs, training=training, mask=mask)
    channels = inputs.shape[-1]
    result = tf.raw_ops.FusedBatchNormV3(
        x=inputs,
        scale=as_float32(layer.gamma) if layer.scale else tf.ones([channels]),
        offset=as_float32(layer.beta) if layer.center else tf.zeros([channels]),
        mean=[],
        variance=[],
        epsilon=layer.epsilon,
    )
    # The kernel returns the unbiased variance; Keras tracks the biased one.
    count = tf.cast(tf.size(inputs) // channels, tf.float32)
    variance = result.batch_variance * (count - 1) / count
    for statistic, in_batch in (
        (layer.moving_mean, result.batch_mean),
        (layer.moving_variance, variance),
    ):
        kept = as_float32(statistic) * layer.momentum
        statistic.assign(kept + in_batch * (1.0 - layer.momentum))
    return tf.cast(result.y, layer.compute_dtype)


def as_float32(variable: keras.Variable) -> tf.Tensor:
    """Returns the value that a variable's layer sees under autocast, converted to float32."""
    return keras.ops.cast(variable, "float32")
