"""Casts a weight once for all iterations of a loop, such as the steps in time of an RNN."""

from typing import Any

import tensorflow as tf

from trainer.step.trace import graph_around_loops


class LoopCasts:
    """What the loops of one forward pass read of its variables, in the compute dtype.

    A layer in half precision casts a weight where it reads it: inside a loop of the graph in every
    iteration, since TensorFlow does not move the cast out (XLA does). Here it is cast before the
    loop, to the same bits. Gradients are summed over the iterations in the variable's own dtype,
    as before.
    """

    def __init__(self, outer: tf.Graph) -> None:
        """Stores the graph of the pass; without a loop inside it, nothing is cast here."""
        self._outer = outer
        # Keyed by the ids of the source and of the graph around the loop, and the dtype. The source
        # is kept, and a tensor keeps its graph, so no other object gets one of these ids.
        self._cast: dict[tuple[int, int, str], tuple[tf.Tensor | tf.Variable, tf.Tensor]] = {}

    def cast(self, source: tf.Tensor | tf.Variable, dtype: str) -> tf.Tensor | tf.Variable:
        """Returns the value that a layer reads, cast before the loop that is being traced.

        Args:
            source: the variable, or the tensor that the pass reads in its place.
            dtype: the dtype in which the layer reads it. For a Keras variable, `variable.dtype` is
                that one.

        Returns:
            In a loop, if the dtypes are different floating-point dtypes, the value in `dtype`,
            whose gradient goes to `source`; otherwise `source` itself.
        """
        wanted = tf.as_dtype(dtype)
        if not (source.dtype.is_floating and wanted.is_floating) or source.dtype == wanted:
            return source
        around = graph_around_loops(self._outer)
        if around is None:
            return source
        key = id(source), id(around), wanted.name
        if key not in self._cast:
            with around.as_default():
                self._cast[key] = source, tf.cast(source, wanted)
        return in_place_of(self._cast[key][1], source)


def in_place_of(value: tf.Tensor, source: tf.Tensor | tf.Variable) -> tf.Tensor:
    """Returns a value whose gradient goes to a variable, or to what a pass was given for it.

    Args:
        value: what is read instead of the variable; it may have another dtype.
        source: the variable, or the tensor that the pass reads in its place.
    """

    def replaced(value: tf.Tensor, source: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tf.identity(value), lambda gradient: (None, tf.cast(gradient, source.dtype))

    result: tf.Tensor = tf.custom_gradient(replaced)(value, tf.convert_to_tensor(source))
    return result
