"""Sources of libraries, with the positions that they save: Keras, Hugging Face, PyTorch, Grain."""

import concurrent.futures
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from absl import logging

from trainer.data.source import IndexedSource, IterableSource, Place


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
