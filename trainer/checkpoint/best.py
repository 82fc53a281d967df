"""Keeps the best models of a run, each in a folder `model_dir/best/step-STEP`."""

import math
import pathlib
from collections.abc import Callable, Collection

import keras
import tensorflow as tf

from trainer.base.atomic_files import begin_folder, clean_up_folders, remove_folder
from trainer.checkpoint import folder
from trainer.step.types import Model

PREFIX = "step"
OUTRANKED = "outranked"  # the prefix of models that a rollback would make the best again
KERAS_FILE = "model.keras"
BETTER = {"lowest": 1.0, "highest": -1.0}  # factor that turns a metric into "lower is better"


class Best:
    """Keeps the models with the best values of an evaluation metric.

    The folders are the only record of the best results so far. A resumed run therefore finds them
    again, and a run that is killed during an export loses none of them.

    Args:
        model_dir: directory of the run.
        keep: number of models to keep.
        metric: name of the evaluation result to compare.
        which: whether the "lowest" or the "highest" values of the metric are best.
    """

    def __init__(self, model_dir: pathlib.Path, keep: int, metric: str, which: str) -> None:
        """Stores the settings."""
        self._parent = model_dir / "best"
        self._keep = keep
        self._metric = metric
        self._sign = BETTER[which]

    def consider(
        self,
        step: int,
        results: dict[str, float],
        export: Callable[[pathlib.Path], None],
        rollback_steps: Collection[int] = (),
    ) -> bool:
        """Exports the model if it is among the best, and returns whether it is.

        Args:
            step: step at which the model was evaluated.
            results: evaluation results, keyed by name.
            export: writes the model into a folder.
            rollback_steps: the steps to which the run may still be rolled back. A model that would
                then be one of the best stays, as `outranked-STEP`.
        """
        path = self._parent / f"{PREFIX}-{step}"
        others = self.ranked()
        others.pop(path, None)  # written before the run was resumed; a step does not beat itself
        better = sum(rank <= self._rank(results) for rank in others.values())
        if self._rank(results) == math.inf or better >= self._keep:
            return False
        clean_up_folders(self._parent, PREFIX)
        export(begin_folder(path))
        folder.commit(path, {"step": step, "results": results})
        self._sort_out(rollback_steps)
        return True

    def roll_back(self, step: int, rollback_steps: Collection[int]) -> None:
        """Leaves the models that were the best at a step to which the run was rolled back.

        Args:
            step: the step.
            rollback_steps: as for `consider`.
        """
        for prefix in (PREFIX, OUTRANKED):
            for at, path in folder.committed(self._parent, prefix).items():
                if at > step:
                    remove_folder(path)
        self._sort_out(rollback_steps)

    def ranked(self) -> dict[pathlib.Path, float]:
        """Returns the folders of the best models with their ranks (lower is better), best first."""
        found = folder.committed(self._parent, PREFIX).values()
        ranks = {path: self._rank_of(path) for path in found}
        return dict(sorted(ranks.items(), key=lambda item: item[1]))

    def _sort_out(self, rollback_steps: Collection[int]) -> None:
        """Names the best models, and those of earlier times that may be needed; removes others."""
        found = folder.committed(self._parent, OUTRANKED)
        again = found.keys() & folder.committed(self._parent, PREFIX).keys()
        for step in again:  # a resumed run has evaluated this step once more
            remove_folder(found[step])
        found |= folder.committed(self._parent, PREFIX)
        ranked = sorted(found, key=lambda step: (self._rank_of(found[step]), step))
        best = ranked[: self._keep]
        needed = {
            step
            for end in rollback_steps
            for step in [step for step in ranked if step <= end][: self._keep]
        }
        for step in ranked:
            path = self._parent / f"{PREFIX if step in best else OUTRANKED}-{step}"
            if step not in best and step not in needed:
                remove_folder(found[step])
            elif path != found[step]:
                found[step].rename(path)

    def _rank_of(self, path: pathlib.Path) -> float:
        """Returns the rank of a kept model: lower is better."""
        try:
            return self._rank(folder.read_manifest(path)["results"])
        except folder.DamagedError:
            return math.inf

    def _rank(self, results: dict[str, float]) -> float:
        rank = self._sign * results.get(self._metric, math.nan)
        return math.inf if math.isnan(rank) else rank


def export_model(model: Model, path: pathlib.Path) -> None:
    """Writes a Keras model as `model.keras`, or a `tf.Module` as the checkpoint `variables`."""
    if isinstance(model, keras.Model):
        model.save(path / KERAS_FILE)
    else:
        tf.train.Checkpoint(model=model).write(str(path / "variables"))
