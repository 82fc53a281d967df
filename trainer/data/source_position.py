"""Saves and restores the position in data that Python makes batch by batch.

The place is written as JSON. With it goes a checksum of the batch that came next, if that was
known: a source that goes on with another batch is noticed.
"""

import pathlib
import time
from typing import Any

import tensorflow as tf
from absl import logging

from trainer.data import state_json
from trainer.data.batches import Batches
from trainer.data.iterator_state import DataPosition
from trainer.data.reader import Reader

FILE = "data.json"
WAIT_SECS = 0.2  # how long a save waits for the next batch, whose checksum it writes

NOTES = {
    "skip": (
        "The position in `train_data` ({}) cannot be saved: a resumed run reads and drops the "
        "batches already used. This is exact if it yields the same batches each time it is read."
    ),
    "never": (
        "`train_data` ({}) can be read only once, so this run cannot be resumed with it. Pass the "
        "function that makes it, without calling it."
    ),
}


class SourcePosition(DataPosition):
    """The position in a source.

    Args:
        data: the training data, which has a source.
        resume_mode: as for `DataPosition`.
    """

    def __init__(self, data: Batches, resume_mode: str) -> None:
        """Creates the iterator, at the beginning of the data."""
        if data.reader is None:
            raise TypeError("`data` must be read from a source; got a pipeline or arrays.")
        self.reader: Reader = data.reader
        self.source = data.reader.source
        self.data = data
        self.resume_mode = resume_mode
        self.pipeline = ""
        self.content = None  # another batch is noticed by the checksum in the saved place
        self._dataset = data.endless()
        self.iterator = iter(self._dataset)

    @property
    def error(self) -> Exception | None:
        """The error that reading the data has raised, if any."""
        return self.reader.error

    def check_savable(self) -> None:
        """Remembers places from here on; says how a resumed run will find its place."""
        self.pipeline = f": {self.source.name}"
        if self.resume_mode != "exact":
            return
        self.reader.keep = True
        self.iterator = iter(self._dataset)
        if self.source.finds_by in NOTES:
            logging.warning("%s", NOTES[self.source.finds_by].format(self.source.name))

    def write(self, folder: str) -> None:
        """Writes the position into a folder if the resume mode is "exact"."""
        if self.resume_mode != "exact":
            return
        place, following = self.reader.behind(self.taken)
        deadline = time.monotonic() + WAIT_SECS
        while following is None and place and time.monotonic() < deadline:
            time.sleep(0.005)  # until the next batch has been read ahead
            place, following = self.reader.behind(self.taken)
        if place is None and self.taken and self.source.finds_by == "state":
            raise OSError(f"the position behind batch {self.taken} is not known")
        saved = {
            "source": self.source.name,
            "place": place or {"taken": self.taken},
            "next": following,
        }
        try:
            text = state_json.dumps(saved)
        except TypeError as error:
            raise not_savable(self.source.name, error) from error
        write_text(f"{folder}/{FILE}", text)

    def read(self, folder: pathlib.Path, batches_taken: int) -> None:
        """Moves to the position at which a checkpoint was written.

        Args:
            folder: the checkpoint.
            batches_taken: number of batches that had been taken.

        Raises:
            ValueError: if no position was saved, or if the data goes on with another batch.
        """
        if self.resume_mode == "restart":
            self.taken = batches_taken
            return
        once = self.source.finds_by == "never"
        if batches_taken and once and (self.resume_mode == "exact" or self.taken):
            raise read_once(folder, self.source.name)
        place: dict[str, Any] = {"taken": batches_taken}
        following = None
        if self.resume_mode == "exact":
            saved = self._saved(folder)
            place, following = saved["place"], saved["next"]
        self._go_on_from(place, following, folder)
        self.taken = batches_taken

    def _saved(self, folder: pathlib.Path) -> dict[str, Any]:
        path = folder / FILE
        if not path.exists():
            raise ValueError(
                f'`data_resume` must be "skip" or "restart" to resume from {folder}; got "exact". '
                "That run did not save its position in the data. Use the data_resume of that run."
            )
        saved: dict[str, Any] = state_json.loads(path.read_text())
        return saved

    def _go_on_from(
        self, place: dict[str, Any], following: int | None, folder: pathlib.Path
    ) -> None:
        """Reads on from a place, and compares the next batch with the one that came next before."""
        self._dataset, found = self.reader.upcoming(place)
        self._dataset = self._dataset.prefetch(2)
        self.iterator = iter(self._dataset)
        if following is None or found == following:
            return
        if self.source.finds_by == "index":
            logging.warning(
                "Batch %d of the %s is not the batch that came next when %s was written. If it is "
                "augmented at random, its random numbers are not repeated; if its order is random, "
                "some examples are seen twice in this pass.",
                place["taken"] + 1,
                self.source.name,
                folder,
            )
            return
        raise ValueError(
            f"`train_data` must go on where the run that wrote {folder} stopped; got another batch "
            f"{place['taken'] + 1} from the {self.source.name}. The resumed run would see "
            "different data. Seed its order and its random numbers, or pass "
            'data_resume="skip", which reads and drops the batches already used, or "restart", '
            "which begins a new pass."
        )


def position_in(data: Batches, resume_mode: str) -> DataPosition:
    """Returns a position at the beginning of the training data."""
    if data.reader is None:
        return DataPosition(data, resume_mode)
    return SourcePosition(data, resume_mode)


def read_once(folder: pathlib.Path, name: str) -> ValueError:
    """Returns the error for a source that cannot be read again."""
    return ValueError(
        f"`train_data` must be readable from its beginning to resume from {folder}; got a {name}, "
        "which can be read only once. Its position is not known. Pass the function that makes it, "
        'without calling it; or pass data_resume="skip" if this is a new one that yields the same '
        'batches, or "restart" to go on with whatever it yields.'
    )


def not_savable(name: str, error: TypeError) -> ValueError:
    """Returns the error for a state that JSON cannot hold."""
    return ValueError(
        f"`train_data` must have a state of numbers, text and arrays; got a {name}: {error}. "
        "Reading a checkpoint must not run code, so other objects are not saved. Pass "
        'data_resume="skip", which reads and drops the batches already used, or "restart".'
    )


def write_text(path: str, text: str) -> None:
    """Writes a file on any of TensorFlow's file systems."""
    with tf.io.gfile.GFile(path, "w") as file:
        file.write(text)
