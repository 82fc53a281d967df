"""What a step does for layers in float8: moves their scales, and counts what their casts change.

Numbers that saturate, or become 0, are counted in a pass. A count is made where its tensor is,
which may be the backward pass or a graph inside the pass. It leaves as a gradient does: a probe of
zeros enters the layer, and its "gradient" is the count.
"""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

import strategies
from scaling.float8 import DelayedScaling, DelayedScalingState, losses_of_cast
from trainer.base.trace_apart import is_apart
from trainer.keras_compat import all_layers, replaced_calls
from trainer.step.accumulate import Reduced
from trainer.step.trace import inner_graphs
from trainer.step.types import Model, Values

# The tensors that a float8 layer of Keras scales, with their formats.
FORMATS = {
    "inputs": "float8_e4m3fn",
    "kernel": "float8_e4m3fn",
    "outputs_grad": "float8_e5m2",
}

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


COUNTS = 3  # numbers that saturate, numbers that become 0, and all numbers

Probes = Mapping[int, tf.Tensor]  # keyed by the id of the variable with the tensor's scale
Counts = dict[int, tf.Tensor | None]  # what a tape gave for probes, keyed by the tensor's place


class Running(threading.local):
    """The probes of the pass that this thread traces: each replica has a thread of its own."""

    def __init__(self) -> None:
        """Has no probes; each thread that looks for them begins with none."""
        super().__init__()
        self.probes: Probes = {}


RUNNING = Running()


class Float8Measured(NamedTuple):
    """The measurements of a step; see the fields of `Outcome` with the same names."""

    float8_amax: tf.Tensor
    float8_scale: tf.Tensor
    float8_saturated: tf.Tensor
    float8_flushed: tf.Tensor


def probes_of(tensors: Sequence[Float8Tensor]) -> list[tf.Tensor]:
    """Returns a probe for each tensor, which a tape must watch: shape (COUNTS,), float32."""
    return [tf.zeros([COUNTS]) for _ in tensors]


@contextlib.contextmanager
def counting(probes: Probes) -> Iterator[None]:
    """Context manager for a forward pass, in whose `counted_product`s the probes are used."""
    before, RUNNING.probes = RUNNING.probes, probes
    try:
        yield
    finally:
        RUNNING.probes = before


def counted_product(layer: keras.Layer, call: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Returns a layer's `quantized_call`, which counts if this pass has probes for the layer.

    Args:
        layer: a float8 layer of Keras.
        call: its own `quantized_call`.
    """
    probes = [RUNNING.probes.get(id(getattr(layer, f"{name}_scale"))) for name in FORMATS]
    if any(probe is None for probe in probes):
        return call

    def counted(inputs: tf.Tensor, *args: object, **kwargs: object) -> tf.Tensor:
        activation = layer.activation
        forward = [
            counts_of_cast(tf.convert_to_tensor(tensor), layer, name)
            for name, tensor in [("inputs", inputs), ("kernel", layer.kernel)]
        ]

        def with_counts(outputs: tf.Tensor) -> tf.Tensor:
            outputs = counted_outputs(outputs, layer, forward, probes)
            return outputs if activation is None else activation(outputs)

        # The gradient of what enters the activation is that of the product: a bias changes nothing.
        # Set past Keras, which would take an activation that is a layer for a new sublayer.
        vars(layer)["activation"] = with_counts
        try:
            return call(inputs, *args, **kwargs)
        finally:
            vars(layer)["activation"] = activation

    return counted


def counted_outputs(
    outputs: tf.Tensor,
    layer: keras.Layer,
    forward: Sequence[tf.Tensor],
    probes: Sequence[tf.Tensor],
) -> tf.Tensor:
    """Returns a layer's outputs, through which its counts become the gradients of the probes.

    Args:
        outputs: what enters the layer's activation.
        layer: the layer.
        forward: the counts of its inputs and its kernel.
        probes: the probes of its inputs, its kernel and the gradient of its outputs.
    """

    def identity(outputs: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, Callable[..., object]]:
        def gradients(upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return upstream, *forward, counts_of_cast(upstream, layer, "outputs_grad")

        return tf.identity(outputs), gradients

    counted: tf.Tensor = tf.custom_gradient(identity)(outputs, *probes)
    return counted


def counts_of_cast(x: tf.Tensor, layer: keras.Layer, name: str) -> tf.Tensor:
    """Returns what a layer's cast of a tensor does to its numbers: shape (COUNTS,), float32.

    Args:
        x: the tensor before the cast.
        layer: the layer.
        name: one of `FORMATS`.
    """
    # Keras divides in the compute dtype.
    ratio = x / tf.cast(tf.convert_to_tensor(getattr(layer, f"{name}_scale")), x.dtype)
    lost = losses_of_cast(ratio, 1.0, FORMATS[name])
    return tf.stack([tf.cast(number, tf.float32) for number in (*lost, tf.size(x))])


def gathered_counts(
    found: Counts, share: strategies.Share, tensors: Sequence[Float8Tensor]
) -> tf.Tensor | tuple[()]:
    """Returns the counts of a pass: shape (tensors, COUNTS), float32; () if nothing is counted.

    NaN stands for what could not be counted, as in a layer inside `tf.recompute_grad`, where no
    probe can enter. The placeholder of an empty share counts nothing.

    Args:
        found: what a tape gave for the probes of tensors that this pass trains, by their place.
        share: the examples of the pass.
        tensors: all float8 tensors whose casts are counted.
    """
    if not tensors:
        return ()
    unknown = tf.fill([COUNTS], float("nan"))
    rows = [unknown if found.get(at) is None else found[at] for at in range(len(tensors))]
    return tf.where(share.examples > 0, tf.stack(rows), tf.zeros([len(rows), COUNTS]))


def measure_float8(
    reduced: Reduced, before: Values, tensors: Sequence[Float8Tensor]
) -> Float8Measured:
    """Returns a step's measurements of float8 tensors: shape (tensors,) each, float32.

    Args:
        reduced: the sums over replicas.
        before: as for `with_own_scales`.
        tensors: the float8 tensors. Those that this update does not reach have zeros.
    """
    written, counts = reduced.written, reduced.total.float8_counts
    nothing = tf.zeros([0])
    if not tensors:
        return Float8Measured(nothing, nothing, nothing, nothing)
    reached = [each.history in written for each in tensors]
    none = tf.constant(0.0)
    pairs = [
        (written[each.history][0], before[each.scale]) if its else (none, none)
        for each, its in zip(tensors, reached, strict=True)
    ]
    amax, scale = (tf.stack(column) for column in zip(*pairs, strict=True))
    if isinstance(counts, tuple):
        return Float8Measured(amax, scale, nothing, nothing)
    shares = tf.where(tf.constant(reached)[:, None], counts[:, :2] / counts[:, 2:], 0.0)
    return Float8Measured(amax, scale, shares[:, 0], shares[:, 1])


def own_probes(
    positions: Sequence[int], tensors: Sequence[Float8Tensor], probes: Sequence[tf.Tensor]
) -> dict[int, tf.Tensor]:
    """Returns the probes of tensors whose layers an objective trains, keyed by their place.

    Args:
        positions: positions of the objective's variables in `model.trainable_variables`.
        tensors: the float8 tensors.
        probes: a probe for each.
    """
    own = set(map(str, positions))
    return {
        at: probe
        for at, (each, probe) in enumerate(zip(tensors, probes, strict=True))
        if each.scale in own
    }
