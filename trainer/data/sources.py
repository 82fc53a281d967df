"""The source for what a user passes; those of Keras, Hugging Face, PyTorch and Grain.

Data of these libraries saves its own position, or is read by the number of a batch.
"""

import concurrent.futures
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.data.source import (
    IndexedSource,
    IterableSource,
    ListSource,
    OneShotSource,
    Place,
    Source,
)
from trainer.data.structures import holds_arrays, is_array


class PyDatasetSource(IndexedSource):
    """A `keras.utils.PyDataset`, whose hooks are called and whose workers are always threads.

    A process forked from one that runs TensorFlow can hang.
    On resume, `on_epoch_begin` and `on_epoch_end` are called once for every pass so far.
    """

    def __init__(self, data: keras.utils.PyDataset) -> None:
        """Reads the settings of the data."""
        self.name = "PyDataset"
        self._data = data
        self.length = data.num_batches
        self.endless = self.length is None

    def begin_pass(self, number: int) -> None:
        """Calls the data's hook."""
        del number
        self.length = self._data.num_batches  # a pass may have another length than the one before
        self._data.on_epoch_begin()

    def end_pass(self) -> None:
        """Calls the data's hook."""
        self._data.on_epoch_end()

    def batch(self, index: int) -> Any:
        """Returns a batch."""
        return self._data[index]

    def peek(self, count: int) -> list[Any]:
        """Returns the first batches, without calling a hook."""
        return [self.batch(index) for index in range(min(count, self.size()))]

    def batches_from(self, start: int) -> Iterator[Any]:
        """Yields the batches of the current pass; `workers` threads read ahead."""
        workers = self._data.workers
        if workers <= 1:
            yield from super().batches_from(start)
            return
        end, ahead = self.size(), max(workers, self._data.max_queue_size)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            first = range(start, min(start + ahead, end))
            futures = [pool.submit(self.batch, index) for index in first]
            try:
                for index in itertools.count(start + ahead):
                    if not futures:
                        return
                    yield futures.pop(0).result()
                    if index < end:
                        futures.append(pool.submit(self.batch, index))
            finally:
                for future in futures:
                    future.cancel()


class ArrowSource(IndexedSource):
    """A `datasets.Dataset` of Hugging Face: batches of its rows, as dicts of arrays.

    Args:
        data: the rows.
        global_batch: number of rows in a batch.
        seed: seed for the order of each pass; None keeps the order of the rows.
    """

    def __init__(self, data: Any, global_batch: int, seed: int | None) -> None:
        """Computes the length of a pass."""
        self.name = "Hugging Face Dataset"
        self._data = data.with_format("numpy")
        self._global_batch = global_batch
        self._seed = seed
        self._order = np.arange(len(data))
        self.length = -(-len(data) // global_batch)

    def begin_pass(self, number: int) -> None:
        """Chooses the order of the pass."""
        if self._seed is not None:
            self._order = np.random.default_rng([self._seed, number]).permutation(len(self._data))

    def batch(self, index: int) -> Any:
        """Returns a batch of rows."""
        start = index * self._global_batch
        return self._data[self._order[start : start + self._global_batch]]


class StatefulSource(IterableSource):
    """Data with `state_dict` and `load_state_dict`: torchdata's loaders, Hugging Face's streams.

    Args:
        data: the data. Its state is that of its newest iterator.
        name: what the data is, for logs and errors.
        length: number of batches in a pass; None if it is unknown.
    """

    finds_by = "state"

    def __init__(self, data: Any, name: str, length: int | None) -> None:
        """Stores the data."""
        super().__init__(lambda: iter(data), name, length)
        self._data = data

    def open(self, number: int, place: Place | None) -> Iterator[Any]:
        """Returns an iterator over a pass, from a state or from its beginning."""
        if hasattr(self._data, "set_epoch"):  # Hugging Face shuffles each pass by its number
            self._data.set_epoch(number)
        if place:
            self._data.load_state_dict(copy.deepcopy(place["state"]))
        return self._make()

    def state(self, iterator: Iterator[Any]) -> Any:
        """Returns the state of the data."""
        del iterator
        return copy.deepcopy(self._data.state_dict())


class TorchSource(StatefulSource):
    """torchdata's `StatefulDataLoader`, with the state of the generator that shuffles it.

    The loader's own state goes on in the pass that it was saved in; the order of later passes
    depends on the generator: the loader's, or else PyTorch's global one.
    """

    def open(self, number: int, place: Place | None) -> Iterator[Any]:
        """Returns an iterator over a pass, from a state or from its beginning."""
        del number
        if not place:
            return self._make()
        self._data.load_state_dict(copy.deepcopy(place["state"]["loader"]))
        return self._with_generator(self._make(), place["state"]["generator"])

    def state(self, iterator: Iterator[Any]) -> Any:
        """Returns the state of the loader and of its generator."""
        loader = super().state(iterator)
        return {"loader": loader, "generator": self._generator().get_state()}

    def _generator(self) -> Any:
        import torch  # noqa: PLC0415  # the loader is PyTorch's

        return self._data.generator or torch.default_generator

    def _with_generator(self, iterator: Iterator[Any], state: Any) -> Iterator[Any]:
        """Yields the rest of a pass; the loader draws numbers before the first batch."""
        first = list(itertools.islice(iterator, 1))
        self._generator().set_state(state)
        yield from first
        yield from iterator


class GrainSource(IterableSource):
    """Data whose iterators have `get_state` and `set_state`, as Grain's have."""

    finds_by = "state"

    def open(self, number: int, place: Place | None) -> Iterator[Any]:
        """Returns an iterator over a pass, from a state or from its beginning."""
        del number
        iterator = self._make()
        if place:
            iterator.set_state(place["state"])  # type: ignore[attr-defined]
        return iterator

    def state(self, iterator: Iterator[Any]) -> Any:
        """Returns the state of an iterator."""
        return copy.deepcopy(iterator.get_state())  # type: ignore[attr-defined]


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
    if isinstance(data, list):  # of batches: tuples or dicts of arrays
        return all(isinstance(item, tuple | dict) for item in data) and holds_arrays(data)
    if isinstance(data, tuple | dict | str | bytes) or is_array(data):
        return False
    return hasattr(data, "__iter__")


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


def source_of(data: Any, global_batch: int | None, seed: int | None) -> Source:
    """Returns the source for data that is read batch by batch in Python.

    Args:
        data: data for which `is_source` is true.
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
        return IterableSource(lambda: iter(data()), "generator function")
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
        return OneShotSource(lambda: data, name)
    if package == "grain":
        return GrainSource(lambda: iter(data), f"Grain {name}", length)
    return IterableSource(lambda: iter(data), name, length)


def length_of(data: Any) -> int | None:
    """Returns the number of batches in a pass; None if it is unknown."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # PyTorch's loaders of streams raise TypeError
        return None
