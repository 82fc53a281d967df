"""Saves a run and restores it. Each checkpoint is a folder `model_dir/ckpt-STEP`."""

import concurrent.futures
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf
from absl import logging

import scaling
import strategies
from trainer.base.atomic_files import (
    begin_folder,
    clean_up_folders,
    discard_folder,
    remove_folder,
    unfinished,
)
from trainer.checkpoint import folder
from trainer.checkpoint.contents import Contents, comparable, describe
from trainer.checkpoint.folder import Facts
from trainer.data.errors import reason_of
from trainer.fingerprint import diff, text_of_rule
from trainer.step.types import Variable

PREFIX = "ckpt"
IN_MEMORY = "ram://"  # TensorFlow's in-memory file system


class CheckpointError(RuntimeError):
    """Raised when a checkpoint cannot be written. Earlier checkpoints are unchanged."""


class CheckpointSaver:
    """Saves and restores the checkpoints of a run; without a `model_dir`, does nothing.

    Args:
        model_dir: the directory that contains the checkpoints, or None.
        max_to_keep: number of checkpoints to keep; older ones are removed. None keeps all.
        contents: the variables of the run.
        variables: the variables of the model and of each optimizer, keyed by "model",
            "optimizer" and so on. Their names, dtypes and shapes are saved, and compared when the
            run is restored.
        rule: the loss-scale rule. The saved state of another rule is not restored.
        strategy: the strategy. Only its chief keeps the files, but every worker must make the
            same calls.
        asynchronous: whether to write to disk in a thread, from a copy of the variables.
    """

    def __init__(
        self,
        model_dir: pathlib.Path | None,
        max_to_keep: int | None,
        contents: Contents,
        variables: Mapping[str, Sequence[Variable]],
        rule: scaling.LossScaleRule,
        strategy: tf.distribute.Strategy,
        *,
        asynchronous: bool,
    ) -> None:
        """Stores the settings, and creates the thread for asynchronous writes."""
        self._model_dir = model_dir
        self._max_to_keep = max_to_keep
        self._contents = contents
        self.variables = contents.holds()
        self._variables = {owner: describe(owned) for owner, owned in variables.items()}
        self._rule = rule
        self._strategy = strategy
        self._asynchronous = asynchronous
        self._writer = concurrent.futures.ThreadPoolExecutor(1)
        self._writing: concurrent.futures.Future[None] | None = None
        # Path and `run.json` of the checkpoint that was last saved or restored.
        self.latest: pathlib.Path | None = None
        self.facts: Facts = {}
        # Sizes and checksums of the files of that checkpoint; None while they are not known.
        self.files: Facts | None = None
        # The previous values of `latest` and `facts`, restored if the current write fails.
        self._previous: tuple[pathlib.Path | None, Facts] = (None, {})
        # Size of each file of the last checkpoint, keyed by file name without suffix.
        self.bytes: dict[str, int] = {}
        self.resumed = False  # whether training has continued from the restored checkpoint
        self.deferred = False  # whether a call of `train` has left that to a later call
        # The steps of the checkpoints in the folder when the last one was saved or restored.
        self.seen: set[int] = set()

    def restore(self, *, before: int | None = None, clean_up: bool = True) -> pathlib.Path | None:
        """Restores the newest intact checkpoint, if any. Call it in the strategy's scope.

        Args:
            before: if given, only checkpoints of earlier steps are considered, and later ones are
                removed once an earlier one has been found.
            clean_up: whether to remove what a killed process left unfinished. Without, nothing in
                `model_dir` is touched: another process may be writing there.

        Returns:
            The path of the checkpoint, or None.

        Raises:
            ValueError: if the checkpoint belongs to a different model or optimizer, or if there
                are checkpoints but all of them are damaged.
        """
        if self._model_dir is None:
            return None
        self.wait()
        if self._keeps_files and clean_up:
            clean_up_folders(self._model_dir, PREFIX)
        found = folder.committed(self._model_dir, PREFIX)
        too_late = [step for step in found if before is not None and step >= before]
        later = [found.pop(step) for step in too_late]
        intact = newest_intact(found, "model_dir")
        # A worker may look before the chief has finished writing, so the chief chooses for all.
        chosen = strategies.from_chief(intact[1]["step"] if intact else -1, self._strategy)
        if chosen < 0:
            return None
        path = self._model_dir / f"{PREFIX}-{chosen}"
        facts = intact[1] if intact and intact[0] == path else folder.read_manifest(path)
        if self._keeps_files:
            for late in later:
                remove_folder(late)
        self._read(path, facts)
        return path

    def restore_live(self, path: pathlib.Path) -> bool:
        """Restores a checkpoint of a run that another process trains. Writes nothing.

        That process may remove or replace the checkpoint while it is read. Call this function in
        the strategy's scope.

        Args:
            path: the checkpoint.

        Returns:
            Whether it was restored; False if it has been removed.

        Raises:
            DamagedError: if it is damaged.
            ValueError: if it belongs to a different model or optimizer.
        """
        while True:
            before = folder.manifest_text(path)
            if before is None:
                return False
            try:
                self._read(path, folder.read_manifest(path))
                # If it was removed meanwhile, the files that were open stayed readable.
                if folder.manifest_text(path) in (before, None):
                    return True
            except (ValueError, OSError, tf.errors.OpError):
                self.latest, self.facts = None, {}  # part of it may have been read
                if folder.manifest_text(path) == before:
                    raise

    def _read(self, path: pathlib.Path, facts: Facts) -> None:
        """Reads a checkpoint, whose `run.json` is given."""
        saved = facts["variables"]
        if set(self._variables) == {"model"}:  # a run that only evaluates
            saved = {"model": saved["model"]}
        check_variables(saved, self._variables, path, "model_dir")
        self._contents.read(
            path,
            copies=facts["num_replicas"] == self._strategy.num_replicas_in_sync
            and self._has_copies(facts, path),
            scale=facts["loss_scale"] == text_of_rule(self._rule),
        )
        self.latest, self.facts, self.files = path, facts, facts.get("files")
        self.seen = {*folder.committed(path.parent, PREFIX)}

    def save(
        self, step: int, facts: Facts, write_more: Callable[[str], None] | None = None
    ) -> pathlib.Path | None:
        """Saves a checkpoint. Returns when it is on disk, or at once if a thread writes it.

        Args:
            step: number of the last step taken.
            facts: information about the run to store in `run.json`.
            write_more: writes what else the checkpoint holds into a folder, such as the position in
                the training data.

        Returns:
            The path of the checkpoint, or None without a `model_dir`.

        Raises:
            CheckpointError: if this checkpoint or the previous one could not be written.
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
        if not self._keeps_files:  # reading a variable may need all workers, so all of them write
            with tempfile.TemporaryDirectory() as scratch:
                self._contents.write(scratch)
            self.latest, self.facts, self.resumed = path, facts, True
            return path
        try:
            temporary = str(begin_folder(path).absolute())
            target = IN_MEMORY + temporary if self._asynchronous else temporary
            if write_more:
                write_more(target)
            self._contents.write(target)
        except BaseException as error:
            self._discard(path)
            if isinstance(error, (OSError, tf.errors.OpError)):
                raise write_error(path, error) from error
            raise
        self._previous, self.files = (self.latest, self.facts), None
        self._writing = self._writer.submit(self._finish, path, facts)
        self.latest, self.facts, self.resumed = path, facts, True
        if not self._asynchronous:
            self.wait()
        return path

    def follow(self, *, clean_up: bool) -> bool:
        """Restores the newest checkpoint if it is not the one that was last saved or restored.

        Args:
            clean_up: as for `restore`.

        Returns:
            Whether a checkpoint was restored.
        """
        if self._model_dir is None:
            return False
        while True:
            newest = self._newest_step()
            if newest < 0 or self._is_known(newest):
                return False
            try:
                return self.restore(clean_up=clean_up) is not None
            except (ValueError, OSError, tf.errors.OpError):
                # The process that writes here may have removed this one for a newer one.
                if self._newest_step() == newest:
                    raise

    def facts_of_newest(self) -> Facts:
        """Returns `run.json` of the checkpoint that `follow` would restore; {} if there is none.

        The files are not checked: `restore` does that.
        """
        step = self._newest_step()
        if self._model_dir is None or step < 0 or self._is_known(step):
            return {}
        return folder.read_unchecked(self._model_dir / f"{PREFIX}-{step}")

    def check_only_writer(self) -> None:
        """Raises RuntimeError if another trainer has saved the run since this one last did.

        With several workers, every worker must call this method, and the chief's answer counts.
        """
        if self._model_dir is None:
            return
        self.wait()
        others = folder.committed(self._model_dir, PREFIX).keys() - self.seen
        newest = strategies.from_chief(max(others, default=-1), self._strategy)
        if newest >= 0:
            path = self._model_dir / f"{PREFIX}-{newest}"
            raise RuntimeError(
                f"`model_dir` must have one writer; another trainer has saved {path}"
            )

    def holds_other_variables(self) -> bool:
        """Returns whether the newest checkpoint holds other variables than the next one will."""
        return comparable(self.facts.get("variables", {})) != comparable(self._variables)

    def _newest_step(self) -> int:
        """Returns the step of the newest checkpoint that the chief sees, or -1."""
        found = folder.committed(self._model_dir, PREFIX) if self._model_dir else {}
        return strategies.from_chief(max(found, default=-1), self._strategy)

    def _is_known(self, step: int) -> bool:
        """Returns whether the checkpoint of a step is the one that was last saved or restored.

        Another run that began anew in the folder may have written one of the same step.
        """
        if step != self.facts.get("step") or self._model_dir is None:
            return False
        found = folder.read_unchecked(self._model_dir / f"{PREFIX}-{step}").get("files")
        replaced = None not in (found, self.files) and found != self.files
        return not strategies.from_chief(int(replaced), self._strategy)

    def continue_from(self, before: "CheckpointSaver") -> None:
        """Takes over the newest checkpoint of another object for the same run."""
        before.wait()
        self.latest, self.facts, self.resumed = before.latest, before.facts, before.resumed
        self.deferred, self.files = before.deferred, before.files
        self.bytes, self.seen = before.bytes, before.seen

    def kept_steps(self) -> set[int]:
        """Returns the steps of the checkpoints, with the one that may still be written."""
        found = folder.committed(self._model_dir, PREFIX) if self._model_dir else {}
        return {*found, *([self.facts["step"]] if self.facts else [])}

    def wait(self) -> None:
        """Waits until the current checkpoint is on disk.

        Raises:
            CheckpointError: if it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing:
            try:
                writing.result()
            except Exception:
                self.latest, self.facts = self._previous
                raise

    def _finish(self, path: pathlib.Path, facts: Facts) -> None:
        """Moves a checkpoint into place and removes the oldest ones."""
        try:
            if self._asynchronous:
                move_to_disk(unfinished(path).absolute())
            files = self.files = folder.commit(path, facts)
        except BaseException as error:
            self._discard(path)
            if isinstance(error, (OSError, tf.errors.OpError)):
                raise write_error(path, error) from error
            raise
        sizes = {name.split(".")[0]: 0 for name in files}
        for name, file in files.items():
            sizes[name.split(".")[0]] += file["bytes"]
        self.bytes = sizes
        # Do not count checkpoints of later steps. They must be damaged, because otherwise this run
        # would have resumed from one of them.
        found = folder.committed(path.parent, PREFIX)
        kept = [earlier for step, earlier in found.items() if step <= facts["step"]]
        if self._max_to_keep is not None:
            for old in kept[: -self._max_to_keep]:
                remove_folder(old)
        self.seen = {*folder.committed(path.parent, PREFIX)}

    def _discard(self, path: pathlib.Path) -> None:
        """Removes the files of a checkpoint that could not be completed."""
        discard_folder(path)
        in_memory = f"{IN_MEMORY}{unfinished(path).absolute()}"
        if self._asynchronous and tf.io.gfile.exists(in_memory):
            tf.io.gfile.rmtree(in_memory)

    def _has_copies(self, facts: Facts, path: pathlib.Path) -> bool:
        """Returns whether a checkpoint holds copies of the same variables; warns if not."""
        ours, saved = ({"model": lines} for lines in (self._contents.differing, facts["copies"]))
        same = comparable(ours) == comparable(saved)
        if not same:
            logging.warning("Metrics are not restored from %s because they have changed", path)
        return same

    @property
    def lacks_average(self) -> bool:
        """Whether the checkpoint holds averages of the weights that this run has no place for."""
        saved = self.facts.get("variables", {})
        left_out = [
            line for owner in saved if owner not in self._variables for line in saved[owner]
        ]
        return any(line.rpartition(":")[0].endswith("_average") for line in left_out)

    @property
    def _keeps_files(self) -> bool:
        """Whether this process is the one whose files are kept."""
        return strategies.capabilities(self._strategy).is_chief


