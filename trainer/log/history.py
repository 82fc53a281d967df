"""The history of a run: its logged and evaluated numbers, in memory.

It covers the whole run, so it is the same whether the run was interrupted or not: a process that
resumes a run reads the numbers of the steps before from `metrics.jsonl`, and a run that is rolled
back forgets the numbers of the steps that it takes again.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from trainer.log.digits import format_number
from trainer.log.writers import read_lines

PREFIXES = {"train": "", "validation": "val_"}  # of the names in a history, as in Keras


class Row(NamedTuple):
    """The numbers of one log line or evaluation."""

    step: int
    values: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class BestResult:
    """The best evaluation of a run, by `best_metric`."""

    metric: str  # the name of the result that was compared
    value: float
    step: int  # the step that was evaluated; the first one of several with this value
    results: Mapping[str, float]  # all results of this evaluation, keyed by name

    def __str__(self) -> str:
        """Returns, for instance, "loss 0.5000 at step 4"."""
        return f"{self.metric} {format_number(self.value)} at step {self.step}"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A history as it was at some time. Making one copies nothing."""

    rows: dict[str, list[Row]]  # by split; a list may grow after the snapshot was made
    lengths: dict[str, int]
    other_data_until: int = -1  # the last step that was evaluated on other data than now

    def of(self, split: str) -> dict[int, Mapping[str, float]]:
        """Returns the numbers of a split, keyed by step; a step that was repeated counts once."""
        return {row.step: row.values for row in self.rows[split][: self.lengths[split]]}

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns an array for each name, and the steps that they belong to.

        Returns:
            "step", shape (log lines,), int64, and arrays of the same shape, float64, by the names
            in the log. Then "val_step", shape (evaluations,), int64, and the evaluations' results,
            with "val_" before their names. A number that is missing in a line is NaN. Without log
            lines or evaluations, their names are absent.

        Example:
            >>> history = History()
            >>> history.add("train", 10, {"loss": 0.5})
            >>> history.add("validation", 10, {"loss": 0.75})
            >>> history.snapshot().arrays()
            {'step': array([10]), 'loss': array([0.5]), 'val_step': ..., 'val_loss': array([0.75])}
        """
        arrays = {}
        for split, prefix in PREFIXES.items():
            rows = self.of(split)
            if rows:
                arrays[f"{prefix}step"] = np.array(list(rows), np.int64)
            for name in dict.fromkeys(name for values in rows.values() for name in values):
                column = [values.get(name, math.nan) for values in rows.values()]
                arrays[prefix + name] = np.array(column, np.float64)
        return arrays

    def best(self, metric: str, sign: float) -> BestResult | None:
        """Returns the best evaluation, or None if there is none with a result that is not NaN.

        Evaluations on other data, in earlier calls of `train`, do not count.

        Args:
            metric: the name of the result to compare.
            sign: 1 if the lowest is best, and -1 if the highest is.
        """
        rows = self.of("validation")
        steps = [step for step in rows if step > self.other_data_until]
        ranked = [(sign * rows[step].get(metric, math.nan), step) for step in steps]
        known = [(rank, step) for rank, step in ranked if not math.isnan(rank)]
        if not known:
            return None
        rank, step = min(known)
        return BestResult(metric, sign * rank, step, dict(rows[step]))

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame` with a row for each step that has numbers; see `arrays`."""
        import pandas as pd  # of the extra `pandas`

        frames = []
        for split, prefix in PREFIXES.items():
            rows = self.of(split)
            frame = pd.DataFrame(list(rows.values()), index=list(rows), dtype="float64")
            frames.append(frame.add_prefix(prefix))
        return pd.concat(frames, axis="columns").sort_index().rename_axis("step")


class History:
    """Collects the numbers of a run."""

    def __init__(self) -> None:
        """Begins with no numbers."""
        self._rows: dict[str, list[Row]] = {split: [] for split in PREFIXES}
        self._evaluated: tuple[str, int] | None = None  # the data, and until which step
        self._other_data_until = -1

    def add(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Adds a log line ("train") or an evaluation ("validation"), as plain numbers.

        inf is NaN, as in `metrics.jsonl`, from which a resumed run reads its history.
        """
        finite = {
            name: value if math.isfinite(value) else math.nan for name, value in values.items()
        }
        self._rows[split].append(Row(step, finite))

    def evaluate_on(self, data: str, step: int, target: int) -> None:
        """Notes on what data `train` evaluates from a step on.

        Args:
            data: what tells it from other data.
            step: the step that the run has reached. A program that is started again may have taken
                some of the steps on this data before.
            target: the step that this call of `train` is to reach.
        """
        if self._evaluated and self._evaluated[0] != data:
            self._other_data_until = min(self._evaluated[1], step)
        self._evaluated = data, target

    def rewind(self, step: int, begun: int | None = None) -> None:
        """Forgets the numbers of later steps. Snapshots keep them.

        Args:
            step: the last step whose numbers stay.
            begun: the first step of the interval in which `step` is, if the run goes on with that
                interval. A line about a part of it is forgotten, too.
        """
        ends = last_steps(step, begun)
        self._rows = {
            split: [row for row in rows if row.step <= ends[split]]
            for split, rows in self._rows.items()
        }

    def read(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replaces the history by that of the lines of a `metrics.jsonl`, in which null is NaN."""
        self._rows = {split: [] for split in PREFIXES}
        for line in lines:
            if line["split"] == "recovery":
                self.rewind(line["restored"], line.get("interval_begun"))
            elif line["split"] in PREFIXES:
                values = {
                    name: math.nan if value is None else value
                    for name, value in line.items()
                    if name not in {"step", "split"}
                }
                self.add(line["split"], line["step"], values)

    def snapshot(self) -> Snapshot:
        """Returns the history as it is now."""
        lengths = {split: len(rows) for split, rows in self._rows.items()}
        return Snapshot(self._rows, lengths, self._other_data_until)


def last_steps(step: int, begun: int | None) -> dict[str, int]:
    """Returns the last step whose numbers stay, for each split; see `History.rewind`."""
    return {"train": step if begun is None else begun - 1, "validation": step}


def read_history(model_dir: pathlib.Path | None, step: int) -> list[dict[str, Any]]:
    """Returns the lines of a run's `metrics.jsonl` up to a step; none without a folder."""
    if model_dir is None:
        return []
    _, kept = read_lines(model_dir / "metrics.jsonl", step, step + 1)
    return [json.loads(line) for line in kept]
