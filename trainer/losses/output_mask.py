"""The Keras mask of a model's outputs, before the forward pass.

Keras divides a masked loss by the number of elements of the whole batch that are not masked. A
replica's share does not tell that number, so it has to be known before the forward pass, as all
weights are. Masks are computed from the inputs alone, as a rule: `Embedding(mask_zero=True)` and
`Masking` compare them with a number. So the model is traced on the global batch, and everything is
cut away that the mask does not need, which leaves a few comparisons. A `Concatenate` needs the
shape of what it joins: with batches of unknown size, the layers before it run for that.
"""

from typing import Any

import keras
import tensorflow as tf

from scaling.base.argument_checks import shown
from trainer.base.autograph import call_user
from trainer.base.trace_apart import apart
from trainer.keras_compat import all_layers, keras_mask, with_keras_mask
from trainer.losses.loss_fn import product, without_last_ones
from trainer.losses.outputs import only_one
from trainer.step.types import Model


def makes_masks(model: Model) -> bool:
    """Returns whether a layer of a model makes a mask of its inputs."""
    layers = all_layers(model) if isinstance(model, keras.Layer) else []
    return any(map(makes_mask, layers))


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
                f"`mask_value` must be a number that {layer.compute_dtype} has; got "
                f"{shown(layer.mask_value)} in {layer.name!r}, which would mask nothing"
            )


def mask_of_outputs(model: Model, x: Any) -> tf.Tensor | None:
    """Returns the Keras mask of a model's output for some inputs, or None.

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
        outputs = only_one(outputs)
        mask = keras_mask(outputs) if tf.is_tensor(outputs) else None
        if mask is not None:  # a graph that is pruned does not tell the shapes behind a lookup
            mask = tf.ensure_shape(mask, mask.shape)
        found.append(mask)
        return tf.constant(value=True) if mask is None else mask

    with apart():
        traced = tf.compat.v1.wrap_function(forward, tf.nest.flatten(specs))
    if found[0] is None:
        return None
    arguments = traced.inputs[: -len(traced.captured_inputs) or None]
    pruned = traced.prune(arguments, traced.outputs[0])
    return pruned(*tf.nest.flatten(x, expand_composites=True))


def masked(
    outputs: tf.Tensor, sample_weight: tf.Tensor | None, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
    """Returns outputs with their Keras mask, weights, and the mask, as metrics of Keras take them.

    It multiplies weights and mask, and NumPy's rules would take weights of shape (examples,) for
    those of the elements. So these have the mask's shape here.

    Args:
        outputs: shape (examples, ...). Outputs of another shape than the mask's get none.
        sample_weight: shape (examples, ...), or None.
        mask: shape (examples, ...), or None.
    """
    if mask is None or not mask.shape.is_compatible_with(outputs.shape[: mask.shape.rank]):
        return outputs, sample_weight, None
    if sample_weight is not None:
        weights = without_last_ones(tf.cast(sample_weight, tf.float32))
        if weights.shape.rank < mask.shape.rank:
            sample_weight = product(weights, tf.ones_like(mask, tf.float32))
    return with_keras_mask(outputs, mask), sample_weight, mask