def has_checkpoints(
    model_dir: pathlib.Path | None, strategy: tf.distribute.Strategy, *, clean_up: bool
) -> bool:
    """Returns whether a run has checkpoints, from one of which `CheckpointSaver.restore` resumes.

    With several workers, every worker must call this function, and the chief's answer counts.
    For `clean_up`, see `CheckpointSaver.restore`.
    """
    if model_dir is None:
        return False
    if clean_up and strategies.capabilities(strategy).is_chief:
        clean_up_folders(model_dir, PREFIX)
    found = bool(folder.committed(model_dir, PREFIX))
    return strategies.from_chief(int(found), strategy) > 0


def write_error(path: pathlib.Path, error: Exception) -> CheckpointError:
    """Returns the error for a checkpoint that could not be written."""
    earlier = [None, *folder.committed(path.parent, PREFIX).values()]
    return CheckpointError(
        f"could not write {path}: {reason_of(str(error))}; the last good one is {earlier[-1]}"
    )


def move_to_disk(path: pathlib.Path) -> None:
    """Moves the files of a folder in memory to the folder of the same name on disk."""
    in_memory = f"{IN_MEMORY}{path}"
    for name in tf.io.gfile.listdir(in_memory):
        tf.io.gfile.copy(f"{in_memory}/{name}", str(path / name))
    tf.io.gfile.rmtree(in_memory)


