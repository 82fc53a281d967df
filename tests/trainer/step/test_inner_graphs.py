"""Loops, conditions and functions of a graph are told apart while they are traced."""

import pytest
import tensorflow as tf

from trainer.step.inner_graphs import graph_around_loops, inner_graphs


def in_loop(inner):
    """Calls a function in a loop of the graph."""
    return tf.while_loop(lambda i: i < 2, lambda i: i + 1 + inner(), [0])[0]


def in_condition(inner):
    """Calls a function in both branches of a condition."""
    return tf.cond(tf.constant(0.0) < 1.0, inner, inner)


def in_function(inner):
    """Calls a function in a `tf.function` of its own."""
    return tf.function(inner)()


def nothing(inner):
    """Calls a function."""
    return inner()


def found_in(*places):
    """What is found in nested places, outermost first: the kinds, and the graph around the loops."""
    found = []

    def innermost():
        found.append((inner_graphs(outer), graph_around_loops(outer)))
        return tf.constant(0)

    def nested(places):
        if not places:
            return innermost()
        graphs.append(tf.compat.v1.get_default_graph())
        return places[0](lambda: nested(places[1:]))

    graphs = []
    outer = tf.Graph()
    with outer.as_default():
        nested(places)
    kinds, around = found[0]
    return kinds, None if around is None else graphs.index(around)


@pytest.mark.parametrize(
    ("places", "kinds", "around"),
    [
        ([nothing], set(), None),
        ([in_loop], {"loop"}, 0),
        ([in_condition], {"condition"}, None),
        ([in_function], {"function"}, None),
        ([in_loop, in_loop], {"loop"}, 0),
        ([in_loop, in_condition], {"loop", "condition"}, 0),
        ([in_condition, in_loop], {"loop", "condition"}, 1),
        ([in_loop, in_condition, in_loop], {"loop", "condition"}, 0),
        ([in_function, in_loop], {"loop", "function"}, 1),
        ([in_loop, in_function], {"loop", "function"}, None),
        ([in_loop, in_function, in_loop], {"loop", "function"}, 2),
    ],
)
def test_what_is_traced(places, kinds, around):
    """`around` is the position of the place whose graph holds the loops: what is computed there is
    computed once, and never in a function that TensorFlow may call again elsewhere.
    """
    assert found_in(*places) == (kinds, around)


def test_a_loop_around_the_pass_does_not_count():
    """A pass that is traced in a loop itself, as a microbatch may be, ends there."""
    seen = []

    def body():
        outer = tf.compat.v1.get_default_graph()
        seen.append((inner_graphs(outer), graph_around_loops(outer)))
        in_loop(lambda: seen.append(graph_around_loops(outer) is outer) or tf.constant(0))
        return tf.constant(0)

    with tf.Graph().as_default():
        in_loop(body)
    assert seen == [(set(), None), True]
