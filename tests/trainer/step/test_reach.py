"""Whatever a trainer holds, at any depth and in any Python object, is found."""

import types
import weakref

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from holders import HOLDERS, Plain, Slots
from hypothesis import example, given

from trainer.step.reach import reach


class Ends:
    """An object that is not entered."""

    ends_reach = True

    def __init__(self, inside):
        """Stores what is inside."""
        self.inside = inside


def found(root, wanted):
    """Where an object is found from a root."""
    return [each for each in reach({"root": root}) if each.item is wanted]


@pytest.mark.parametrize("name", HOLDERS)
def test_what_any_holder_holds_is_found(name):
    """L6: an object is found in every kind of holder, once, and no method of a user is called."""
    wanted = keras.Variable(1.0)
    [place] = found(HOLDERS[name](wanted), wanted)

    assert place.path.startswith("root")
    assert place.stable == (name != "frozen set")


def test_weak_references_are_followed():
    """L6: what a weak reference refers to is found as long as it exists."""
    plain = Plain(tf.Variable(1.0))
    root = [weakref.ref(plain)]
    assert len(found(root, plain.inside)) == 1
    del plain
    assert not [
        item for _, item, _ in reach({"root": root}) if isinstance(item, (Plain, tf.Variable))
    ]


@example(["closure", "set", "partial", "slots", "default dict", "layer"])
@given(st.lists(st.sampled_from(sorted(HOLDERS)), min_size=1, max_size=6))
def test_holders_within_holders(names):
    """L6: an object is found through any nesting of holders, at the same path each time, and so are
    variables of TensorFlow.
    """
    paths = []
    for wanted in (keras.Variable(1.0), tf.Variable(1.0), tf.Variable(1.0)):
        root = wanted
        for name in names:
            root = HOLDERS[name](root)
        [place] = found([root, root], wanted)
        paths.append(place.path)
    if "frozen set" not in names:
        assert paths[1] == paths[2]


def test_what_is_not_entered():
    """Modules, classes, tensors, strategies and datasets are not entered, and neither is an object
    that says so; an object that raises when it is looked at holds nothing.
    """

    class Raises:
        @property
        def __class__(self):
            raise RuntimeError

    strategy, wanted = tf.distribute.get_strategy(), tf.Variable(1.0)
    raises = Raises()
    raises.inside = wanted
    root = [np, Plain, tf.constant(1.0), strategy, tf.data.Dataset.range(3), Ends(wanted), raises]
    items = [item for _, item, _ in reach({"root": root})]
    assert [id(item) for item in items] == [id(root), *map(id, root)]


@pytest.mark.thorough
def test_depth_and_cycles():
    """A hundred thousand containers in each other, and objects that hold each other, are no problem."""
    wanted = tf.Variable(1.0)
    deep = [wanted]
    for _ in range(100_000):
        deep = [deep]
    plain = Plain(deep)
    deep.append(plain)

    assert found(plain, wanted)
    while isinstance(deep, list):  # Python itself would free them recursively
        deep = deep.pop(0)


def test_the_nearest_comes_first():
    """Of several paths to an object the shortest counts; containers do not make a path longer."""
    wanted, near = tf.Variable(1.0), tf.Variable(2.0)
    root = types.SimpleNamespace(far=Plain(Plain(wanted)), near=[[near]], again=Plain(wanted))
    paths = {id(item): path for path, item, _ in reach({"root": root})}

    assert paths[id(wanted)] == "root.again.inside"
    assert list(paths).index(id(near)) < list(paths).index(id(root.again))


def test_an_empty_cell_and_an_empty_slot():
    """A closure's variable or a slot to which nothing has been assigned is passed over."""

    def function():
        return later

    items = [item for _, item, _ in reach({"f": function, "s": Slots.__new__(Slots)})]
    later = 1

    assert items[0] is function
    assert function() == 1
