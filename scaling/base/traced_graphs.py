"""Tells what is being traced: a loop, a branch or a function, and whether XLA will compile it.

TensorFlow has no public way to tell. It traces each body of a loop, branch of a condition and
`tf.function` in a graph of its own, and the class of the first two says which they are. Whether XLA
compiles a graph stands in its control-flow context. The tests of this file fail if that moves.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

LOOP, BRANCH, FUNCTION = "loop", "condition", "function"
KINDS = {"While": LOOP, "Cond": BRANCH}  # keyed by how the name of a graph's class begins


def kind_of(graph: Any) -> str:
    """Returns what a graph was traced for: `LOOP`, `BRANCH` or `FUNCTION`."""
    name = type(graph).__name__
    return next((kind for start, kind in KINDS.items() if name.startswith(start)), FUNCTION)


def current_graph() -> Any:
    """Returns the graph that is being traced; None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def graphs_around(graph: Any) -> Iterator[Any]:
    """Yields a graph, and the graphs around it. Only graphs of functions have an `outer_graph`."""
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def outermost_graph() -> Any:
    """Returns the graph of the outermost function that is being traced; None in eager mode."""
    functions = [each for each in graphs_around(current_graph()) if hasattr(each, "outer_graph")]
    return functions[-1] if functions else None


def compiled_by_xla() -> bool:
    """Returns whether the function that is being traced has jit_compile=True, or one around it has.

    A function that was traced before, and is then called in one that XLA compiles, is not traced
    again, and does not know.

    Example:
        >>> bool(tf.function(compiled_by_xla, autograph=False, jit_compile=True)())
        True
        >>> compiled_by_xla()
        False
    """
    contexts = (graph._get_control_flow_context() for graph in graphs_around(current_graph()))
    return any(context is not None and context.IsXLAContext() for context in contexts)
