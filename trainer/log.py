"""A run's log: collects step reports, prints lines for people, writes numbers for programs.

TensorBoard reads `model_dir/train` and `model_dir/validation` as two curves. The same
numbers stand in `model_dir/metrics.jsonl`, one JSON object a line, where NaN becomes null.
"""

import json
import math
import pathlib
import time
from typing import Any

import numpy as np
import tensorflow as tf

from scaling.record import record_line
from trainer.report import StepReport, Totals, progress_line, summarize

# What makes TensorBoard draw a number as a curve. `tf.summary.scalar` would write the same, but
# needs the tensorboard package, which only those who look need to have.
SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"), data_class=1
)


class RunLog:
    """Holds the reports that nobody has read yet. Only `flush` waits for the device.

    Args:
        model_dir: where files go; None writes none.
        verbose: whether to print.
        precision: the run's, for who reads its gradients.
        shares: into how many shares a batch is cut, for the same.
    """

    def __init__(
        self,
        model_dir: pathlib.Path | None,
        verbose: bool,
        precision: str = "float32",
        shares: int = 1,
    ) -> None:
        """Opens nothing yet; files appear with the first numbers."""
        self._model_dir = model_dir
        self._precision = precision
        self._shares = shares
        self._verbose = verbose
        self._events: dict[str, tf.summary.SummaryWriter] = {}
        self._reports: list[StepReport] = []
        self._untimed = 0  # reports at the front from before the clock was started
        self._began = time.perf_counter()

    def say(self, line: str) -> None:
        """Prints a line, unless the run is to be quiet."""
        if self._verbose:
            print(line, flush=True)

    def add(self, report: StepReport, *, compiling: bool) -> None:
        """Takes the report of one inner loop, without reading it.

        Args:
            report: each field of shape (steps,).
            compiling: whether that loop also traced and compiled, so that its time says
                nothing about the speed of a step.
        """
        self._reports.append(report)
        if compiling:
            self._untimed = len(self._reports)
            self._began = time.perf_counter()

    def flush(self, target: int, totals: Totals, metrics: dict[str, float]) -> StepReport:
        """Reads, prints and writes what has come in since the last time; something must have.

        Args:
            target: the step the run is to reach.
            totals: of the whole run.
            metrics: the values of the training metrics since the last time.

        Returns:
            The steps' reports, each field a NumPy array of shape (steps,).
        """
        steps = StepReport(*(np.concatenate(field) for field in zip(*self._reports, strict=True)))
        timed = sum(int(np.sum(report.examples)) for report in self._reports[self._untimed :])
        seconds = time.perf_counter() - self._began
        interval = summarize(steps, totals, metrics, timed / seconds if timed else math.nan)
        self.say(progress_line(interval, target, totals))
        self.write("train", interval.step, interval.scalars())
        if steps.magnitude_counts.size:
            self._append(record_line(steps, self._precision, self._shares))
        self._reports, self._untimed, self._began = [], 0, time.perf_counter()
        return steps

    def evaluation(self, step: int, results: dict[str, float]) -> None:
        """Prints and writes the results of an evaluation during training."""
        self.say(f"validation at step {step}: {describe(results)}")
        self.write("validation", step, results)
        self._untimed, self._began = len(self._reports), time.perf_counter()

    def write(self, split: str, step: int, scalars: dict[str, float]) -> None:
        """Writes the scalars of one step to the files of "train" or "validation"."""
        if self._model_dir is None:
            return
        if split not in self._events:
            self._events[split] = tf.summary.create_file_writer(str(self._model_dir / split))
        with self._events[split].as_default(step):
            for name, value in scalars.items():
                tf.summary.write(name, np.float32(value), metadata=SCALAR)
        self._events[split].flush()
        numbers = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._append({"step": step, "split": split, **numbers})

    def _append(self, line: dict[str, Any]) -> None:
        """Adds a line to `metrics.jsonl`, if there is a `model_dir`."""
        if self._model_dir is not None:
            with (self._model_dir / "metrics.jsonl").open("a") as lines:
                lines.write(json.dumps(line) + "\n")


def describe(results: dict[str, float]) -> str:
    """Returns results as a person reads them.

    Example:
        >>> describe({"loss": 0.05, "accuracy": 0.98765})
        'loss 0.0500  accuracy 0.9877'
    """
    return "  ".join(f"{name} {value:.4f}" for name, value in results.items())
