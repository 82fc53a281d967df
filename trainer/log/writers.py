"""The log files in `model_dir`: `metrics.jsonl`, and TensorBoard's event files.

Each line of `metrics.jsonl` is a JSON object in which NaN is null. Its "split" names the kind of
line. "train" and "validation" lines hold numbers. The same numbers are in the folders `train/` and
`validation/`, which TensorBoard shows as two curves.
"""

import itertools
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from trainer.base.atomic_files import write_atomically

PluginData = tf.compat.v1.SummaryMetadata.PluginData
SUMS = "train", "gradients", "underflow", "float8"  # lines about all steps since the one before
# Metadata that tells TensorBoard that a value is a scalar. `tf.summary.scalar` adds the same
# metadata, but it needs the tensorboard package.
SCALAR = tf.compat.v1.SummaryMetadata(plugin_data=PluginData(plugin_name="scalars"), data_class=1)


class RunWriters:
    """Writes the log files of a run.

    Args:
        model_dir: the folder for the files; None writes no files. Each file is created when
            something is first written to it.
    """

    def __init__(self, model_dir: pathlib.Path | None) -> None:
        """Stores the folder; the event writers are created when they are first needed."""
        self._folder = model_dir
        self._events: dict[str, tf.summary.SummaryWriter] = {}

    def write_scalars(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Writes numbers to `metrics.jsonl` and to TensorBoard.

        Args:
            split: "train" or "validation".
            step: the step that the numbers belong to.
            scalars: the numbers, keyed by name.
        """
        self.write_tensorboard(split, step, scalars)
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self.write_line({"step": step, "split": split, **finite})

    def write_tensorboard(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Writes numbers to TensorBoard only."""
        if self._folder is not None:
            writer = self._event_writer(self._folder, split)
            with writer.as_default(step):
                for name, value in scalars.items():
                    tf.summary.write(name, np.float32(value), metadata=SCALAR)
            writer.flush()

    def write_line(self, line: Mapping[str, object]) -> None:
        """Appends a line to `metrics.jsonl`."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def describe_files(self) -> str:
        """Returns two lines of text: the names of the files, and how to view them.

        Returns "" if the run writes no files.
        """
        if self._folder is None:
            return ""
        names = ["metrics.jsonl", "flags.cfg", "best"]
        found = [name for name in names if (self._folder / name).exists()]
        return (
            f"files in {self._folder}: {', '.join(found)}\n"
            f"view them with python -m trainer.report {self._folder}, or tensorboard --logdir="
            f"{self._folder}"
        )

    def set_aside(self) -> list[str]:
        """Renames the log files of an earlier run in the folder, so that they stay as they are.

        Its best models are renamed too: they would compete with those of this run.

        Returns:
            The new names, which no file has yet.
        """
        if self._folder is None:
            return []
        paths = [self._folder / name for name in ("metrics.jsonl", "best")]
        found = [path for path in paths if path.exists()]
        prefixes = itertools.chain(["previous-"], (f"previous-{n}-" for n in itertools.count(2)))
        free = next(
            prefix
            for prefix in prefixes
            if not any(path.with_name(f"{prefix}{path.name}").exists() for path in found)
        )
        return [path.replace(path.with_name(f"{free}{path.name}")).name for path in found]

    def rewind(self, step: int, begun: int | None = None) -> list[dict[str, Any]]:
        """Removes the lines of steps after `step`, because the resumed run writes them again.

        Otherwise those lines would appear twice. An incomplete last line is removed too. Damaged
        lines are moved to `damaged-metrics.jsonl`, and a warning says so.

        Args:
            step: the last step whose lines stay.
            begun: the first step of the interval in which `step` is, if the run goes on with that
                interval. Lines about a part of it are removed as well.

        Returns:
            The remaining lines of `metrics.jsonl`.
        """
        if self._folder is None:
            return []
        begun = step + 1 if begun is None else begun
        path = self._folder / "metrics.jsonl"
        lines, kept = read_lines(path, step, begun)
        damaged = [line for line in lines if line.endswith("\n") and fields_of(line) is None]
        if damaged:
            with path.with_name("damaged-metrics.jsonl").open("a") as file:
                file.writelines(damaged)
            logging.warning("%d damaged lines of %s are in %s now", len(damaged), path, file.name)
        if kept != lines:
            write_atomically(path, "".join(kept))
        return [json.loads(line) for line in kept]

    def _event_writer(self, folder: pathlib.Path, split: str) -> tf.summary.SummaryWriter:
        if split not in self._events:
            self._events[split] = tf.summary.create_file_writer(str(folder / split))
        return self._events[split]


def read_lines(path: pathlib.Path, step: int, begun: int) -> tuple[list[str], list[str]]:
    """Returns all lines of a `metrics.jsonl`, and those that stay when the run goes back to `step`.

    An incomplete last line, as after a crash, does not stay.
    """
    # What is no UTF-8 is damaged, and is found by its line.
    text = path.read_text(errors="replace") if path.exists() else ""
    lines = [line for line in re.split(r"(?<=\n)", text) if line]
    known = [(line, fields_of(line)) for line in lines if line.endswith("\n")]
    return lines, [line for line, fields in known if fields and stays(fields, step, begun)]


def fields_of(line: str) -> dict[str, Any] | None:
    """Returns the fields of a line of `metrics.jsonl`; None if it is damaged.

    Example:
        >>> fields_of('{"step": 2, "split": "train"}'), fields_of('{"step": 2, "spl')
        ({'step': 2, 'split': 'train'}, None)
    """
    try:
        fields: dict[str, Any] = json.loads(line)
        is_ours = isinstance(fields["step"], int) and isinstance(fields["split"], str)
    except (ValueError, KeyError, TypeError):
        return None
    return fields if is_ours and "\ufffd" not in line else None


def stays(line: Mapping[str, Any], last_step: int, begun: int) -> bool:
    """Returns whether a line of `metrics.jsonl` stays when the run goes back to `last_step`.

    A "recovery" line always stays: it records an earlier rollback.

    Args:
        line: the line's fields.
        last_step: the last step whose lines stay.
        begun: the first step of the interval that the run goes on with.
    """
    if line["split"] == "recovery":
        return True
    return bool(line["step"] <= last_step and (line["step"] < begun or line["split"] not in SUMS))
