"""Evaluates the checkpoints of a run that another process trains; see `evaluate_continuously`.

Results are written to `model_dir/eval`, which has the format of a run's own files. Everything else
in `model_dir` is only read.

A checkpoint is known by the checksums of its variables, not by its step alone: a run that is rolled
back, or started anew, writes other checkpoints of the same steps. Its results replace the old ones.
"""

import hashlib
import json
import pathlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from absl import logging

from trainer.base.atomic_files import make_folder
from trainer.callbacks.callback import Callback
from trainer.checkpoint import folder
from trainer.checkpoint.best import Best
from trainer.checkpoint.saver import PREFIX
from trainer.log.console import RunConsole
from trainer.log.run_log import format_results
from trainer.log.writers import RunWriters
from trainer.run.parts import Parts

if TYPE_CHECKING:
    from trainer.trainer import Trainer

FOLDER = "eval"  # in `model_dir`
EVALUATED = "evaluated"  # the "split" of the lines that say which checkpoints were evaluated
POLL_SECS = 1.0  # between two looks for new checkpoints
TAIL_BYTES = 2**16  # the last line of `metrics.jsonl` is looked for in so many bytes at its end

Results = dict[str, float]
Evaluate = Callable[[], Results | None]  # returns None if the evaluation was stopped


class ContinuousEvaluation:
    """Evaluates each checkpoint of a run once, in the order of their steps, while it is trained.

    Args:
        trainer: the trainer.
        model_dir: the run's folder; it may not exist yet.
        identity: what is evaluated. Results for another identity are not taken over.
        start: builds the trainer if needed, and returns its parts.
        evaluation: called once the trainer is built; returns a function that evaluates the model.
        export: writes the evaluated model into a folder.
    """

    def __init__(
        self,
        trainer: "Trainer",
        model_dir: pathlib.Path,
        identity: str,
        start: Callable[[], Parts],
        evaluation: Callable[[], Evaluate | None],
        export: Callable[[pathlib.Path], None],
    ) -> None:
        """Reads what an earlier process has evaluated. Nothing is built yet."""
        self._trainer, self._model_dir, self._identity = trainer, model_dir, identity
        self._start, self._evaluation, self._export = start, evaluation, export
        self._parts: Parts | None = None
        self._evaluate_model: Evaluate | None = None
        self._say = RunConsole(trainer.style).say
        make_folder(model_dir / FOLDER)
        settings, self._best = trainer.checkpoints, None
        if settings.keep_best:
            self._best = Best(
                model_dir / FOLDER, settings.keep_best, settings.best_metric, settings.best_is
            )
        self._listeners: list[Trainer | Callback] = [trainer]
        self._listeners += [each for each in trainer.callbacks if not each.needs_training]
        self._writers = RunWriters(model_dir / FOLDER)
        self._evaluated = read_evaluated(model_dir / FOLDER / "metrics.jsonl", identity)
        self._damaged: dict[str, bool] = {}  # fingerprint: whether it failed twice
        self._results: dict[int, Results] = {}

    def run(self, last_step: int | None, timeout_secs: float | None) -> dict[int, Results]:
        """Evaluates checkpoints until the run has ended, time is up, or a stop was asked for.

        Args:
            last_step: the step of the last checkpoint; None goes by the run's own log.
            timeout_secs: number of seconds without a new checkpoint after which to end; None
                waits without limit.

        Returns:
            The results of this call, keyed by step.
        """
        since = time.monotonic()
        while not self._trainer.stop_asked:
            ended = self._has_ended(last_step)  # before looking, so that no checkpoint is missed
            waiting = self._next()
            if waiting and self._evaluate(*waiting):
                since = time.monotonic()
                continue
            if ended and not waiting:
                self._say(f"the run in {self._model_dir} has ended")
                break
            if timeout_secs is not None and time.monotonic() - since > timeout_secs:
                self._say(f"no new checkpoint in {self._model_dir} for {timeout_secs:g} s")
                break
            self._pause(POLL_SECS)
        return self._results

    def _pause(self, seconds: float) -> None:
        """Waits, but not longer than it takes to notice that a stop was asked for."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._trainer.stop_asked:
            time.sleep(0.05)

    def _has_ended(self, last_step: int | None) -> bool:
        """Returns whether the run writes no more checkpoints."""
        if last_step is not None:
            return max(folder.committed(self._model_dir, PREFIX), default=-1) >= last_step
        line = last_line(self._model_dir / "metrics.jsonl")
        return line.get("split") == "end" and not line.get("stopped")

    def _next(self) -> tuple[int, pathlib.Path, str] | None:
        """Returns step, path and fingerprint of the first checkpoint that was not evaluated."""
        for step, path in folder.committed(self._model_dir, PREFIX).items():
            text = folder.manifest_text(path)
            found = None if text is None else fingerprint(text)
            if found and self._evaluated.get(step) != found and not self._damaged.get(found):
                return step, path, found
        return None

    def _evaluate(self, step: int, path: pathlib.Path, found: str) -> bool:
        """Evaluates a checkpoint, and returns whether it could be read."""
        try:
            if not self._restore(path):
                return False  # the run has removed it
        except (folder.DamagedError, OSError, tf.errors.OpError) as error:
            # It may be about to be removed, file by file. If so, it is gone at the next attempt.
            self._damaged[found] = found in self._damaged
            if self._damaged[found]:
                logging.error("%s is not evaluated: %s.", path, error)
            return False
        self._tell("on_evaluate_begin", step)
        results = self._evaluate_model() if self._evaluate_model else None
        if results is None:
            return False
        if any(other >= step for other in self._evaluated):
            self._writers.rewind(step - 1)
            for later in [other for other in self._evaluated if other >= step]:
                del self._evaluated[later]
        self._writers.write_scalars("validation", step, results)
        line = {"step": step, "split": EVALUATED, "checkpoint": found, "data": self._identity}
        self._writers.write_line(line)
        self._evaluated[step] = found
        self._results[step] = results
        self._say(f"checkpoint of step {step}: {format_results(results)}")
        if self._best and self._best.consider(step, results, self._export):
            self._say(f"kept in {self._model_dir / FOLDER / 'best'}")
        self._tell("on_evaluate_end", step, results)
        return True

    def _restore(self, path: pathlib.Path) -> bool:
        """Restores a checkpoint; returns False if the run has removed it."""
        if self._parts is None:
            adopt_compile_mode(self._trainer, self._model_dir)
            self._parts = self._start()
            self._evaluate_model = self._evaluation()  # checks the names of its results
        with self._trainer.strategy.scope():
            return self._parts.checkpoints.restore_live(path)

    def _tell(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of the trainer, and of its callbacks that do not act on training."""
        for listener in self._listeners:
            getattr(listener, hook)(*arguments)


