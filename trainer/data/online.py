"""Batches that a program passes one by one, to `Trainer.train_on_batch`.

Their source is the program itself, so there is no position to save: whatever makes the batches has
to be restored by the program.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from strategies.division import count_examples
from trainer.data.batches import Batches
from trainer.data.iterator_state import BETWEEN_CALLS, DataPosition
from trainer.data.structures import as_batch, rows_in
from trainer.step.types import Batch


def as_global_batch(batch: Any, *, whole: bool = False) -> Batch:
    """Returns a batch that a user passed, as tensors in a structure of tuples and dicts.

    Args:
        batch: arrays or tensors in any structure. Lists of numbers become arrays, and lists of
            arrays tuples, as in the batches of a Python source.
        whole: as for `rows_in`.

    Raises:
        TypeError, ValueError: if it is not a batch, or if it has no examples.
    """
    composite = (tf.RaggedTensor, tf.SparseTensor)
    if not any(isinstance(leaf, composite) for leaf in tf.nest.flatten(batch)):
        try:
            batch = tf.nest.map_structure(tf.convert_to_tensor, as_batch(batch))
        except (TypeError, ValueError) as error:
            raise TypeError(
                "`batch` must be an array, or a tuple or dict of arrays; got "
                f"{type(batch).__name__}: {str(error).rstrip('.')}. The first dimension of each "
                "array is the example. Pass (x, y), for example."
            ) from error
    rows_in(batch, "batch", whole=whole)
    return batch


class OnlinePosition(DataPosition):
    """Stands for the position in data while batches are passed one by one.

    It keeps the position in the data that `train` was reading before, if any: checkpoints save it,
    so that a later call of `train` goes on from there, also after a restart.

    Args:
        batch: the first batch.
        before: the position in the data of the last call of `train`; None if there was none.
    """

    def __init__(self, batch: Batch, before: DataPosition | None) -> None:
        """Stores the arguments."""
        examples = int(count_examples(batch))
        self.data = Batches(tf.data.Dataset.from_tensors(batch), batch, examples, None)
        self._before = before
        self.resume_mode = before.resume_mode if before else "restart"
        self.pipeline = before.pipeline if before else ""
        self.content = before.content if before else None

    def facts(self) -> dict[str, Any]:
        """Returns what `run.json` says about the data of `train`; nothing about these batches."""
        if self._before:
            return self._before.facts()
        return {"pipeline": self.pipeline, "data_resume": self.resume_mode}

    def counts(self) -> dict[str, int]:
        """Returns the numbers of the position in the data of `train`; see `DataPosition`."""
        if self._before:  # `train` has read it to the end of its call
            return {**self._before.counts(), BETWEEN_CALLS: True}
        return super().counts()

    def go_to(self, folder: pathlib.Path, saved: Mapping[str, Any]) -> None:
        """Moves to the position in the data of `train`, if there is one."""
        if self._before:
            self._before.go_to(folder, saved)

    def go_back(self, folder: pathlib.Path, saved: Mapping[str, Any]) -> None:
        """Moves to the position of a checkpoint of the same process, if there is one."""
        if self._before:
            self._before.go_back(folder, saved)

    def begin_late(self, saved: Mapping[str, Any]) -> None:
        """Notes that the data of `train` is read from here on, if there is any."""
        if self._before:
            self._before.begin_late(saved)

    def begin_instead(self, saved: Mapping[str, Any]) -> None:
        """Notes that the position in the data of `train` begins anew, if there is one."""
        if self._before:
            self._before.begin_instead(saved)

    def write(self, folder: str) -> None:
        """Writes the position in the data of `train`, if there is one."""
        if self._before:
            self._before.write(folder)

    def leave_out(self, count: int) -> None:
        """Does nothing: it is up to the program which batches it passes."""
