"""What is being traced is known: loops, branches, functions, and whether XLA compiles them."""

import pytest
import tensorflow as tf

from scaling.base.traced_graphs import (
    BRANCH,
    FUNCTION,
    LOOP,
    compiled_by_xla,
    current_graph,
    graphs_around,
    kind_of,
)


def test_the_kinds_of_graphs():
    """A loop in a branch in a function, and the function alone."""
    found = []

    def note(i):
        found.append([kind_of(graph) for graph in graphs_around(current_graph())])
        return i + 1

    @tf.function
    def run(x):
        note(0)
        return tf.cond(x > 0, lambda: tf.while_loop(lambda i: i < 2, note, [0])[0], lambda: 0)

    run(tf.constant(1))

    assert found[0][0] == FUNCTION
    assert [LOOP, BRANCH, FUNCTION] in [kinds[:3] for kinds in found]
    assert current_graph() is None


@pytest.mark.parametrize("compiled", [False, True])
def test_whether_xla_compiles_a_function(compiled):
    """Also what is in a loop, a branch or another function of it."""
    found = []

    def note(*_):
        found.append(compiled_by_xla())
        return 1

    @tf.function(jit_compile=compiled)
    def run(x):
        note()
        tf.function(note)()
        tf.while_loop(lambda i: i < 1, note, [0])
        return tf.cond(x > 0, note, note)

    run(tf.constant(1))

    assert len(found) >= 5
    assert set(found) == {compiled}
    assert not compiled_by_xla()