def fingerprint(manifest: str) -> str:
    """Returns a checksum of the checksums of a checkpoint's variables.

    Example:
        >>> files = {"variables.index": {"sha256": "ab"}, "data.index": {"sha256": "cd"}}
        >>> fingerprint(json.dumps({"files": files}))[:8]
        '891a9c79'
    """
    try:
        files: dict[str, Any] = json.loads(manifest)["files"]
    except (ValueError, KeyError, TypeError):
        files = {}
    sums = [f"{name} {file['sha256']}" for name, file in files.items() if "variables" in name]
    return hashlib.sha256("\n".join(sums or [manifest]).encode()).hexdigest()[:16]


def read_evaluated(path: pathlib.Path, identity: str) -> dict[int, str]:
    """Returns the fingerprints of the checkpoints that were evaluated, keyed by step.

    Args:
        path: the evaluations' `metrics.jsonl`.
        identity: what is evaluated. A checkpoint that was evaluated on something else has no
            fingerprint, "".
    """
    evaluated: dict[int, str] = {}
    for text in path.read_text(errors="replace").splitlines() if path.exists() else []:
        line = parsed(text)
        if line.get("split") == EVALUATED:
            same = line.get("data") == identity
            evaluated[line["step"]] = str(line["checkpoint"]) if same else ""
        elif "step" in line:  # a process that was killed may have written no more than this line
            evaluated.setdefault(line["step"], "")
    return evaluated


def last_line(path: pathlib.Path) -> dict[str, Any]:
    """Returns the last line of a `metrics.jsonl`; {} if it is incomplete or there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            *_, last, rest = [b"", *file.read().split(b"\n")]
    except OSError:
        return {}
    return {} if rest else parsed(last.decode(errors="replace"))


def parsed(text: str) -> dict[str, Any]:
    """Returns a line of `metrics.jsonl`, or {} if it cannot be read."""
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def adopt_compile_mode(trainer: "Trainer", model_dir: pathlib.Path) -> None:
    """Makes a `tf.Module` compute as in the run, if the trainer leaves open what XLA compiles.

    A Keras model is evaluated in float32 without XLA, whatever the run's mode.
    """
    if not trainer.compile_mode_open or isinstance(trainer.model, keras.Layer):
        return
    for path in reversed(folder.committed(model_dir, PREFIX).values()):
        facts = folder.read_unchecked(path)
        if "jit_compile" in facts:
            trainer.jit_compile = facts["jit_compile"]
            return
