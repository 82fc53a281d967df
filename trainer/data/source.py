"""What a source is: batches that Python makes, pass after pass, and places to read on from.

Each batch comes with its place: JSON types from which another process can read on behind it.
`IndexedSource` finds a batch by its number, `IterableSource` by reading from the beginning.
"""

import abc
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeAlias

import numpy as np
import tensorflow as tf

Place: TypeAlias = dict[str, Any]  # where a source goes on; see `source_position.encode`
Placed: TypeAlias = tuple[Any, Place]  # a batch, and the place behind it

TAKEN_OVER = 64  # bytes: TensorFlow uses memory of this alignment itself, and copies any other


class EmptyPassError(RuntimeError):
    """Raised when a source ends although steps are left."""


class Source(abc.ABC):
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

    @abc.abstractmethod
    def peek(self, count: int) -> list[Any]:
        """Returns the first batches, at most `count`, which are read again later."""

    @abc.abstractmethod
    def read(
        self, place: Place | None, *, keep: bool = False, passes: float = math.inf
    ) -> Iterator[Placed]:
        """Yields batches, each with the place behind it.

        Args:
            place: where to begin; None for the beginning.
            keep: whether the places will be saved.
            passes: the number of passes to read, counted from the beginning.

        Raises:
            EmptyPassError: if there is nothing to read in a pass.
        """

    def why_empty(self, number: int) -> str:
        """Returns why there is nothing to read in a pass, counted from 1, for an error."""
        return f"the {self.name} yielded nothing in pass {number}; it must start over each time"


class IndexedSource(Source):
    """Batches that are found by their number.

    Subclasses say what a pass is. Passes are counted from 0, and so are the batches in a pass.
    """

    finds_by = "index"

    def begin_pass(self, number: int) -> None:
        """Called before the first batch of a pass is read."""

    def end_pass(self) -> None:
        """Called when the last batch of a pass has been read."""

    @abc.abstractmethod
    def batch(self, index: int) -> Any:
        """Returns a batch of the current pass: where a batch is made."""

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

    def read(
        self, place: Place | None, *, keep: bool = False, passes: float = math.inf
    ) -> Iterator[Placed]:
        """Yields batches; see `Source`."""
        del keep
        taken = left = place["taken"] if place else 0
        number = 0
        while number < passes:
            self.begin_pass(number)
            number += 1
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
                    raise EmptyPassError(self.why_empty(number))
                self.end_pass()


class ListSource(IndexedSource):
    """A list of batches."""

    def __init__(self, data: list[Any]) -> None:
        """Stores the list."""
        self.name, self._data, self.length = "list of batches", data, len(data)

    def batch(self, index: int) -> Any:
        """Returns a batch."""
        return self._data[index]


def own_copy(leaf: Any) -> Any:
    """Returns a copy of an array, which an iterator may fill again for its next batch."""
    if hasattr(leaf, "detach") and hasattr(leaf, "clone"):  # of PyTorch
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def copy_unless_tensorflow_copies(leaf: Any) -> Any:
    """Returns a copy of an array whose memory TensorFlow would use itself, and others as they are.

    It takes over memory that is aligned to 64 bytes, as that of PyTorch, of shared memory and of
    files is. Batches are read ahead, so an iterator that fills its array again would change them.
    """
    aligned = isinstance(leaf, np.ndarray) and leaf.ctypes.data % TAKEN_OVER == 0
    return leaf.copy() if aligned else leaf


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
            found.append((tf.nest.map_structure(own_copy, batch), self.state(iterator)))
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

    def read(
        self, place: Place | None, *, keep: bool = False, passes: float = math.inf
    ) -> Iterator[Placed]:
        """Yields batches; see `Source`."""
        taken = place["taken"] if place else 0
        number, resumed = 0, None
        if place and place.get("state") is not None:
            number, resumed, skip = place["pass"], place, 0
        else:
            taken, skip = 0, taken
        while number < passes:
            found = 0
            for batch, state in self.one_pass(number, resumed, keep=keep):
                found += 1
                taken += 1
                if taken > skip:
                    yield batch, {"taken": taken, "pass": number, "state": state}
            if not found and resumed is None:
                raise EmptyPassError(self.why_empty(number + 1))
            number, resumed = number + 1, None


class OneShotSource(IterableSource):
    """An iterator, such as a generator, which can be read only once."""

    finds_by = "never"

    def why_empty(self, number: int) -> str:
        """Returns why there is nothing to read, for an error."""
        del number
        return f"the {self.name} has ended; pass the function that makes it, without calling it"