def newest_intact(
    found: dict[int, pathlib.Path], argument: str
) -> tuple[pathlib.Path, Facts] | None:
    """Returns the newest undamaged checkpoint and its `run.json`, or None if `found` is empty.

    Args:
        found: checkpoints, keyed by step, in ascending order.
        argument: name of the argument that selected them, for errors.

    Raises:
        ValueError: if there are checkpoints, but all of them are damaged.
    """
    damaged = []
    for path in reversed(found.values()):
        try:
            facts = read_while_written(path)
        except folder.DamagedError as error:
            logging.error("Skipping damaged checkpoint %s: %s.", path.name, error)
            damaged.append(str(error))
        else:
            return path, facts
    if not damaged:
        return None
    raise ValueError(
        f"`{argument}` must hold an undamaged checkpoint, or none; got {'; '.join(damaged)}"
    )


def read_while_written(path: pathlib.Path) -> Facts:
    """Returns `run.json` of a checkpoint that another process may replace meanwhile.

    Raises:
        DamagedError: if it is damaged, or has been removed.
    """
    while True:
        before = folder.manifest_text(path)
        try:
            return folder.read_manifest(path)
        except folder.DamagedError:
            if folder.manifest_text(path) == before:
                raise


def check_variables(
    saved: Mapping[str, Sequence[str]],
    ours: Mapping[str, Sequence[str]],
    path: pathlib.Path,
    argument: str,
) -> None:
    """Raises ValueError if a checkpoint belongs to a different model or optimizer.

    Args:
        saved: results of `describe` from the checkpoint, keyed by owner: "model", "optimizer" and
            so on.
        ours: results of `describe` for this run, keyed by owner.
        path: path of the checkpoint.
        argument: name of the argument that selected the checkpoint.
    """
    for place, (was, now) in diff(comparable(saved), comparable(ours)).items():
        raise ValueError(f"`{argument}` must hold {now} as {place}; got {was} in {path}")
