"""Every kind of Python object that can hold another one, for tests of what a trainer reaches."""

import collections
import dataclasses
import functools
import types
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf


class Plain:
    """An object with an attribute."""

    def __init__(self, inside):
        """Stores what is inside."""
        self.inside = inside

    def method(self):
        """Is bound to the object."""


class Hostile(Plain):
    """An object whose properties and missing attributes raise."""

    @property
    def broken(self):
        """Raises."""
        raise RuntimeError

    def __getattr__(self, name):
        """Raises."""
        raise RuntimeError(name)


class Slots:
    """An object with slots, one of them empty."""

    __slots__ = ("empty", "inside")

    def __init__(self, inside):
        """Stores what is inside."""
        self.inside = inside


class HostileList(list):
    """A list whose own methods raise."""

    def __iter__(self):
        """Raises."""
        raise RuntimeError


@dataclasses.dataclass
class Record:
    """A dataclass."""

    inside: object


class Named(NamedTuple):
    """A named tuple."""

    first: int
    second: object


def in_closure(inside):
    """A function that closes over an object."""
    return lambda: inside


def in_defaults(inside):
    """A function with a default argument."""

    def function(value=inside):
        return value

    return function


def in_keyword_defaults(inside):
    """A function with a default keyword argument."""

    def function(*, value=inside):
        return value

    return function


def in_function_attribute(inside):
    """A function with an attribute."""

    def function():
        return None

    function.inside = inside
    return function


def in_method(inside):
    """An object whose method closes over another object."""

    class WithMethod:
        def method(self):
            return inside

    return WithMethod()


def in_property(inside):
    """An object whose property closes over another object."""

    class WithProperty:
        @property
        def broken(self):
            raise RuntimeError(inside)

    return WithProperty()


def in_class_attribute(inside):
    """An object of a class that holds another object."""
    return type("WithAttribute", (), {"inside": inside})()


def in_module(inside):
    """A `tf.Module` that holds an object in containers, which TensorFlow wraps."""
    module = tf.Module()
    module.kept = {"a": [(inside,)]}
    return module


def in_layer(inside):
    """A layer that holds a plain object, of which Keras knows nothing."""
    layer = keras.layers.Layer()
    layer.kept = Record(inside)
    return layer


HOLDERS = {
    "attribute": Plain,
    "hostile": Hostile,
    "slots": Slots,
    "dataclass": Record,
    "named tuple": lambda inside: Named(1, inside),
    "namespace": lambda inside: types.SimpleNamespace(inside=inside),
    "list": lambda inside: [1, inside],
    "hostile list": lambda inside: HostileList([inside]),
    "tuple": lambda inside: (inside, None),
    "deque": lambda inside: collections.deque([inside]),
    "dict": lambda inside: {"a": inside},
    "dict by number": lambda inside: {(1, 2): inside},
    "ordered dict": lambda inside: collections.OrderedDict(a=inside),
    "default dict": lambda inside: collections.defaultdict(in_closure(inside)),
    "chain map": lambda inside: collections.ChainMap({"a": inside}),
    "user dict": lambda inside: collections.UserDict(a=inside),
    "mapping proxy": lambda inside: types.MappingProxyType({"a": inside}),
    "set": lambda inside: {Plain(inside)},
    "frozen set": lambda inside: frozenset([Plain(inside), Plain(1)]),
    "array": lambda inside: np.array([inside, 1], dtype=object),
    "closure": in_closure,
    "defaults": in_defaults,
    "keyword defaults": in_keyword_defaults,
    "function attribute": in_function_attribute,
    "method of a class": in_method,
    "property": in_property,
    "class attribute": in_class_attribute,
    "bound method": lambda inside: Plain(inside).method,
    "method of a list": lambda inside: [inside].append,
    "partial": lambda inside: functools.partial(print, inside),
    "partial keyword": lambda inside: functools.partial(print, end=inside),
    "wrapped": lambda inside: functools.wraps(in_closure(inside))(lambda: None),
    "cached": lambda inside: functools.lru_cache(in_closure(inside)),
    "tf.function": lambda inside: tf.function(in_closure(inside)),
    "module": in_module,
    "layer": in_layer,
    "Lambda": lambda inside: keras.layers.Lambda(in_closure(inside)),
    "metric": lambda inside: keras.metrics.MeanMetricWrapper(in_closure(inside)),
    "checkpoint": lambda inside: tf.train.Checkpoint(inside=in_module(inside)),
}
