"""Finds the first inf or NaN inside a model: probes check the inputs and outputs of layers."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

import scaling
from trainer.keras_compat import all_layers, replaced_calls


class Probes:
    """The tensors checked in one forward and backward pass, in the order of computation."""

    def __init__(self) -> None:
        """Creates empty lists of checks for the graph that is being traced."""
        self.graph = tf.compat.v1.get_default_graph()
        # The name of each checked tensor, and whether the tensor is finite: shape (), bool.
        self.forward: list[tuple[str, tf.Tensor]] = []
        self.backward: list[tuple[str, tf.Tensor]] = []

    def watch(self, tree: Any, place: str, *, backward: bool = True) -> Any:
        """Returns tensors unchanged, and records whether they and their gradients are finite.

        Args:
            tree: a structure of tensors; anything that is not a float tensor is passed through.
            place: the name under which the tensors are reported.
            backward: whether to check their gradients, too.
        """

        def identity(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                name = f"the gradient of {place}"
                self.backward.append((name, scaling.all_finite(upstream)))
                return upstream

            return tf.identity(tensor), gradient

        def check(leaf: Any) -> Any:
            floating = tf.is_tensor(leaf) and leaf.dtype.is_floating
            # A tensor in the graph of a loop inside the layer cannot be used outside that loop.
            same_graph = tf.compat.v1.get_default_graph() is self.graph
            if not (floating and same_graph):
                return leaf
            self.forward.append((place, scaling.all_finite(leaf)))
            # Another tensor would lack the Keras mask that a layer has put on this one.
            return tf.custom_gradient(identity)(leaf) if backward else leaf

        return tf.nest.map_structure(check, tree)


@contextlib.contextmanager
def probing(model: keras.Model) -> Iterator[Probes]:
    """Context manager: probes every layer that is called inside the `with` block.

    Enter the context while a function is traced, and use the probes in the same trace.
    """
    probes = Probes()
    with replaced_calls(probed_layers(model), lambda layer: probed_call(layer, probes)):
        yield probes


def probed_call(layer: keras.Layer, probes: Probes) -> Callable[..., Any]:
    """Returns the `call` of a layer with probes on its inputs and outputs.

    A layer that contains others may compute something itself, so its outputs are checked after
    theirs. Gradients are checked at the layers inside, which say more.
    """
    call, backward = layer.call, is_innermost(layer)

    @functools.wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        args = probes.watch(args, f"the input of layer {layer.name!r}", backward=backward)
        outputs = call(*args, **kwargs)
        return probes.watch(outputs, f"the output of layer {layer.name!r}", backward=backward)

    return watched


def probed_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers of a model, and itself, but for the cells of recurrent layers.

    A cell runs inside a loop, where tensors cannot be probed.
    """
    recurrent = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.RNN)]
    cells = {id(inner) for outer in recurrent for inner in all_layers(outer)[1:]}
    return [layer for layer in all_layers(model) if id(layer) not in cells]


def is_innermost(layer: keras.Layer) -> bool:
    """Returns whether a layer is recurrent or contains no other layers."""
    return isinstance(layer, keras.layers.RNN) or len(all_layers(layer)) == 1
