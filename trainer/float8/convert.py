"""Converts layers of a model to float8. What the step does with them: `step/float8.py`."""

from collections.abc import Callable, Sequence

import keras

from scaling.float8 import DelayedScaling
from trainer.keras_compat import all_layers

# NVIDIA's float8 products need sizes that are multiples of this.
MULTIPLE = 16


def convert_to_float8(
    model: keras.Model,
    layers: Callable[[keras.Layer], bool] | None = None,
    rule: DelayedScaling | None = None,
) -> list[str]:
    """Makes layers of a model compute their products in float8, in the forward and backward pass.

    The layers become what `layer.quantize("float8")` of Keras makes of them: inputs and kernel are
    cast to e4m3, the gradients of the outputs to e5m2, each at a scale of its own, and back. The
    weights stay in float32. What moves the scales in training is `rule`, and not Keras's, which is
    a step late. A saved model is a plain Keras model, which Keras loads by itself.

    Only `Dense` and `EinsumDense` layers can be converted, and so can those inside
    `MultiHeadAttention`, whose products of queries, keys and values stay in bfloat16.
    `Trainer(precision="mixed_float8")` calls this function with its defaults, unless the model has
    float8 layers already.

    Args:
        model: a model whose variables have been created.
        layers: layer -> whether to convert it, asked for each layer that can be converted. By
            default, those whose sizes are multiples of 16, as NVIDIA's float8 products need them,
            and that are neither the first nor the last layer with a kernel or embeddings: these two
            have the largest effect on the result.
        rule: the rule of the scales, for inputs and kernels; that of gradients differs from it by
            its format. Default: `DelayedScaling()`.

    Returns:
        The paths of the layers that were converted.

    Raises:
        ValueError: if no layer was converted, as of a model that has not been built.

    Source:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, sections 3 and 4,
        https://arxiv.org/abs/2209.05433.

    Example:
        >>> sizes = [32, 64, 64, 10]
        >>> model = keras.Sequential(
        ...     [keras.Input([16]), *(keras.layers.Dense(n, name=f"to_{n}_{i}")
        ...                           for i, n in enumerate(sizes))], name="model")
        >>> convert_to_float8(model)
        ['model/to_64_1', 'model/to_64_2']
        >>> model.layers[1].quantization_mode
        'float8'
    """
    rule = DelayedScaling() if rule is None else rule
    candidates = in_order_of_weights(
        [layer for layer in all_layers(model) if can_convert(layer)], model
    )
    chosen = (
        large_and_inner(model, candidates) if layers is None else list(filter(layers, candidates))
    )
    if not chosen:
        names = [layer.path for layer in candidates[:4]]
        raise ValueError(
            f"`layers` must choose a float8 layer of {model.name!r}; got none of {names}"
        )
    for layer in chosen:
        source = layer.dtype_policy.name
        # The setter quantizes a layer that has been built.
        layer.dtype_policy = keras.dtype_policies.QuantizedFloat8DTypePolicy(
            "float8", source, amax_history_length=rule.history_length
        )
        layer.float8_rule = rule
    return [layer.path for layer in chosen]


def can_convert(layer: keras.Layer) -> bool:
    """Returns whether a layer is a built `Dense` or `EinsumDense` that is not quantized.

    A subclass is not: its own `call` may not be the one that Keras replaces. Nor is a layer with
    adapters (LoRA), or one whose policy is looked up in a table.
    """
    plain = type(layer) in (keras.layers.Dense, keras.layers.EinsumDense)
    table = isinstance(layer.dtype_policy, keras.dtype_policies.DTypePolicyMap)
    if not plain or not layer.built or table or layer.quantization_mode is not None:
        return False
    return not layer.lora_enabled


def large_and_inner(model: keras.Model, candidates: Sequence[keras.Layer]) -> list[keras.Layer]:
    """Returns the layers that float8 products can speed up, but for the model's first and last."""
    weighted = in_order_of_weights(
        [layer for layer in all_layers(model) if has_table(layer)], model
    )
    ends = {id(weighted[0]), id(weighted[-1])} if weighted else set()
    return [
        layer
        for layer in candidates
        if id(layer) not in ends and all(size % MULTIPLE == 0 for size in product_sizes(layer))
    ]


def in_order_of_weights(layers: Sequence[keras.Layer], model: keras.Model) -> list[keras.Layer]:
    """Returns layers in the order in which the model lists their weights."""
    place = {id(weight): at for at, weight in enumerate(model.weights)}
    return sorted(layers, key=lambda layer: min(place[id(weight)] for weight in layer.weights))


def has_table(layer: keras.Layer) -> bool:
    """Returns whether a layer has a kernel or embeddings of its own."""
    names = ("kernel", "embeddings")
    return layer.built and any(getattr(layer, name, None) is not None for name in names)


def product_sizes(layer: keras.Layer) -> tuple[int, int]:
    """Returns the sizes of a layer's kernel as a matrix: what is summed, and what is put out."""
    shape = layer.kernel.shape
    if isinstance(layer, keras.layers.Dense):
        return shape[0], shape[1]
    operands, output = layer.equation.replace("...", "").split("->")
    labels = operands.split(",")[1]
    summed = put_out = 1
    for label, size in zip(labels, shape, strict=True):
        if label in output:
            put_out *= size
        else:
            summed *= size
    return summed, put_out
