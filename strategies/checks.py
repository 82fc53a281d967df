"""Argument checks. They use static information only and add no operations to a graph."""

import numbers
from typing import Any

import tensorflow as tf


def check_count(name: str, value: Any, why: str) -> None:
    """Raises ValueError, naming the argument, unless `value` is an int of at least 1."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"`{name}` must be an int of at least 1; got {value!r}. {why} Use 1 or more."
        )


def static_shape(tensor: Any) -> tf.TensorShape:
    """Returns the static shape of a tensor; the shape of a Python number or other object is ()."""
    return tf.TensorShape(getattr(tensor, "shape", ()))


def check_strategy(strategy: Any, why: str) -> None:
    """Raises TypeError unless `strategy` is a `tf.distribute.Strategy`."""
    if not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            f"`strategy` must be a tf.distribute.Strategy; got {strategy!r}. {why} "
            'Pass for instance strategies.create("mirrored").'
        )
