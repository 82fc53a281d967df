"""The flight recorder: keeps everything that is needed to replay a skipped step.

A record is a folder `model_dir/overflows/step-STEP` with three entries, none of which is code:
`batch/`, the global batch, written by `tf.data.Dataset.save`; `state.npz`, every replica's copy of
each variable that the loss reads, random states included; and `record.json`, what the step
reported and the settings it was computed with.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from absl import logging

from trainer.base.atomic_files import begin_folder, clean_up_folders, publish_folder, remove_folder
from trainer.base.tracking import copies_of
from trainer.data.batches import Spec
from trainer.step.report import StepReport
from trainer.step.types import Batch, Variable

Setting: TypeAlias = dict[str, Any]  # settings (text, numbers, booleans), keyed by name


@dataclasses.dataclass(frozen=True)
class Record:
    """The contents of `record.json`: the outcome of a step, and the settings of the run."""

    step: int
    loss_scale: float
    in_float32: bool
    cause: int
    bad_replica: int
    bad_variable: int
    inf_count: int
    nan_count: int
    random_seed: int  # the run's seed; the seed and `step` determine all random numbers
    setting: Setting  # the settings that must be the same to get the same verdict

    @classmethod
    def of(cls, report: StepReport, random_seed: int, setting: Setting) -> "Record":
        """Makes a record from the report of one step, whose fields are NumPy scalars."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in report._fields]
        reported = {name: getattr(report, name).item() for name in names}
        return cls(**reported, random_seed=random_seed, setting=setting)


class FlightRecorder:
    """Keeps the latest overflows of a run.

    Args:
        folder: the folder for the records; created with the first one.
        max_records: number of records to keep; older ones are removed.
        max_bytes: maximum total size of the records; a single record above it is not written.
        variables: the variables that the loss reads.
        strategy: the strategy whose replicas hold copies of the variables.
        random_seed: the run's seed: shape (), int64.
        setting: the settings to store in each record.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        max_records: int,
        max_bytes: int,
        variables: Sequence[Variable],
        strategy: tf.distribute.Strategy,
        random_seed: tf.Variable,
        setting: Setting,
    ) -> None:
        """Stores the settings."""
        self._folder = folder
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._variables = variables
        self._strategy = strategy
        self._random_seed = random_seed
        self._setting = setting
        self.latest: pathlib.Path | None = None

    def keep_overflow(self, report: StepReport, batch: Batch, spec: Spec) -> None:
        """Records the last step of an inner loop if it was the first in a series of skips.

        The loop ends at the first skip of a series, so this skip is always the last step.

        Args:
            report: reports of the loop's steps.
            batch: the global batch of the last step.
            spec: the dataset's `element_spec`.
        """
        if report.step.shape[0] and int(report.consecutive_skips[-1]) == 1:
            self._keep(StepReport(*(field[-1].numpy() for field in report)), batch, spec)

    def _keep(self, report: StepReport, batch: Batch, spec: Spec) -> None:
        """Records a step that was just skipped. The model must still have the weights of that step.

        Args:
            report: report of that step, whose fields are NumPy scalars.
            batch: the global batch.
            spec: the dataset's `element_spec`. With static shapes TensorFlow may compute slightly
                different results, so a replay is traced with the same spec.
        """
        record = Record.of(report, int(self._random_seed.numpy()), self._setting)
        state: dict[str, Any] = read_state(self._variables, self._strategy)
        leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(batch, expand_composites=True)]
        size = sum(array.nbytes for array in [*state.values(), *leaves])
        if size > self._max_bytes:
            self.latest = None
            logging.warning(
                "The overflow at step %d was not recorded: it needs %d bytes, and "
                "max_record_bytes is %d.",
                record.step,
                size,
                self._max_bytes,
            )
            return
        path = self._folder / f"step-{record.step:08d}"
        clean_up_folders(self._folder, "step")
        unfinished = begin_folder(path)
        dataset = tf.data.Dataset.from_generator(lambda: [batch], output_signature=spec)
        dataset.save(str(unfinished / "batch"))
        np.savez(unfinished / "state.npz", **state)
        text = json.dumps(dataclasses.asdict(record), indent=1)
        (unfinished / "record.json").write_text(text + "\n")
        publish_folder(path)
        self.latest = path
        self._make_room()

    def _make_room(self) -> None:
        """Removes the oldest records until the limits on their number and size are met."""
        # Sorted by age instead of step, because a resumed run may return to earlier steps.
        kept = sorted(self._folder.glob("step-*[0-9]"), key=lambda path: path.stat().st_mtime_ns)
        while len(kept) > self._max_records or (len(kept) > 1 and bytes_in(kept) > self._max_bytes):
            remove_folder(kept.pop(0))


def read_record(path: pathlib.Path) -> tuple[Record, tf.data.Dataset, dict[str, np.ndarray]]:
    """Returns a record, a dataset of its single batch, and the recorded values of the variables.

    Raises:
        ValueError: if the folder is not a complete record.
    """
    try:
        record = Record(**json.loads((path / "record.json").read_text()))
        dataset = tf.data.Dataset.load(str(path / "batch"))
        with np.load(path / "state.npz", allow_pickle=False) as state:
            return record, dataset, dict(state)
    except (OSError, TypeError, ValueError, KeyError, tf.errors.OpError) as error:
        raise ValueError(
            f"`overflow` must be one of model_dir/overflows/step-*; got {str(path)!r}: {error}"
        ) from error


def read_state(
    variables: Sequence[Variable], strategy: tf.distribute.Strategy
) -> dict[str, np.ndarray]:
    """Returns the value of every copy of the variables, keyed as in `copies_by_name`."""
    return {name: copy.numpy() for name, copy in copies_by_name(variables, strategy).items()}


def write_state(
    variables: Sequence[Variable],
    state: dict[str, np.ndarray],
    strategy: tf.distribute.Strategy,
) -> None:
    """Assigns the values that `read_state` returned to the variables.

    Raises:
        ValueError: if the number or shapes of the variables do not match `state`.
    """
    copies = copies_by_name(variables, strategy)
    shapes = {name: tuple(copy.shape) for name, copy in copies.items()}
    found = {name: array.shape for name, array in state.items()}
    if shapes != found:
        name, shape = min({*shapes.items()} ^ {*found.items()})
        raise ValueError(
            "`overflow` must be a record of the same model on as many replicas; got another "
            f"variable {name!r}, shape {shape}"
        )
    for name, copy in copies.items():
        value = state[name]  # NumPy's files do not know bfloat16 and float8, and keep the bytes
        copy.assign(value.view(copy.dtype.as_numpy_dtype) if value.dtype.kind == "V" else value)


def copies_by_name(
    variables: Sequence[Variable], strategy: tf.distribute.Strategy
) -> dict[str, tf.Variable]:
    """Returns every replica's copy of the variables, keyed by "VARIABLE/REPLICA" (indices)."""
    return {
        f"{position}/{place}": copy
        for position, variable in enumerate(variables)
        for place, copy in enumerate(copies_of(variable, strategy))
    }


def bytes_in(folders: Sequence[pathlib.Path]) -> int:
    """Returns the total size in bytes of all files in the given folders."""
    return sum(
        path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file()
    )
