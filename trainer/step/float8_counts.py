"""What the casts to float8 change most, counted in a pass: numbers that saturate or become 0.

A count is made where its tensor is, which may be the backward pass or a graph inside the pass. It
leaves as a gradient does: a probe of zeros enters the layer, and its "gradient" is the count.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

import strategies
from scaling.float8 import losses_of_cast
from trainer.step.accumulate import Reduced
from trainer.step.float8 import FORMATS, Float8Tensor
from trainer.step.types import Values

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
        before: as for `float8.with_own_scales`.
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
