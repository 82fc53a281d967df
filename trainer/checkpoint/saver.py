"""Saving a run and taking it up again: `model_dir/ckpt-STEP`, each a folder."""

import concurrent.futures
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

import scaling
import strategies
from trainer.checkpoint import folder
from trainer.checkpoint.contents import Contents, describe, first_difference
from trainer.data.iterator_state import DataPosition

PREFIX = "ckpt"
IN_MEMORY = "ram://"  # a file system of TensorFlow's


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Those before it are as they were."""


class Checkpoints:
    """The checkpoints of a run. Without a `model_dir` it does nothing.

    Args:
        model_dir: where they are kept, or None.
        max_to_keep: how many of the newest stay.
        contents: the run's variables.
        variables: of model and optimizers, by whose they are: a checkpoint says name, dtype and
            shape of each, to be compared.
        rule: the loss-scale rule; the state of another one is left alone.
        strategy: whose chief alone keeps files; every worker must call.
        asynchronous: whether to write in a thread, from a copy of the variables.
    """

    def __init__(
        self,
        model_dir: pathlib.Path | None,
        max_to_keep: int,
        contents: Contents,
        variables: Mapping[str, Sequence[Any]],
        rule: scaling.LossScaleRule,
        strategy: tf.distribute.Strategy,
        *,
        asynchronous: bool,
    ) -> None:
        """Reads and writes nothing yet."""
        self._model_dir = model_dir
        self._max_to_keep = max_to_keep
        self._contents = contents
        self._variables = {whose: describe(each) for whose, each in variables.items()}
        self._rule = rule
        self._strategy = strategy
        self._asynchronous = asynchronous
        self._writer = concurrent.futures.ThreadPoolExecutor(1)
        self._writing: concurrent.futures.Future[None] | None = None
        # Where the run was last saved, or taken up; what that checkpoint says.
        self.latest: pathlib.Path | None = None
        self.facts: dict[str, Any] = {}
        # The same of the one before, while one is being written.
        self._good: tuple[pathlib.Path | None, dict[str, Any]] = (None, {})
        self.bytes: dict[str, int] = {}  # how large its files are, by their first name
        self.taken_up = False  # whether the run has gone on from there, or begun

    def restore(self, *, before: int | None = None) -> pathlib.Path | None:
        """Takes up the newest sound checkpoint, if there is one. In the strategy's scope.

        Args:
            before: only those of earlier steps count; if there is one, later ones are removed.

        Returns:
            Its path, or None.

        Raises:
            ValueError: if it is of another model or optimizer; if there are checkpoints and none
                is sound.
        """
        if self._model_dir is None:
            return None
        self.wait()
        if self._keeps_files:
            folder.tidy(self._model_dir, PREFIX)
        found = folder.committed(self._model_dir, PREFIX)
        late = [step for step in found if before is not None and step >= before]
        later = [found.pop(step) for step in late]
        sound = newest_sound(found, "model_dir")
        # Another worker may look before the chief's last one is in its place.
        chosen = strategies.from_chief(sound[1]["step"] if sound else -1, self._strategy)
        if chosen < 0:
            return None
        path = self._model_dir / f"{PREFIX}-{chosen}"
        facts = sound[1] if sound and sound[0] == path else read_facts(path)
        if self._keeps_files:
            for each in later:
                shutil.rmtree(each)
        check_variables(facts["variables"], self._variables, path, "model_dir")
        self._contents.read(
            path,
            copies=facts["num_replicas"] == self._strategy.num_replicas_in_sync
            and self._has_copies(facts, path),
            scale=facts["loss_scale"] == repr(self._rule),
        )
        self.latest, self.facts = path, facts
        return path

    def save(
        self, step: int, facts: dict[str, Any], position: DataPosition | None
    ) -> pathlib.Path | None:
        """Saves everything. Waits until it is written, unless it is to be so in a thread.

        Args:
            step: whose end it is.
            facts: what `run.json` shall say.
            position: in the data; None if there is none.

        Returns:
            The path of the checkpoint, or None without a directory.

        Raises:
            CheckpointError: if it, or the one before it, could not be written.
        """
        if self._model_dir is None:
            return None
        self.wait()
        path = self._model_dir / f"{PREFIX}-{step}"
        facts = facts | {
            "step": step,
            "variables": self._variables,
            "copies": self._contents.differing,
        }
        if not self._keeps_files:  # reading a variable may take all workers
            with tempfile.TemporaryDirectory() as scratch:
                self._contents.write(scratch)
            self.latest, self.facts, self.taken_up = path, facts, True
            return path
        try:
            unfinished = str(folder.begin(path).absolute())
            written = IN_MEMORY + unfinished if self._asynchronous else unfinished
            if position:
                position.write(written)
            self._contents.write(written)
        except (OSError, tf.errors.OpError) as error:
            self._abandon(path)
            raise self._failed(path, error) from error
        self._good = self.latest, self.facts
        self._writing = self._writer.submit(self._finish, path, facts)
        self.latest, self.facts, self.taken_up = path, facts, True
        if not self._asynchronous:
            self.wait()
        return path

    def wait(self) -> None:
        """Waits for what is being written.

        Raises:
            CheckpointError: if it could not be.
        """
        writing, self._writing = self._writing, None
        if writing:
            try:
                writing.result()
            except CheckpointError:
                self.latest, self.facts = self._good
                raise

    def _finish(self, path: pathlib.Path, facts: dict[str, Any]) -> None:
        """Puts a checkpoint in its place, and removes those that are too many."""
        try:
            if self._asynchronous:
                to_disk(folder.unfinished(path).absolute())
            files = folder.commit(path, facts)
        except BaseException as error:
            self._abandon(path)
            if isinstance(error, (OSError, tf.errors.OpError)):
                raise self._failed(path, error) from error
            raise
        sizes = {name.split(".")[0]: 0 for name in files}
        for name, file in files.items():
            sizes[name.split(".")[0]] += file["bytes"]
        self.bytes = sizes
        # Later ones are damaged, or this run would have gone on from there.
        found = folder.committed(path.parent, PREFIX)
        kept = [each for step, each in found.items() if step <= facts["step"]]
        for old in kept[: -self._max_to_keep]:
            shutil.rmtree(old)

    def _abandon(self, path: pathlib.Path) -> None:
        """Removes what was written of a checkpoint that came to nothing."""
        folder.abandon(path)
        in_memory = f"{IN_MEMORY}{folder.unfinished(path).absolute()}"
        if self._asynchronous and tf.io.gfile.exists(in_memory):
            tf.io.gfile.rmtree(in_memory)

    def _has_copies(self, facts: dict[str, Any], path: pathlib.Path) -> bool:
        """Returns whether a checkpoint holds the copies of our variables; warns if not."""
        difference = first_difference(self._contents.differing, facts["copies"])
        if difference:
            logging.warning("Metrics begin anew, which were others in %s: %s.", path, difference)
        return difference is None

    def _failed(self, path: pathlib.Path, error: Exception) -> CheckpointError:
        good = list(folder.committed(path.parent, PREFIX).values())
        last = good[-1] if good else "none"
        reason = str(error).splitlines()[0]
        return CheckpointError(
            f"`model_dir` must have room for a checkpoint and let it be written; got {path}: "
            f"{reason}. The last good checkpoint is {last}. Make room and run the same command "
            "again."
        )

    @property
    def _keeps_files(self) -> bool:
        """Whether this process is the one that keeps files."""
        return strategies.is_chief(self._strategy)


def read_facts(path: pathlib.Path) -> dict[str, Any]:
    """Returns what the checkpoint says that the chief has chosen.

    Raises:
        ValueError: if it cannot be read here.
    """
    try:
        return folder.read_manifest(path)
    except folder.DamagedError as error:
        raise ValueError(
            f"`model_dir` must be the same for all workers; got {path.parent}, where {error}. The "
            "chief goes on from there. Use a file system that all of them share."
        ) from error


def to_disk(path: pathlib.Path) -> None:
    """Moves the files that were written to a folder in memory to the one of that name on disk."""
    in_memory = f"{IN_MEMORY}{path}"
    for name in tf.io.gfile.listdir(in_memory):
        tf.io.gfile.copy(f"{in_memory}/{name}", str(path / name))
    tf.io.gfile.rmtree(in_memory)


def newest_sound(
    found: dict[int, pathlib.Path], argument: str
) -> tuple[pathlib.Path, dict[str, Any]] | None:
    """Returns the newest checkpoint that is as it was written, and what it says; None of none.

    Args:
        found: checkpoints by step.
        argument: what their user calls them, for errors.

    Raises:
        ValueError: if there are some, and all are damaged.
    """
    damaged = []
    for path in reversed(found.values()):
        try:
            return path, folder.read_manifest(path)
        except folder.DamagedError as error:
            logging.error("Checkpoint %s is damaged and left out: %s.", path.name, error)
            damaged.append(str(error))
    if damaged:
        raise ValueError(
            f"`{argument}` must hold a sound checkpoint if it holds any; got {len(damaged)} "
            f"damaged ones: {'; '.join(damaged)}. Starting anew in their place would lose what may "
            f"be saved of them. Mend or remove them, or use another {argument}."
        )
    return None


def check_variables(
    saved: Mapping[str, Sequence[str]],
    ours: Mapping[str, Sequence[str]],
    path: pathlib.Path,
    argument: str,
) -> None:
    """Raises ValueError if a checkpoint is of another model or optimizer."""
    if argument == "model_dir":
        new, way_out = "new, or that", "with init_from= to take over a model's weights alone"
    else:
        new, way_out = "that", "or None to begin with new weights"
    for whose in {**ours, **saved}:
        sides = ours.get(whose, ()), saved.get(whose, ())
        difference = first_difference(*sides, kinds=whose != "model")
        if difference:
            raise ValueError(
                f"`{argument}` must be {new} of a run with the same {whose}; got {path}, where a "
                f"variable differs: {difference}. Its values would have nowhere to go. Use "
                f"another {argument}, {way_out}."
            )
