"""The best models of a run by a metric: `model_dir/best/step-STEP`, each a folder."""

import math
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from trainer.checkpoint import folder

PREFIX = "step"
KERAS_FILE = "model.keras"
BETTER = {"lowest": 1.0, "highest": -1.0}  # what to multiply with, so that less is better


class Best:
    """Keeps the model of the evaluations that came out best.

    What was best so far stands in the folders and nowhere else: a run that is taken up again
    knows it, and one that is killed in an export has lost nothing.

    Args:
        model_dir: of the run.
        keep: how many stay.
        metric: which result of an evaluation is compared.
        which: "lowest" or "highest": which is best.
    """

    def __init__(self, model_dir: pathlib.Path, keep: int, metric: str, which: str) -> None:
        """Reads nothing yet."""
        self._parent = model_dir / "best"
        self._keep = keep
        self._metric = metric
        self._sign = BETTER[which]

    def consider(
        self, step: int, results: dict[str, float], export: Callable[[pathlib.Path], Any]
    ) -> bool:
        """Exports the model if it is one of the best; returns whether it was.

        Args:
            step: whose model was evaluated.
            results: of the evaluation.
            export: writes the model into a folder.
        """
        path = self._parent / f"{PREFIX}-{step}"
        others = self.ranked()
        others.pop(path, None)  # of an evaluation that a run taken up again has come to anew
        better = sum(rank <= self._rank(results) for rank in others.values())
        if self._rank(results) == math.inf or better >= self._keep:
            return False
        folder.tidy(self._parent, PREFIX)
        export(folder.begin(path))
        folder.commit(path, {"step": step, "results": results})
        for worse in list(others)[self._keep - 1 :]:
            shutil.rmtree(worse)
        return True

    def ranked(self) -> dict[pathlib.Path, float]:
        """Returns what is kept, best first, with a number that is less for what is better."""
        found = {}
        for path in folder.committed(self._parent, PREFIX).values():
            try:
                found[path] = self._rank(folder.read_manifest(path)["results"])
            except folder.DamagedError:
                found[path] = math.inf
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def _rank(self, results: dict[str, float]) -> float:
        rank = self._sign * results.get(self._metric, math.nan)
        return math.inf if math.isnan(rank) else rank


def export_model(model: Any, path: pathlib.Path) -> None:
    """Writes `model.keras`, or of a `tf.Module` a checkpoint `variables`, into a folder."""
    if isinstance(model, keras.Model):
        model.save(path / KERAS_FILE)
    else:
        tf.train.Checkpoint(model=model).write(str(path / "variables"))
