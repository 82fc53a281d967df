"""Keras's BatchNormalization of images in one kernel of TensorFlow's.

Keras 3 computes it in about nine operations, each of which reads or writes every activation.
TensorFlow has one kernel for its forward pass in training, and one for its gradient (Ioffe and
Szegedy, arXiv:1502.03167, section 3); docs/performance.md has figures. XLA joins Keras's
operations by itself, and knows the kernel only as these.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from trainer.base.keras_private import all_layers, replaced_calls

LEAST_EPSILON = 1.001e-5  # that every kernel takes


def fused_batch_norm(model: Any, *, wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Within, layers that the kernel can compute are, in training; nothing differs but rounding.

    Trace a function inside it; the layers are left as they were.

    Args:
        model: whose layers; a `tf.Module` has none.
        wanted: False changes nothing.
    """
    wanted &= isinstance(model, keras.Model)
    layers = [layer for layer in all_layers(model) if can_be_fused(layer)] if wanted else []
    return replaced_calls(layers, lambda layer: functools.partial(fused_call, layer, layer.call))


def can_be_fused(layer: keras.Layer) -> bool:
    """Returns whether a layer is Keras's own, and does what the kernel does."""
    return (
        type(layer) is keras.layers.BatchNormalization
        and layer.trainable
        and not layer.renorm
        and not layer.synchronized
        and layer.epsilon >= LEAST_EPSILON
        and "call" not in vars(layer)  # a probe's, or somebody else's
    )


def fused_call(
    layer: keras.layers.BatchNormalization,
    usual: Callable[..., tf.Tensor],
    inputs: Any,
    training: bool | None = None,
    mask: Any = None,
) -> Any:
    """Calls a layer; by the kernel if these inputs are images, channels last.

    Args:
        layer: whose variables are read and written.
        usual: its own `call`.
        inputs: shape (examples, height, width, channels) for the kernel; else of any.
        training: as in Keras.
        mask: likewise; the kernel knows none.
    """
    images = isinstance(inputs, tf.Tensor) and inputs.shape.rank == 4 and layer.axis in (-1, 3)
    if not (training and mask is None and images and inputs.dtype.size <= 4):
        return usual(inputs, training=training, mask=mask)
    channels = inputs.shape[-1]
    made = tf.raw_ops.FusedBatchNormV3(
        x=inputs,
        scale=as_float32(layer.gamma) if layer.scale else tf.ones([channels]),
        offset=as_float32(layer.beta) if layer.center else tf.zeros([channels]),
        mean=[],
        variance=[],
        epsilon=layer.epsilon,
    )
    # The kernel's is the estimate from a sample; Keras keeps the variance of what it has seen.
    count = tf.cast(tf.size(inputs) // channels, tf.float32)
    variance = made.batch_variance * (count - 1) / count
    for statistic, seen in (
        (layer.moving_mean, made.batch_mean),
        (layer.moving_variance, variance),
    ):
        kept = as_float32(statistic) * layer.momentum
        statistic.assign(kept + seen * (1.0 - layer.momentum))
    return tf.cast(made.y, layer.compute_dtype)


def as_float32(variable: keras.Variable) -> tf.Tensor:
    """Returns what a layer sees of its variable, as Keras casts it."""
    return keras.ops.cast(variable, "float32")
