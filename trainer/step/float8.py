"""Layers whose products are in float8, and the rules that move their scales."""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

import strategies
from scaling.float8 import DelayedScaling, DelayedScalingState
from trainer.base.trace_apart import is_apart
from trainer.keras_compat import all_layers, replaced_calls
from trainer.step.trace import inner_graphs
from trainer.step.types import Model, Values

# The tensors that a float8 layer of Keras scales, with their formats.
FORMATS = {
    "inputs": "float8_e4m3fn",
    "kernel": "float8_e4m3fn",
    "outputs_grad": "float8_e5m2",
}

# NVIDIA's float8 products need sizes that are multiples of this.
MULTIPLE = 16


CALL = "quantized_call"  # what Keras runs in place of a quantized layer's `call`

# Calls by the id of a layer, since two may have one path, and of the thread: each replica's pass is
# traced in a thread of its own.
Calls = collections.Counter[tuple[int, int]]

# A float8 layer and its `quantized_call` -> what to call in its place.
Product: TypeAlias = Callable[[keras.Layer, Callable[..., tf.Tensor]], Callable[..., tf.Tensor]]


class Float8Tensor(NamedTuple):
    """A tensor of a layer that is cast to float8 in each pass, and the rule of its scale."""

    # The layer's path and the tensor's name, such as "model/dense/inputs". Of layers with the same
    # path, the second is "model/dense (2)", and so on.
    name: str
    scale: str  # position of its scale among the variables that the model reads or assigns
    history: str  # position of its history of largest magnitudes
    rule: DelayedScaling | None  # None: Keras's own, which the layer follows by itself
    form: str  # the name of its format


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


def ensure_float8(model: Model, strategy: tf.distribute.Strategy) -> None:
    """Converts a model that has no float8 layers yet, for `precision="mixed_float8"`.

    Raises:
        ValueError: what `convert_to_float8` raises, or if the strategy is asynchronous.
    """
    if strategies.capabilities(strategy).asynchronous:
        # Its workers take no steps together, so that there is no maximum over them.
        raise ValueError('`precision` must not be "mixed_float8" with a parameter server')
    if not isinstance(model, keras.Layer) or not any(map(is_float8, all_layers(model))):
        convert_to_float8(model)


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


def is_float8(layer: keras.Layer) -> bool:
    """Returns whether a layer computes its products in float8, converted by us or by Keras."""
    return bool(layer.quantization_mode == "float8")


def check_float8_layers(model: Model, strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError if float8 layers, converted by us or by Keras, cannot be trained right."""
    layers = all_layers(model) if isinstance(model, keras.Layer) else []
    layers = [layer for layer in layers if is_float8(layer)]
    trained = [layer.path for layer in layers if layer.trainable]
    if trained and strategies.capabilities(strategy).asynchronous:
        raise ValueError(
            f"`model` must have no float8 layers with a parameter server; got {trained[0]!r}"
        )
    adapted = [layer.path for layer in layers if layer.lora_enabled]
    if adapted:
        raise ValueError(
            f"`model` must have no adapters (LoRA) in its float8 layers; got {adapted[0]!r}"
        )


@contextlib.contextmanager
def called_once(model: Model, product: Product) -> Iterator[None]:
    """Context manager for a forward pass: raises ValueError if a float8 layer runs more than once.

    Each call of such a layer finds new values for its scales, and a tape adds what several calls
    have found for a variable, as it must with gradients. The sum of two scales is no scale.

    Args:
        model: the model.
        product: (layer, its `quantized_call`) -> what to call instead, asked in each call.
    """
    calls: Calls = collections.Counter()
    outside = tf.compat.v1.get_default_graph()
    layers = trained_float8_layers(model)

    def counted(layer: keras.Layer) -> Callable[..., tf.Tensor]:
        call = getattr(layer, CALL)

        def run(*args: Any, **kwargs: Any) -> Any:
            if is_apart():
                return call(*args, **kwargs)
            # A call in the body of a loop counts twice.
            calls[id(layer), threading.get_ident()] += 1 + ("loop" in inner_graphs(outside))
            return product(layer, call)(*args, **kwargs)

        return run

    with replaced_calls(layers, counted, CALL):
        yield
    repeated = [layer.path for layer in layers if calls[id(layer), threading.get_ident()] > 1]
    if repeated:
        raise ValueError(
            f"`model` must call each float8 layer once in a pass; got several calls of "
            f"{repeated[0]!r}"
        )


def trained_float8_layers(model: Model) -> list[keras.Layer]:
    """Returns the float8 layers whose scales move, converted by us or by Keras."""
    layers = all_layers(model) if isinstance(model, keras.Layer) else []
    return [layer for layer in layers if is_float8(layer) and layer.trainable]


def float8_tensors(model: Model) -> tuple[Float8Tensor, ...]:
    """Returns the float8 tensors of a model's layers that are trained, converted by us or by Keras.

    Frozen layers have none: no new values are found for their scales.
    """
    positions = {id(one): str(at) for at, one in enumerate(model.trainable_variables)}
    found = []
    paths: collections.Counter[str] = collections.Counter()
    for layer in trained_float8_layers(model):
        paths[layer.path] += 1
        again = f" ({paths[layer.path]})" if paths[layer.path] > 1 else ""
        path = f"{layer.path}{again}"
        own = getattr(layer, "float8_rule", None)
        for name, form in FORMATS.items():
            scale = positions.get(id(getattr(layer, f"{name}_scale")))
            history = positions.get(id(getattr(layer, f"{name}_amax_history")))
            if scale is not None and history is not None:
                rule = own and dataclasses.replace(own, dtype=form)
                found.append(Float8Tensor(f"{path}/{name}", scale, history, rule, form))
    return tuple(found)


def with_own_scales(written: Values, before: Values, tensors: Sequence[Float8Tensor]) -> Values:
    """Returns what a step would assign, with scales and histories as their rules move them.

    Args:
        written: what would be assigned, the same on every replica. A history that Keras has moved
            begins with the step's largest magnitude, the maximum over replicas and microbatches.
        before: the values of the same variables before the step.
        tensors: the float8 tensors; those that this update does not reach are left alone.
    """
    moved = dict(written)
    for each in tensors:
        if each.rule is not None and each.history in written:
            state = DelayedScalingState(before[each.scale], before[each.history])
            after = each.rule.advance(state, written[each.history][0])
            moved |= {each.scale: after.scale, each.history: after.history}
    return moved
