"""The Keras mask of a model's outputs, before the forward pass.

Keras divides a masked loss by the number of elements of the whole batch that are not masked. A
replica's share does not tell that number, so it has to be known before the forward pass, as all
weights are. Masks are computed from the inputs alone, as a rule: `Embedding(mask_zero=True)` and
`Masking` compare them with a number. So the model is traced on the global batch, and everything is
cut away that the mask does not need, which leaves a few comparisons. A `Concatenate` needs the
shape of what it joins: with batches of unknown size, the layers before it run for that.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaling.base.argument_checks import shown
from trainer.base.autograph import call_user
from trainer.base.trace_apart import apart
from trainer.base.warn_once import warn_once
from trainer.keras_compat import all_layers, keras_mask, with_keras_mask
from trainer.losses.loss_fn import product, without_last_ones
from trainer.losses.output_losses import only_one
from trainer.step.dependence import operations_before, values_read
from trainer.step.types import Model


def makes_masks(model: Model) -> bool:
    """Returns whether a layer of a model makes a mask of its inputs."""
    return bool(mask_makers(model))


def mask_makers(model: Model) -> list[keras.Layer]:
    """Returns the layers of a model that make a mask of their inputs."""
    layers = all_layers(model) if isinstance(model, keras.Layer) else []
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
    """Returns the Keras mask of a model's output for some inputs, or None.

    Args:
        model: the model.
        x: its inputs: dense, ragged or sparse tensors.

    Returns:
        The mask: bool, shape (examples, ...).
    """
    if not makes_masks(model):
        return None
    traced = traced_mask(model, x, training=False)
    return None if traced is None else traced(*tf.nest.flatten(x, expand_composites=True))


def traced_mask(model: Model, x: Any, *, training: bool) -> Any:
    """Returns a function of the parts of some inputs that computes the mask; None without a mask.

    Args:
        model: the model.
        x: inputs of the shapes and dtypes that the function takes.
        training: the argument of the model's call.
    """
    specs = tf.nest.map_structure(tf.type_spec_from_value, x)
    found: list[tf.Tensor | None] = []

    def forward(*leaves: Any) -> tf.Tensor:
        inputs = tf.nest.pack_sequence_as(x, leaves)
        with keras.StatelessScope():  # layers that count their calls would assign here
            outputs = call_user(model, inputs, training=training)
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
    return traced.prune(arguments_of(traced), traced.outputs[0])


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


def arguments_of(traced: Any) -> list[tf.Tensor]:
    """Returns the tensors of a traced function's graph that stand for its arguments."""
    inputs: list[tf.Tensor] = traced.inputs[: -len(traced.captured_inputs) or None]
    return inputs


def check_mask_in_training(model: Model, x: Any) -> None:
    """Raises ValueError if a model computes its mask by other operations in training.

    Args:
        model: the model.
        x: its inputs.
    """
    if not makes_masks(model):
        return
    otherwise, in_training = (traced_mask(model, x, training=each) for each in (False, True))
    if otherwise is None and in_training is None:
        return
    if in_training is not None:
        check_not_random([in_training.outputs[0]])
    if None in (otherwise, in_training) or computation(otherwise) != computation(in_training):
        raise ValueError(
            "`model` must make its Keras masks in training as it does otherwise; got a mask on its "
            "outputs that depends on a layer which returns something else in training, such as "
            "Dropout, BatchNormalization or one of your own before a Masking. The number of "
            "elements that are not masked must be known before the forward pass. Put the layer "
            "that makes the mask first, or leave it out and yield (x, y, weight) from train_data."
        )


def computation(traced: Any) -> list[tuple[Any, ...]]:
    """Returns the operations that the result of a traced function needs, in the graph's order."""
    needed = operations_before([traced.outputs[0]])
    order = [each for each in traced.graph.get_operations() if each in needed]
    numbers = {operation: number for number, operation in enumerate(order)}
    places = {tensor.op: place for place, tensor in enumerate(arguments_of(traced))}
    captured = {inner.op: id(outer) for outer, inner in traced.graph.captures}
    library = traced.graph.as_graph_def().library.function
    functions = {function.signature.name: function.node_def for function in library}
    return [
        (
            operation.type,
            places.get(operation),
            captured.get(operation),
            [(numbers[each.op], each.value_index) for each in values_read(operation)],
            attributes_of(operation.node_def, functions),
        )
        for operation in order
    ]


def attributes_of(node: Any, functions: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the attributes of an operation, without TensorFlow's own notes.

    Args:
        node: the operation's `NodeDef`.
        functions: the operations of each function, by its name. An attribute that is a function
            is described by them, since each trace names it anew.
    """
    described: list[tuple[str, Any]] = []
    for name, value in sorted(node.attr.items()):
        if value.WhichOneof("value") == "func":
            inside = functions.get(value.func.name, ())
            described.append((name, [(each.op, attributes_of(each, functions)) for each in inside]))
        elif not name.startswith("_"):
            described.append((name, value.SerializeToString(deterministic=True)))
    return described


def check_mask_is_known(model: Model, outputs: Any) -> None:
    """Raises ValueError if the outputs have a mask that `mask_of_outputs` does not find.

    Args:
        model: the model.
        outputs: its outputs in a forward pass.
    """
    masks = [keras_mask(output) for output in tf.nest.flatten(outputs)]
    found = [mask for mask in masks if mask is not None]
    check_not_random(found)
    if found and not makes_masks(model):
        raise ValueError(
            "`model` must make its Keras masks in compute_mask of a layer; got a mask on its "
            "outputs that no layer announces. The number of elements that are not masked must be "
            "known before the forward pass. Override compute_mask in the layer that makes the "
            "mask, or leave the mask out and yield (x, y, weight) from train_data."
        )


def check_not_random(masks: Sequence[tf.Tensor]) -> None:
    """Raises ValueError if a mask depends on random numbers."""
    if any(map(is_random, masks)):
        raise ValueError(
            "`model` must make its Keras masks of numbers that are not random; got a mask on its "
            "outputs that depends on random numbers, as of a Dropout or a GaussianNoise before a "
            "Masking. The number of elements that are not masked must be known before the forward "
            "pass. Put the layer that makes the mask first, or leave it out and yield (x, y, "
            "weight) from train_data."
        )


def is_random(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor of a graph depends on random numbers that are drawn in the graph."""
    needed = () if tf.executing_eagerly() else operations_before([tensor])
    return any("Random" in operation.type for operation in needed)


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
