"""Reads a source's batches into tf.data: checks each, and remembers the places behind the last few.

tf.data reads ahead of the steps. So the place to save is not where the source is, but where it was
after the last batch that a step has used.
"""

import collections
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from trainer.data.source import Place, Source, copy_unless_tensorflow_copies
from trainer.data.structures import BatchError, as_arrays, difference, fingerprint, rows_in, spec_of

# At most this many batches have been read, but not used by a step: two that `Batches.endless`
# prefetches, one on its way, and some to spare.
AHEAD = 6


class Reader:
    """Reads the batches of a source.

    Args:
        source: the source.
        argument: name of the user's argument, for errors.
        whole: whether batches are not divided: see `rows_in`.

    Attributes:
        first: the first batch: NumPy arrays in a structure; None if there is none.
        spec: the structure of a batch, with a spec for each tensor.
        error: the error that reading has raised, if any.
        keep: whether to remember places.
    """

    def __init__(self, source: Source, argument: str, *, whole: bool = False) -> None:
        """Reads the first two batches, which the source will read again."""
        self.source = source
        self.keep = False
        self.error: Exception | None = None
        self._argument, self._whole = argument, whole
        # The places behind the last batches, and their fingerprints.
        self._remembered: collections.deque[tuple[Place, int]] = collections.deque(maxlen=AHEAD)
        self._lock = threading.Lock()
        batches = [as_arrays(batch, argument) for batch in source.peek(2)]
        self.first = batches[0] if batches else None
        self.spec: Any = spec_of(batches) if batches else None

    def once(self) -> tf.data.Dataset:
        """Returns the batches of one pass."""
        return self._dataset(lambda: self._read(None, passes=1))

    def forever(self, place: Place | None = None) -> tf.data.Dataset:
        """Returns the batches of all passes from a place on; None begins at the beginning."""
        return self._dataset(lambda: self._read(place))

    def upcoming(self, place: Place | None) -> tuple[tf.data.Dataset, int]:
        """Reads the next batch at a place.

        Returns:
            The batches from there on, that one included; and its fingerprint.
        """
        batches = self._read(place)
        following = next(batches)

        def all_batches() -> Iterator[Any]:
            yield following
            yield from batches

        return self._dataset(all_batches), fingerprint(following)

    def behind(self, taken: int) -> tuple[Place | None, int | None]:
        """Returns the place behind a batch, and the fingerprint of the next if it was read.

        Args:
            taken: number of batches up to that one.
        """
        with self._lock:
            known = {place["taken"]: (place, batch) for place, batch in self._remembered}
        place, _ = known.get(taken, (None, None))
        _, following = known.get(taken + 1, (None, None))
        return place, following

    def _dataset(self, make: Callable[[], Iterator[Any]]) -> tf.data.Dataset:
        return untuned(tf.data.Dataset.from_generator(make, output_signature=self.spec))

    def _read(self, place: Place | None, passes: float = math.inf) -> Iterator[Any]:
        with self._lock:
            self._remembered.clear()
        self.error = None
        try:
            for batch, behind in self.source.read(place, keep=self.keep, passes=passes):
                checked = self._checked(batch, behind["taken"])
                if self.keep:
                    with self._lock:
                        self._remembered.append((behind, fingerprint(checked)))
                yield checked
        except Exception as error:  # TensorFlow keeps only its text
            self.error = error
            raise

    def _checked(self, batch: Any, number: int) -> Any:
        converted = as_arrays(batch, self._argument)
        if found := difference(converted, self.spec):
            raise BatchError(
                f"`{self._argument}` must yield batches like its first two; got {found} in "
                f"batch {number}"
            )
        rows_in(converted, self._argument, whole=self._whole)
        return tf.nest.map_structure(copy_unless_tensorflow_copies, converted)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset whose iterator has no autotuning thread.

    In TensorFlow 2.21 that thread can miss that its iterator is being deleted, and the deletion
    then waits for up to a minute. The pipelines that this package makes have nothing to tune. A
    user's dataset is not changed, because maps with AUTOTUNE run in parallel only if they are
    tuned.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
