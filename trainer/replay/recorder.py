"""The flight recorder: keeps what it takes to run a skipped step again.

A record is a folder `model_dir/overflows/step-<step>` of three things, none of which is code:
`batch/`, the global batch, as a `tf.data.Dataset` saves it; `state.npz`, every replica's copy
of each variable that the loss reads, random states included; and `record.json`, what the
step reported and how it was computed.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from trainer.step.report import StepReport
from trainer.step.rollback import copies_of


@dataclasses.dataclass(frozen=True)
class Record:
    """One recorded step."""

    step: int
    loss_scale: float
    in_float32: bool
    cause: int
    bad_replica: int
    bad_variable: int
    inf_count: int
    nan_count: int
    random_seed: int  # of the run: what random numbers are made from, with the step
    setting: dict[str, Any]  # what must be the same for the same verdict

    @classmethod
    def of(cls, report: StepReport, random_seed: int, setting: dict[str, Any]) -> "Record":
        """Takes from a report, of one step in NumPy numbers, what a record keeps."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in report._fields]
        reported = {name: getattr(report, name).item() for name in names}
        return cls(**reported, random_seed=random_seed, setting=setting)


class FlightRecorder:
    """Keeps the latest overflows of a run.

    Args:
        folder: where; made with the first record.
        max_records: how many stay; older ones go.
        max_bytes: how large they may be together; one that is larger is not kept.
        variables: what the loss reads.
        strategy: whose replicas have copies of them.
        random_seed: of the run: shape (), int64.
        setting: what a record says of the run.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        max_records: int,
        max_bytes: int,
        variables: Sequence[Any],
        strategy: tf.distribute.Strategy,
        random_seed: tf.Variable,
        setting: dict[str, Any],
    ) -> None:
        """Looks for nothing yet."""
        self._folder = folder
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._variables = variables
        self._strategy = strategy
        self._random_seed = random_seed
        self._setting = setting
        self.latest: pathlib.Path | None = None

    def keep(self, report: StepReport, batch: Any, spec: Any) -> None:
        """Records a skipped step, whose weights are still the model's.

        Args:
            report: of that step, in NumPy numbers.
            batch: the global batch.
            spec: what was known of it when the step was traced: TensorFlow computes a little
                otherwise where it knows more.
        """
        record = Record.of(report, int(self._random_seed.numpy()), self._setting)
        state = read_state(self._variables, self._strategy)
        leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(batch, expand_composites=True)]
        size = sum(array.nbytes for array in [*state.values(), *leaves])
        if size > self._max_bytes:
            self.latest = None
            logging.warning(
                "An overflow at step %d is not kept: it takes %d bytes, and max_overflow_bytes is "
                "%d.",
                record.step,
                size,
                self._max_bytes,
            )
            return
        path = self._folder / f"step-{record.step:08d}"
        # Written beside and then renamed: whoever reads it finds all of it or none.
        unfinished = self._folder / f"{path.name}.tmp"
        for leftover in (unfinished, path):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir(parents=True)
        dataset = tf.data.Dataset.from_generator(lambda: [batch], output_signature=spec)
        dataset.save(str(unfinished / "batch"))
        np.savez(unfinished / "state.npz", **state)
        text = json.dumps(dataclasses.asdict(record), indent=1)
        (unfinished / "record.json").write_text(text + "\n")
        unfinished.rename(path)
        self.latest = path
        self._make_room()

    def _make_room(self) -> None:
        """Removes the oldest records until the others are few and small enough."""
        # By age and not by step: a run that was taken up again may come to earlier steps.
        kept = sorted(self._folder.glob("step-*[0-9]"), key=lambda path: path.stat().st_mtime_ns)
        while len(kept) > self._max_records or (len(kept) > 1 and bytes_in(kept) > self._max_bytes):
            shutil.rmtree(kept.pop(0))


def keep_overflow(recorder: FlightRecorder, report: StepReport, batch: Any, spec: Any) -> int:
    """Records the last step of an inner loop if it was the first skip of a row.

    Args:
        recorder: where to.
        report: of the steps that the loop has taken: it ends early at such a step.
        batch: the last step's.
        spec: of the data set's batches.

    Returns:
        How many steps it has taken.
    """
    taken = int(report.step.shape[0])
    if taken and int(report.consecutive_skips[-1]) == 1:
        recorder.keep(StepReport(*(field[-1].numpy() for field in report)), batch, spec)
    return taken


def read_record(path: pathlib.Path) -> tuple[Record, tf.data.Dataset, dict[str, np.ndarray]]:
    """Returns what a folder keeps: the record, a data set of the one batch, and the state.

    Raises:
        ValueError: if it is no whole record.
    """
    try:
        record = Record(**json.loads((path / "record.json").read_text()))
        dataset = tf.data.Dataset.load(str(path / "batch"))
        with np.load(path / "state.npz", allow_pickle=False) as state:
            return record, dataset, dict(state)
    except (OSError, TypeError, ValueError, KeyError, tf.errors.OpError) as error:
        raise ValueError(
            f"`overflow` must be a folder that the flight recorder wrote; got {path}, which cannot "
            f"be read: {error}. It takes a batch and a state to run a step again. Give one of "
            "model_dir/overflows/step-*."
        ) from error


def read_state(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Returns the values of `copies_by_name`."""
    return {name: copy.numpy() for name, copy in copies_by_name(variables, strategy).items()}


def write_state(
    variables: Sequence[Any], state: dict[str, np.ndarray], strategy: tf.distribute.Strategy
) -> None:
    """Writes back what `read_state` returned.

    Raises:
        ValueError: if the variables are not those that were read.
    """
    copies = copies_by_name(variables, strategy)
    shapes = {name: tuple(copy.shape) for name, copy in copies.items()}
    found = {name: array.shape for name, array in state.items()}
    if shapes != found:
        differing = min({*shapes.items()} ^ {*found.items()})
        raise ValueError(
            "`overflow` must be of a run with the same model and as many replicas; got a record "
            f"that differs in variable copy {differing[0]!r}, shape {differing[1]}. The step "
            "cannot be run again with another model. Use the trainer of that run."
        )
    for name, copy in copies.items():
        copy.assign(state[name])


def copies_by_name(
    variables: Sequence[Any], strategy: tf.distribute.Strategy
) -> dict[str, tf.Variable]:
    """Returns every copy of some variables, by "position/copy"."""
    return {
        f"{position}/{place}": copy
        for position, variable in enumerate(variables)
        for place, copy in enumerate(copies_of(variable, strategy))
    }


def bytes_in(folders: Sequence[pathlib.Path]) -> int:
    """Returns how large all files in some folders are together."""
    return sum(
        path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file()
    )
