"""Says in which loops, conditions and functions of the step something is being traced."""

from typing import Any

import tensorflow as tf

from scaling.base.traced_graphs import FUNCTION, LOOP, kind_of


def inner_graphs(outer: tf.Graph) -> set[str]:
    """Returns what is being traced inside a graph: a "loop", a "condition", a "function"."""
    graph, found = tf.compat.v1.get_default_graph(), set()
    while graph is not outer and hasattr(graph, "outer_graph"):
        found.add(kind_of(graph))
        graph = graph.outer_graph
    return found


def graph_around_loops(outer: tf.Graph) -> tf.Graph | None:
    """Returns the graph around the loops that are being traced, or None if there is no loop.

    It is the graph in which all these loops run, also if one is in a branch of a condition. It lies
    in `outer` or is `outer`. What is computed there is computed once, and the loops can read it.
    """
    graph, found = tf.compat.v1.get_default_graph(), None
    while graph is not outer and kind_of(graph) != FUNCTION:
        if kind_of(graph) == LOOP:
            found = graph.outer_graph
        graph = graph.outer_graph
    return found


def called_functions(attributes: Any) -> list[str]:
    """Returns the names of the functions that an operation calls: bodies, branches, and so on.

    Args:
        attributes: the operation's attributes, the `attr` of a `NodeDef`.
    """
    return [
        each.name
        for value in attributes.values()
        for each in ([value.func] if value.func.name else value.list.func)
    ]
