"""What a run leaves in `model_dir` for programs: `metrics.jsonl`, CSV files, TensorBoard's.

`metrics.jsonl` has one JSON object a line, in which NaN is null: `"split"` says of what kind.
"train" and "validation" hold numbers; the same stand in `train.csv` and `validation.csv`, and in
the folders of these names, which TensorBoard shows as two curves.
"""

import csv
import json
import math
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.base.atomic_files import write_whole

PluginData = tf.compat.v1.SummaryMetadata.PluginData
# What makes TensorBoard draw a number as a curve, and show a text. `tf.summary.scalar` and `text`
# would write the same, but need the tensorboard package, which only those who look need to have.
SCALAR = tf.compat.v1.SummaryMetadata(plugin_data=PluginData(plugin_name="scalars"), data_class=1)
TEXT = tf.compat.v1.SummaryMetadata(plugin_data=PluginData(plugin_name="text"), data_class=2)


class RunWriters:
    """Writes a run's files, or none.

    Args:
        model_dir: where; None writes none. Files appear with the first numbers.
    """

    def __init__(self, model_dir: pathlib.Path | None) -> None:
        """Opens nothing yet."""
        self._folder = model_dir
        self._events: dict[str, tf.summary.SummaryWriter] = {}

    def numbers(self, split: str, step: int, scalars: dict[str, float]) -> None:
        """Writes the numbers of one step, of "train" or "validation", wherever they belong."""
        self.curves(split, step, scalars)
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self.line({"step": step, "split": split, **finite})
        if self._folder is not None:
            append_row(self._folder / f"{split}.csv", {"step": step, **finite})

    def curves(self, split: str, step: int, scalars: dict[str, float]) -> None:
        """Writes numbers for TensorBoard alone."""
        if self._folder is not None:
            writer = self._writer(self._folder, split)
            with writer.as_default(step):
                for name, value in scalars.items():
                    tf.summary.write(name, np.float32(value), metadata=SCALAR)
            writer.flush()

    def text(self, name: str, step: int, markdown: str) -> None:
        """Writes a text for TensorBoard alone."""
        if self._folder is not None:
            with self._writer(self._folder, "train").as_default(step):
                tf.summary.write(name, markdown, metadata=TEXT)

    def line(self, facts: dict[str, Any]) -> None:
        """Adds a line to `metrics.jsonl`."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(facts) + "\n")

    def written(self) -> str:
        """Returns where a person finds what was written, in two lines; "" if nothing was."""
        if self._folder is None:
            return ""
        names = ["metrics.jsonl", "train.csv", "validation.csv", "flags.cfg", "best"]
        found = [name for name in names if (self._folder / name).exists()]
        return (
            f"in {self._folder}: {', '.join(found)}\n"
            f"shown by python -m trainer.report {self._folder}, or tensorboard --logdir="
            f"{self._folder}"
        )

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Removes the lines of later steps, which a run that is taken up again will take anew.

        So a step has its lines once, whatever happened. A line that was cut off goes, too.

        Returns:
            The lines of `metrics.jsonl` that stay.
        """
        if self._folder is None:
            return []
        path, kept = self._folder / "metrics.jsonl", []
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            kept = [each for each in lines if each.endswith("\n") and is_of(each, step)]
            keep(path, lines, kept)
        for path in self._folder.glob("*.csv"):
            head, *lines = path.read_text().splitlines(keepends=True) or [""]
            good = [
                line for line in lines if line.endswith("\n") and int(line.split(",")[0]) <= step
            ]
            keep(path, [head, *lines], [head, *good])
        return [json.loads(line) for line in kept]

    def _writer(self, folder: pathlib.Path, split: str) -> tf.summary.SummaryWriter:
        if split not in self._events:
            self._events[split] = tf.summary.create_file_writer(str(folder / split))
        return self._events[split]


def keep(path: pathlib.Path, before: list[str], lines: list[str]) -> None:
    """Writes lines in place of others, if they are others: all of them, or none."""
    if lines != before:
        write_whole(path, "".join(lines))


def is_of(line: str, last: int) -> bool:
    """Returns whether a line of `metrics.jsonl` is to stay when the run goes back to step `last`.

    That the run was taken back before is not forgotten by it.
    """
    try:
        facts = json.loads(line)
    except ValueError:  # it was cut off, and another process wrote on
        return False
    return facts["step"] <= last or facts["split"] == "recovery"


def append_row(path: pathlib.Path, row: dict[str, Any]) -> None:
    """Adds a row to a CSV file; columns that are new to it are empty in the rows before."""
    rows, names, anew = [row], list(row), not path.exists()
    if not anew:
        with path.open(newline="") as file:
            known = csv.DictReader(file)
            names = list(dict.fromkeys([*(known.fieldnames or []), *row]))
            anew = names != known.fieldnames
            rows = [*known, row] if anew else rows
    with path.open("w" if anew else "a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if anew:
            writer.writeheader()
        writer.writerows(rows)
