"""Refuses a user's `tf.function` that would compute a pass in the precision of another pass.

A `tf.function` keeps the trace that it makes when it is first called. The loss is traced several
times, for steps in half precision and for evaluations in float32, and the dtypes in which Keras's
layers compute are no argument of the function. So a helper such as

    @tf.function
    def forward(model, x):
        return model(x)

would evaluate in half precision what was trained in it, or train in float32 what was evaluated
before. A function that is created anew in each pass, as in some layers of Keras, is traced anew.
Functions that are called in a loop or a condition, or under a tape of the user's, are not seen.
"""

import contextlib
import re
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf

from trainer.keras_compat import owners_of
from trainer.step.held_back import tensorflow_variable
from trainer.step.writes import captured

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# For each function of a model: the dtypes of the layers whose variables it reads, as they were when
# it was first called in a pass.
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
    calls = [each for each in graph.get_operations()[before:] if each.type in CALLS]
    owners = dtypes_of_handles(model) if calls else {}
    seen = _SEEN.setdefault(model, {})
    for operation in calls:
        held = (captured(each, graph) for each in operation.inputs if each.dtype == tf.resource)
        dtypes = frozenset(owners[id(each)] for each in held if id(each) in owners)
        name = operation.get_attr("f").name
        if dtypes and seen.setdefault(name, dtypes) != dtypes:
            called = re.sub(r"^__[a-z]+_|_\d+$", "", name)
            raise ValueError(
                "`compute_loss` and `predict_batch` must not call a tf.function of their own that "
                f"was traced in another precision; got {called!r}, first traced with layers in "
                f"{listed(seen[name])}, and called in a pass in {listed(dtypes)}. A tf.function "
                "keeps its first trace. Leave out @tf.function: steps and evaluations are graphs "
                "already."
            )


def dtypes_of_handles(model: keras.Model) -> dict[int, str]:
    """Returns the dtype in which a layer computes with each variable, by the id of its handle."""
    owners = owners_of(model)
    return {
        id(tensorflow_variable(variable).handle): owners[id(variable)].compute_dtype
        for variable in model.weights
    }


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
                "`compute_loss` and `predict_batch` must not call a tf.function of their own that "
                "kept a value of an earlier trace, such as a statistic of BatchNormalization or a "
                f"frozen weight; got {outside.name!r}. A tf.function keeps its first trace. Leave "
                "out @tf.function: steps and evaluations are graphs already."
            )


def listed(dtypes: frozenset[str]) -> str:
    """Returns dtypes as text."""
    return ", ".join(sorted(dtypes))
