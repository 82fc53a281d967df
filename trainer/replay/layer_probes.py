"""Looking into every layer of a model while it runs: where is the first inf or NaN?"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

import scaling
from trainer.base.keras_private import all_layers, replaced_calls


class Probes:
    """What was seen in one forward and backward pass, in the order in which it was computed."""

    def __init__(self) -> None:
        """Has seen nothing yet."""
        self.graph = tf.compat.v1.get_default_graph()
        self.forward: list[tuple[str, tf.Tensor]] = []  # a place, and whether it was finite
        self.backward: list[tuple[str, tf.Tensor]] = []

    def watch(self, tree: Any, place: str, *, forward: bool) -> Any:
        """Returns tensors unchanged, having noted whether they and their gradients are finite.

        Args:
            tree: any structure; what is not a float tensor is left alone.
            place: what to call it.
            forward: whether to look at the tensors too, and not at their gradients alone.
        """

        @tf.custom_gradient
        def identity(tensor: tf.Tensor) -> Any:
            if forward:
                self.forward.append((place, scaling.all_finite(tensor)))

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                self.backward.append((f"the gradient of {place}", scaling.all_finite(upstream)))
                return upstream

            return tf.identity(tensor), gradient

        def looked_at(leaf: Any) -> Any:
            floating = tf.is_tensor(leaf) and leaf.dtype.is_floating
            # A tensor inside a loop of the layer's own cannot be looked at from outside.
            same_graph = tf.compat.v1.get_default_graph() is self.graph
            return identity(leaf) if floating and same_graph else leaf

        return tf.nest.map_structure(looked_at, tree)


@contextlib.contextmanager
def probing(model: keras.Model) -> Iterator[Probes]:
    """Within, every layer that has no layers in it is looked at when it is called.

    Enter it while a function is traced, and read the probes in the same trace.
    """
    probes = Probes()
    with replaced_calls(innermost(model), lambda layer: probed(layer, probes)):
        yield probes


def probed(layer: keras.Layer, probes: Probes) -> Any:
    """Returns a layer's `call`, with probes on what goes in and what comes out."""
    call = layer.call

    @functools.wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        args = probes.watch(args, f"the input of layer {layer.name!r}", forward=False)
        outputs = call(*args, **kwargs)
        return probes.watch(outputs, f"the output of layer {layer.name!r}", forward=True)

    return watched


def innermost(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers that have none inside; a recurrent layer, whose cell loops, is whole."""
    recurrent = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.RNN)]
    inside = {id(inner) for outer in recurrent for inner in all_layers(outer)[1:]}
    return [
        layer
        for layer in all_layers(model)
        if id(layer) not in inside and (layer in recurrent or len(all_layers(layer)) == 1)
    ]
