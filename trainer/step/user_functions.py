"""Refuses a user's `tf.function` that would compute a pass in the precision of another pass.

A `tf.function` keeps the trace that it makes when it is first called. The loss is traced several
times, for steps in half precision and for evaluations in float32, and the dtypes in which Keras's
layers compute are no argument of the function. So a helper such as

    @tf.function
    def forward(model, x):
        return model(x)

would evaluate in half precision what was trained in it, or train in float32 what was evaluated
before. A function that is created anew in each pass, as in some layers of Keras, is traced anew.
"""

import contextlib
import re
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf

from trainer.base.keras_private import all_layers

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# The dtypes in which the layers of a model computed when a function was first called in a pass.
_SEEN: "weakref.WeakKeyDictionary[keras.Model, dict[str, frozenset[str]]]" = (
    weakref.WeakKeyDictionary()
)


@contextlib.contextmanager
def functions_of_one_precision(model: keras.Model) -> Iterator[None]:
    """Context manager: refuses functions that were traced while the layers had other dtypes.

    Args:
        model: the model whose pass is traced.

    Raises:
        ValueError: if such a function is called, or one that holds a tensor of another pass.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly():
        yield
        return
    before = len(graph.get_operations())
    yield
    check_captures(graph)
    dtypes = frozenset(layer.compute_dtype for layer in all_layers(model))
    seen = _SEEN.setdefault(model, {})
    for operation in graph.get_operations()[before:]:
        if operation.type not in CALLS or not reads_variables(operation):
            continue
        name = operation.get_attr("f").name
        if seen.setdefault(name, dtypes) != dtypes:
            called = re.sub(r"^__[a-z]+_|_\d+$", "", name)
            raise ValueError(
                "`compute_loss` and `predict_batch` must not call the model in a tf.function of "
                f"their own in half precision; got {called!r}, traced with layers that compute in "
                f"{listed(seen[name])}, in a pass in {listed(dtypes)}. A tf.function keeps its "
                "first trace, so this pass would not have the precision that was asked for. Leave "
                "out @tf.function: steps and evaluations are graphs already."
            )


def check_captures(graph: tf.Graph) -> None:
    """Raises ValueError if a function has brought a tensor of another trace into a graph.

    TensorFlow's own error comes when the graph is called, and fills pages.
    """
    around, outer = [], graph
    while hasattr(outer, "outer_graph"):
        outer = outer.outer_graph
        around.append(outer)
    for outside, _ in getattr(graph, "captures", ()):
        if isinstance(outside, tf.__internal__.EagerTensor):
            continue
        if not any(outside.graph is each for each in around):
            raise ValueError(
                "`compute_loss` and `predict_batch` must not read variables that a step holds back "
                "in a tf.function of their own, such as those of BatchNormalization and of frozen "
                f"layers; got the value of one of another trace ({outside.name!r}). A tf.function "
                "keeps its first trace, and with it such values. Leave out @tf.function: steps and "
                "evaluations are graphs already."
            )


def reads_variables(operation: tf.Operation) -> bool:
    """Returns whether a function is called with variables that it has captured."""
    return any(each.dtype == tf.resource for each in operation.inputs)


def listed(dtypes: frozenset[str]) -> str:
    """Returns dtypes as text."""
    return ", ".join(sorted(dtypes))
