"""The Keras mask of a model's outputs, before the forward pass.

Keras divides a masked loss by the number of elements of the whole batch that are not masked. A
replica's share does not tell that number, so it has to be known before the forward pass, as all
weights are. Masks are computed from the inputs alone, as a rule: `Embedding(mask_zero=True)` and
`Masking` compare them with a number. So the model is traced on the global batch, and everything is
cut away on which the mask does not depend, which leaves a few comparisons.
"""

from typing import Any

import keras
import tensorflow as tf

from scaling.base.argument_checks import shown
from trainer.base.autograph import call_user
from trainer.base.keras_private import all_layers, keras_mask
from trainer.base.warn_once import warn_once
from trainer.step.types import Model


def makes_masks(model: Model) -> bool:
    """Returns whether a layer of a model makes a mask of its inputs."""
    return bool(mask_makers(model))


def mask_makers(model: Model) -> list[keras.Layer]:
    """Returns the layers of a model that make a mask of their inputs."""
    layers = all_layers(model) if isinstance(model, keras.Model) else []
    return [layer for layer in layers if makes_mask(layer)]


def makes_mask(layer: keras.Layer) -> bool:
    """Returns whether a layer may return a mask where its inputs have none."""
    if isinstance(layer, keras.layers.Embedding):
        return bool(layer.mask_zero)
    if isinstance(layer, keras.layers.Masking):
        return True
    own = type(layer).compute_mask
    # Keras's other layers pass masks on, or combine them.
    return not own.__module__.startswith("keras.")


def check_mask_values(model: keras.Model) -> None:
    """Raises ValueError if a `Masking` layer compares half-precision inputs with another number.

    Keras casts the inputs of the layer, but not its value. -99.9 is -100 in bfloat16: no position
    would be masked, and padding would count as data.
    """
    for layer in all_layers(model):
        if not isinstance(layer, keras.layers.Masking):
            continue
        rounded = float(tf.cast(tf.constant(layer.mask_value, tf.float64), layer.compute_dtype))
        if rounded != float(tf.constant(layer.mask_value, tf.float32)):
            raise ValueError(
                f"`mask_value` of Masking must be a number that {layer.compute_dtype} has; got "
                f"{shown(layer.mask_value)} in layer {layer.name!r}, which is {rounded!r} there. "
                "The layer would mask nothing, because it compares rounded inputs with the exact "
                'number. Pad with a small integer such as -1.0 or 0.0, or pass dtype="float32" to '
                "the layer."
            )


def mask_of_outputs(model: Model, x: Any) -> tf.Tensor | None:
    """Returns the Keras mask of a model's output for some inputs, or None; runs no layer.

    Args:
        model: the model.
        x: its inputs: dense, ragged or sparse tensors.

    Returns:
        The mask: bool, shape (examples, ...).
    """
    if not makes_masks(model):
        return None
    specs = tf.nest.map_structure(tf.type_spec_from_value, x)
    found: list[tf.Tensor | None] = []

    def forward(*leaves: Any) -> tf.Tensor:
        inputs = tf.nest.pack_sequence_as(x, leaves)
        with keras.StatelessScope():  # layers that count their calls would assign here
            outputs = call_user(model, inputs, training=False)
        mask = keras_mask(outputs) if tf.is_tensor(outputs) else None
        found.append(mask)
        return tf.constant(value=True) if mask is None else mask

    traced = tf.compat.v1.wrap_function(forward, tf.nest.flatten(specs))
    if found[0] is None:
        return None
    pruned = traced.prune(traced.inputs[: -len(traced.captured_inputs) or None], traced.outputs[0])
    return pruned(*tf.nest.flatten(x, expand_composites=True))


def check_mask_is_known(model: Model, outputs: Any) -> None:
    """Raises ValueError if the outputs have a mask that `mask_of_outputs` does not find.

    Args:
        model: the model.
        outputs: its outputs in a forward pass.
    """
    masks = [keras_mask(output) for output in tf.nest.flatten(outputs)]
    found = [mask for mask in masks if mask is not None]
    if any(map(is_random, found)):
        raise ValueError(
            "`model` must make its Keras masks of numbers that are not random; got a mask on its "
            "outputs that depends on random numbers, as of a Dropout or a GaussianNoise before a "
            "Masking. The number of elements that are not masked must be known before the forward "
            "pass. Put the layer that makes the mask first, or yield (x, y, weight) from "
            "train_data."
        )
    if found and not makes_masks(model):
        raise ValueError(
            "`model` must make its Keras masks in compute_mask of a layer; got a mask on its "
            "outputs that no layer announces. The number of elements that are not masked must be "
            "known before the forward pass. Override compute_mask in the layer that makes the "
            "mask, or yield (x, y, weight) from train_data."
        )


def is_random(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor of a graph depends on random numbers that are drawn in the graph."""
    todo, seen = [] if tf.executing_eagerly() else [tensor.op], set()
    while todo:
        operation = todo.pop()
        if "Random" in operation.type:
            return True
        if operation.name not in seen:
            seen.add(operation.name)
            todo += [each.op for each in operation.inputs]
    return False


def warn_of_lost_mask(model: Model, outputs: Any) -> None:
    """Warns if a model makes a mask, but gives it to none of its outputs for sequences.

    Keras's layers warn when they drop a mask. Operations outside layers (`a + b`, `keras.ops`)
    drop it without a word, and padding then counts in the loss. Outputs with fewer than three
    dimensions have none for positions: there a layer has used the mask, as a classifier's does.

    Args:
        model: the model.
        outputs: its outputs.
    """
    outputs = tf.nest.flatten(outputs)
    sequences = [each for each in outputs if (each.shape.rank or 0) >= 3]
    if not sequences or any(keras_mask(each) is not None for each in outputs):
        return
    if makers := mask_makers(model):
        names = ", ".join(repr(layer.name) for layer in makers)
        warn_once(
            f"The Keras mask that {names} makes does not reach the model's output, so padding "
            "counts in the loss and in the metrics, as in Keras. Operations outside layers drop "
            "masks (`a + b`, keras.ops), and MultiHeadAttention takes them off the tensors that it "
            "is called with. Yield (x, y, weight) with weight 0 at padding."
        )
