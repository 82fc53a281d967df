"""Chooses the source for data that Python makes batch by batch."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from trainer.data.library_sources import (
    ArrowSource,
    GrainSource,
    PyDatasetSource,
    StatefulSource,
    TorchSource,
)
from trainer.data.source import IterableSource, ListSource, OneShotSource, Source
from trainer.data.structures import holds_arrays, is_array


def is_arrow(data: Any) -> bool:
    """Returns whether data is a `datasets.Dataset` of Hugging Face, which holds rows."""
    from_package = type(data).__module__.split(".")[0] == "datasets"
    return from_package and hasattr(data, "with_format") and hasattr(data, "__len__")


def is_source(data: Any) -> bool:
    """Returns whether data is read batch by batch in Python."""
    if isinstance(data, tf.data.Dataset):
        return False
    if isinstance(data, keras.utils.PyDataset) or is_arrow(data):
        return True
    if callable(data) and not hasattr(data, "__iter__"):
        return takes_nothing(data)
    if isinstance(data, list):
        return is_list_of_batches(data)
    if isinstance(data, tuple | dict | str | bytes) or is_array(data):
        return False
    return hasattr(data, "__iter__")


def is_list_of_batches(data: list[Any]) -> bool:
    """Returns whether a list holds batches: tuples or dicts of arrays."""
    return bool(data) and all(
        isinstance(item, tuple | dict) and holds_arrays(item) for item in data
    )


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Returns whether a function makes an iterator without being given an input context.

    A generator function may have parameters with defaults; another function must have none.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one for one in parameters if one.default is one.empty and one.kind not in optional]
    if inspect.isgeneratorfunction(inspect.unwrap(function)):
        return not needed
    return not parameters


def source_of(data: Any, argument: str, global_batch: int | None, seed: int | None) -> Source:
    """Returns the source for data that is read batch by batch in Python.

    Args:
        data: data for which `is_source` is true.
        argument: name of the user's argument, for errors.
        global_batch: number of rows in a batch of a `datasets.Dataset`; None for other data.
        seed: seed for the order of such rows; None keeps their order.
    """
    if isinstance(data, keras.utils.PyDataset):
        return PyDatasetSource(data)
    if isinstance(data, list):
        return ListSource(data)
    if is_arrow(data):
        return ArrowSource(data, global_batch or 1, seed)
    if callable(data) and not hasattr(data, "__iter__"):
        return IterableSource(lambda: iterator_from(data, argument), "generator function")
    return source_of_iterable(data)


def source_of_iterable(data: Any) -> Source:
    """Returns the source for data that Python can iterate over."""
    name, length = type(data).__name__, length_of(data)
    package = type(data).__module__.split(".")[0]
    if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
        if package == "datasets":
            return StatefulSource(data.with_format("numpy"), f"Hugging Face {name}", length)
        return (TorchSource if package == "torchdata" else StatefulSource)(data, name, length)
    if hasattr(data, "__next__"):
        endless = isinstance(data, itertools.count | itertools.cycle | itertools.repeat)
        return OneShotSource(lambda: data, name, 2**63 if endless else None)
    if package == "grain":
        return GrainSource(lambda: iter(data), f"Grain {name}", length)
    return IterableSource(lambda: iter(data), name, length)


def iterator_from(function: Callable[[], Any], argument: str) -> Iterator[Any]:
    """Returns an iterator over what a function returns.

    Raises:
        TypeError: if the function does not return an iterable.
    """
    made = function()
    if not hasattr(made, "__iter__") or is_array(made) or isinstance(made, dict | str):
        raise TypeError(
            f"`{argument}` must return an iterable of batches if it is a function without "
            f"parameters; got {type(made).__name__}. It is called once for each pass. Write a "
            "generator function, or one that takes a tf.distribute.InputContext and returns a "
            "tf.data.Dataset."
        )
    return iter(made)


def length_of(data: Any) -> int | None:
    """Returns the number of batches in a pass; None if it is unknown."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # PyTorch's loaders of streams raise TypeError
        return None
