"""Data that Python makes batch by batch: what can be read again, and how a position is found again.

Each source yields batches forever, pass after pass, with a place for each batch: JSON types from
which another process can read on behind that batch.
"""

import concurrent.futures
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from trainer.data.structures import holds_arrays, is_array

Place: TypeAlias = dict[str, Any]  # where a source goes on; holds what `state_json` can write
Placed: TypeAlias = tuple[Any, Place]  # a batch, and the place behind it


class EmptyPassError(RuntimeError):
    """Raised when a source ends although steps are left."""


class Source:
    """Batches that Python makes.

    Attributes:
        name: what it is, for logs and errors.
        length: number of batches in a pass; None if it is unknown.
        endless: whether it is known to have no end.
        finds_by: how a place is found again: "index", "state" (the source saves its own), "skip"
            (by reading from the beginning), "never".
    """

    name: str = "data"
    length: int | None = None
    endless: bool = False
    finds_by: ClassVar[str] = "skip"

    def peek(self, count: int) -> list[Any]:
        """Returns the first batches, at most `count`, which are read again later."""
        raise NotImplementedError

    def read(self, place: Place | None, *, keep: bool = False) -> Iterator[Placed]:
        """Yields batches forever, each with the place behind it.

        Args:
            place: where to begin; None for the beginning.
            keep: whether the places will be saved.
        """
        raise NotImplementedError

    def read_once(self) -> Iterator[Any]:
        """Yields the batches of one pass."""
        raise NotImplementedError

    def why_empty(self, number: int) -> str:
        """Returns why there is nothing to read in a pass, counted from 1, for an error."""
        return (
            f"the {self.name} yielded nothing when it was read for pass {number}; it must start "
            "over each time"
        )


class IndexedSource(Source):
    """Batches that are found by their number.

    Subclasses say what a pass is. Passes are counted from 0, and so are the batches in a pass.
    """

    finds_by = "index"

    def begin_pass(self, number: int) -> None:
        """Called before the first batch of a pass is read."""

    def end_pass(self) -> None:
        """Called when the last batch of a pass has been read."""

    def batch(self, index: int) -> Any:
        """Returns a batch of the current pass."""
        raise NotImplementedError

    def batches_from(self, start: int) -> Iterator[Any]:
        """Yields the batches of the current pass from an index on."""
        indices = itertools.count(start) if self.length is None else range(start, self.length)
        for index in indices:
            yield self.batch(index)

    def peek(self, count: int) -> list[Any]:
        """Returns the first batches."""
        self.begin_pass(0)
        return [self.batch(index) for index in range(min(count, self.size()))]

    def size(self) -> int:
        """Returns the number of batches in the current pass, at least 2^62 for an endless one."""
        return 2**62 if self.length is None else self.length

    def read(self, place: Place | None, *, keep: bool = False) -> Iterator[Placed]:
        """Yields batches forever; see `Source`."""
        del keep
        taken = left = place["taken"] if place else 0
        for number in itertools.count():
            self.begin_pass(number)
            start = min(left, self.size())
            left -= start
            if start < self.size():
                size, index = self.size(), start
                for batch in self.batches_from(start):
                    index += 1
                    if index == size:
                        self.end_pass()
                    taken += 1
                    yield batch, {"taken": taken}
            else:
                if not start:
                    raise EmptyPassError(self.why_empty(number + 1))
                self.end_pass()

    def read_once(self) -> Iterator[Any]:
        """Yields the batches of one pass."""
        self.begin_pass(0)
        yield from self.batches_from(0)


class PyDatasetSource(IndexedSource):
    """A `keras.utils.PyDataset`, whose hooks are called and whose workers are threads.

    On resume, `on_epoch_begin` and `on_epoch_end` are called once for every pass so far.
    """

    def __init__(self, data: keras.utils.PyDataset) -> None:
        """Reads the settings of the data."""
        self.name = "PyDataset"
        self._data = data
        self.length = data.num_batches
        self.endless = self.length is None
        if data.use_multiprocessing:
            logging.warning(
                "The PyDataset asks for use_multiprocessing=True; its %d workers are threads here, "
                "because a process forked from one that runs TensorFlow can hang.",
                data.workers,
            )

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


class ListSource(IndexedSource):
    """A list of batches."""

    def __init__(self, data: list[Any]) -> None:
        """Stores the list."""
        self.name, self._data, self.length = "list of batches", data, len(data)

    def batch(self, index: int) -> Any:
        """Returns a batch."""
        return self._data[index]


class IterableSource(Source):
    """Data that can be read from its beginning again, as often as needed.

    Args:
        make: returns a new iterator over a pass.
        name: what the data is, for logs and errors.
        length: number of batches in a pass; None if it is unknown.
    """

    def __init__(
        self, make: Callable[[], Iterator[Any]], name: str, length: int | None = None
    ) -> None:
        """Stores the arguments."""
        self._make, self.name = make, name
        self.endless = length is not None and length >= 2**62  # Grain's repeat() has 2^63 - 1
        self.length = None if self.endless else length
        # An iterator from which `peek` has read, and what it has read.
        self._opened: tuple[Iterator[Any], list[tuple[Any, Any]]] | None = None

    def open(self, number: int, place: Place | None) -> Iterator[Any]:
        """Returns an iterator over a pass, from a place in it or from its beginning."""
        del number, place
        return self._make()

    def state(self, iterator: Iterator[Any]) -> Any:
        """Returns the state of an iterator that has yielded a batch."""
        del iterator

    def peek(self, count: int) -> list[Any]:
        """Returns the first batches. The iterator is kept for the first pass."""
        if self._opened is None:
            self._opened = self.open(0, None), []
        iterator, found = self._opened
        while len(found) < count:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            found.append((batch, self.state(iterator)))
        return [batch for batch, _ in found]

    def one_pass(
        self, number: int, place: Place | None, *, keep: bool
    ) -> Iterator[tuple[Any, Any]]:
        """Yields the batches of a pass, each with the state behind it."""
        opened, self._opened = self._opened, None
        if opened and not number and not place:
            iterator, found = opened
            yield from found
        else:
            iterator = self.open(number, place)
        for batch in iterator:
            yield batch, self.state(iterator) if keep else None

    def read(self, place: Place | None, *, keep: bool = False) -> Iterator[Placed]:
        """Yields batches forever; see `Source`."""
        taken = place["taken"] if place else 0
        number, resumed = 0, None
        if place and place.get("state") is not None:
            number, resumed, skip = place["pass"], place, 0
        else:
            taken, skip = 0, taken
        while True:
            found = 0
            for batch, state in self.one_pass(number, resumed, keep=keep):
                found += 1
                taken += 1
                if taken > skip:
                    yield batch, {"taken": taken, "pass": number, "state": state}
            if not found and resumed is None:
                raise EmptyPassError(self.why_empty(number + 1))
            number, resumed = number + 1, None

    def read_once(self) -> Iterator[Any]:
        """Yields the batches of one pass."""
        for batch, _ in self.one_pass(0, None, keep=False):
            yield batch


class OneShotSource(IterableSource):
    """An iterator, such as a generator, which can be read only once."""

    finds_by = "never"

    def why_empty(self, number: int) -> str:
        """Returns why there is nothing to read, for an error."""
        del number
        return (
            f"the {self.name} has ended and cannot be read again: pass the function that makes it, "
            "without calling it"
        )


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
