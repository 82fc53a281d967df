"""The names of Keras we use that it does not promise; a test of this file watches them.

Everything else in this project goes through Keras's and TensorFlow's public API.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf


@contextlib.contextmanager
def gradients_already_reduced(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Within, `optimizer.apply` takes gradients as they are, and does not sum them over replicas.

    In replica context `apply` always all-reduces, and has no argument that says otherwise.
    Ours are summed before they are judged and clipped; a second sum would make them
    num_replicas times too large. The public override point, `update_step`, would mean
    writing all of `apply` again: iterations, schedules, weight decay, EMA, constraints.
    """
    optimizer._all_reduce_sum_gradients = list
    try:
        yield
    finally:
        del optimizer._all_reduce_sum_gradients


@contextlib.contextmanager
def updates_counted_at_once(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Within, `optimizer.apply` adds 1 to `iterations` in one operation, which loses no update.

    Keras reads the number and writes it back plus 1; workers that do so at the same time count
    once. `assign_add` is public; that `apply` counts by calling it is not promised.
    """
    counter = optimizer.iterations
    counter.assign_add = counter.value.assign_add
    try:
        yield
    finally:
        del counter.assign_add


def all_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns a model and all layers in it, however deep; `model.layers` has the first level."""
    return list(model._flatten_layers())


@contextlib.contextmanager
def lent_calls(
    layers: Sequence[keras.Layer], make: Callable[[keras.Layer], Callable[..., Any]]
) -> Iterator[None]:
    """Within, each layer is called by what `make` returns for it; then by what it had before.

    `call` is public; that Keras looks for it in the layer, and not in its class, is not promised.
    """
    before = [vars(layer).get("call") for layer in layers]
    for layer in layers:
        layer.call = make(layer)
    try:
        yield
    finally:
        for layer, call in zip(layers, before, strict=True):
            del layer.call
            if call is not None:
                layer.call = call


@contextlib.contextmanager
def penalties_in_float32(model: keras.Model) -> Iterator[None]:
    """Within, activity regularizers see float32 activations, also those of half-precision layers.

    A sum of squares overflows float16 at 65504: a hundred activations of 30 are enough.
    Setting a layer's `activity_regularizer` is public; finding all layers is not.
    """
    layers = [layer for layer in all_layers(model) if layer.activity_regularizer is not None]
    regularizers = [layer.activity_regularizer for layer in layers]

    def widened(regularizer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda activation: regularizer(tf.cast(activation, tf.float32))

    for layer, regularizer in zip(layers, regularizers, strict=True):
        layer.activity_regularizer = widened(regularizer)
    try:
        yield
    finally:
        for layer, regularizer in zip(layers, regularizers, strict=True):
            layer.activity_regularizer = regularizer


def computing_in_float32(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Within, the model's half-precision layers compute in float32, on the same variables.

    Trace a function inside it; the trace keeps float32 afterwards.
    """
    half = [layer for layer in all_layers(model) if layer.compute_dtype in ("float16", "bfloat16")]
    return under_policy("float32", half)


@contextlib.contextmanager
def under_policy(policy: str, layers: Sequence[keras.Layer]) -> Iterator[None]:
    """Within, layers are under another dtype policy, on the variables that they have.

    Setting a layer's `dtype_policy` is public; finding all layers is not.
    """
    policies = [layer.dtype_policy for layer in layers]
    for layer in layers:
        layer.dtype_policy = keras.DTypePolicy(policy)
    try:
        yield
    finally:
        for layer, before in zip(layers, policies, strict=True):
            layer.dtype_policy = before


def slots_of(optimizer: Any, variable: tf.Variable) -> list[tf.Variable]:
    """Returns what Adam or SGD keeps for a variable, in the order of its update rule.

    `optimizer.variables` is public; which of them belong to which variable is not.
    """
    position = optimizer._get_variable_index(variable)
    if isinstance(optimizer, keras.optimizers.SGD):
        return [optimizer.momentums[position].value]
    return [slots[position].value for slots in (optimizer._momentums, optimizer._velocities)]
