"""Saves and restores the position in data that Python makes batch by batch.

The place is written as JSON. With it goes a checksum of the batch that came next, if that was
known: a source that goes on with another batch is noticed. Reading the JSON cannot run code, as
reading a pickle can.
"""

import base64
import json
import pathlib
import time
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from trainer.data.batches import Batches
from trainer.data.iterator_state import DataPosition
from trainer.data.structures import is_torch

FILE = "data.json"
WAIT_SECS = 0.2  # how long a save waits for the next batch, whose checksum it writes

KIND = "__kind__"  # marks what JSON has no type for

# What is logged about sources whose place cannot be saved, by `Source.finds_by`.
NOTES = {
    "skip": (
        "The position in `train_data` (%s) cannot be saved: a resumed run reads and drops the "
        "batches already used."
    ),
    "never": "`train_data` (%s) can be read only once, so this run cannot be resumed with it.",
}


class SourcePosition(DataPosition):
    """The position in a source.

    Args:
        data: the training data, which has a source.
        resume_mode: as for `DataPosition`.
    """

    def __init__(self, data: Batches, resume_mode: str) -> None:
        """Creates the iterator, at the beginning of the data."""
        assert data.reader is not None  # noqa: S101  # see `position_in`
        self.reader = data.reader
        self.source = data.reader.source
        self.data = data
        self.resume_mode = resume_mode
        self.pipeline = ""
        self.content = []  # another batch is noticed by the checksum in the saved place
        self._dataset = data.endless()
        self.iterator = iter(self._dataset)

    def check_savable(self) -> None:
        """Remembers places from here on; says how a resumed run will find its place."""
        self.pipeline = f": {self.source.name}"
        if self.resume_mode != "exact":
            return
        self.reader.keep = True
        self.iterator = iter(self._dataset)
        if self.source.finds_by in NOTES:
            logging.warning(NOTES[self.source.finds_by], self.source.name)

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
        with tf.io.gfile.GFile(f"{folder}/{FILE}", "w") as file:
            file.write(json.dumps(encode(saved)))

    def read(self, folder: pathlib.Path, batches_taken: int) -> None:
        """Moves to the position at which a checkpoint was written.

        Args:
            folder: the checkpoint.
            batches_taken: number of batches that had been taken.

        Raises:
            ValueError: if the data cannot be read again, or goes on with another batch.
            FileNotFoundError: if no position was saved.
        """
        if self.resume_mode == "restart":
            self.taken = batches_taken
            return
        once = self.source.finds_by == "never"
        if batches_taken and once and (self.resume_mode == "exact" or self.taken):
            raise ValueError(
                f"`train_data` must be readable again to resume from {folder}; got a "
                f"{self.source.name}: pass the function that makes it"
            )
        place: dict[str, Any] = {"taken": batches_taken}
        following = None
        if self.resume_mode == "exact":
            saved = decode(json.loads((folder / FILE).read_text()))
            place, following = saved["place"], saved["next"]
        self._go_on_from(place, following, folder)
        self.taken = batches_taken

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
                "Batch %d of the %s is not the batch that came next when %s was written: its "
                "random numbers, or the order of this pass, are not repeated.",
                place["taken"] + 1,
                self.source.name,
                folder,
            )
            return
        raise ValueError(
            f"`train_data` must go on where {folder} stopped; got another batch "
            f"{place['taken'] + 1} from the {self.source.name}: seed it"
        )


def position_in(data: Batches, resume_mode: str) -> DataPosition:
    """Returns a position at the beginning of the training data."""
    if data.reader is None:
        return DataPosition(data, resume_mode)
    return SourcePosition(data, resume_mode)


def encode(value: Any) -> Any:
    """Returns the state of a source in types of JSON.

    Args:
        value: dicts, lists, tuples, numbers, text, bytes, None, NumPy arrays and PyTorch tensors.

    Raises:
        TypeError: if it holds something else.

    Example:
        >>> decode(json.loads(json.dumps(encode({"at": (1, b"x"), 2: None}))))
        {'at': (1, b'x'), 2: None}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, np.generic):
        return encode(value.item())
    return encode_marked(value)


def encode_marked(value: Any) -> dict[str, Any]:
    """Returns a value for which JSON has no type as a dict that names its kind."""
    if isinstance(value, tuple):
        return {KIND: "tuple", "items": [encode(item) for item in value]}
    if isinstance(value, dict):
        return {KIND: "dict", "items": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {KIND: "bytes", "base64": base64.b64encode(value).decode()}
    if is_torch(value):
        return encode_array(value.detach().cpu().numpy(), "tensor")
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return encode_array(value, "array")
    raise TypeError(f"`train_data` must have a state of plain values; got {type(value).__name__}")


def encode_array(array: np.ndarray, kind: str) -> dict[str, Any]:
    """Returns an array in types of JSON."""
    content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {KIND: kind, "dtype": array.dtype.str, "shape": list(array.shape), "base64": content}


def decode(value: Any) -> Any:
    """Returns the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    return decode_marked(value) if isinstance(value, dict) else value


def decode_marked(value: dict[str, Any]) -> Any:
    """Returns the value that `encode_marked` was given."""
    kind = value[KIND]
    if kind == "tuple":
        return tuple(decode(item) for item in value["items"])
    if kind == "dict":
        return {decode(k): decode(v) for k, v in value["items"]}
    content = base64.b64decode(value["base64"])
    if kind == "bytes":
        return content
    array = np.frombuffer(content, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if kind == "array":
        return array
    import torch  # noqa: PLC0415  # the source that wrote a tensor needs PyTorch

    return torch.from_numpy(array)
