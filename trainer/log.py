"""A run's log: collects step reports, prints lines for people, writes numbers for programs.

TensorBoard reads `model_dir/train` and `model_dir/validation` as two curves. The same
numbers stand in `model_dir/metrics.jsonl`, one JSON object a line, where NaN becomes null.
"""

import json
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import scaling
from scaling.record import record_line
from trainer.liveness import step_of
from trainer.step.report import StepReport
from trainer.summary import Totals, progress_line, summarize

# What makes TensorBoard draw a number as a curve. `tf.summary.scalar` would write the same, but
# needs the tensorboard package, which only those who look need to have.
SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"), data_class=1
)


class RunLog:
    """Holds the reports that nobody has read yet. Only `read` and `flush` wait for the device.

    Args:
        model_dir: where files go; None writes none.
        verbose: whether to print.
        variable_names: of `model.trainable_variables`, to say where a step went wrong.
        precision: the run's, for who reads its gradients.
        shares: into how many shares a batch is cut, for the same.
    """

    def __init__(
        self,
        model_dir: pathlib.Path | None,
        verbose: bool,
        variable_names: Sequence[str] = (),
        precision: str = "float32",
        shares: int = 1,
    ) -> None:
        """Opens nothing yet; files appear with the first numbers."""
        self._model_dir = model_dir
        self._precision = precision
        self._shares = shares
        self._verbose = verbose
        self._variable_names = variable_names
        self._events: dict[str, tf.summary.SummaryWriter] = {}
        self._reports: list[StepReport] = []
        self._unread = 0  # the first report that is still the device's
        self._untimed = 0  # reports at the front from before the clock was started
        self._began = time.perf_counter()

    def say(self, line: str) -> None:
        """Prints a line, unless the run is to be quiet, or whoever read its output has gone."""
        if self._verbose:
            try:
                print(line, flush=True)
            except BrokenPipeError:
                self._verbose = False

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

    def read(self) -> StepReport | None:
        """Reads what has come in since the last time, and writes a line for each skip.

        Returns:
            The new steps' reports, each field a NumPy array of shape (steps,), or None.
        """
        new = [StepReport(*(field.numpy() for field in r)) for r in self._reports[self._unread :]]
        self._reports[self._unread :] = new
        self._unread = len(self._reports)
        if not any(report.step.size for report in new):
            return None
        steps = joined(new)
        for place in np.flatnonzero(~steps.grads_finite):
            self._append(self._skip_line(step_of(steps, place)))
        return steps

    @property
    def pending(self) -> bool:
        """Whether `flush` has anything to write."""
        return any(report.step.shape[0] for report in self._reports)

    def flush(self, target: int, totals: Totals, metrics: dict[str, float]) -> None:
        """Prints and writes what has been read since the last time; something must have.

        Args:
            target: the step the run is to reach.
            totals: of the whole run.
            metrics: the values of the training metrics since the last time.
        """
        steps = joined(self._reports)
        timed = sum(int(np.sum(report.examples)) for report in self._reports[self._untimed :])
        seconds = time.perf_counter() - self._began
        interval = summarize(steps, totals, metrics, timed / seconds if timed else math.nan)
        self.say(progress_line(interval, target, totals))
        self.write("train", interval.step, interval.scalars())
        if steps.magnitude_counts.size:
            self._append(record_line(steps, self._precision, self._shares))
        self._reports, self._unread, self._untimed = [], 0, 0
        self._began = time.perf_counter()

    def _skip_line(self, report: StepReport) -> dict[str, Any]:
        """Returns what `metrics.jsonl` keeps of a skipped step."""
        variable, replica = int(report.bad_variable), int(report.bad_replica)
        return {
            "step": int(report.step),
            "split": "skip",
            "loss_scale": float(report.loss_scale),
            "cause": scaling.Cause(int(report.cause)).name.lower(),
            "variable": self._variable_names[variable] if variable >= 0 else None,
            "replica": replica if replica >= 0 else None,
            "inf_count": int(report.inf_count),
            "nan_count": int(report.nan_count),
        }

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

    def event(self, kind: str, step: int, facts: dict[str, Any]) -> None:
        """Writes a line about something that happened once, for programs."""
        self._append({"step": step, "split": kind, **facts})

    def rewind(self, step: int) -> None:
        """Removes the lines of later steps, which a run that is taken up again will take anew.

        So a step has its lines once, whatever happened. A line that was cut off goes, too.
        """
        path = self._model_dir / "metrics.jsonl" if self._model_dir else None
        if path is None or not path.exists():
            return
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and is_of(line, step)]
        if kept != lines:
            unfinished = path.with_name(path.name + ".tmp")
            unfinished.write_text("".join(kept))
            unfinished.replace(path)

    def _append(self, line: dict[str, Any]) -> None:
        """Adds a line to `metrics.jsonl`, if there is a `model_dir`."""
        if self._model_dir is not None:
            self._model_dir.mkdir(parents=True, exist_ok=True)
            with (self._model_dir / "metrics.jsonl").open("a") as lines:
                lines.write(json.dumps(line) + "\n")


def is_of(line: str, last: int) -> bool:
    """Returns whether a line of `metrics.jsonl` is to stay when the run goes back to step `last`.

    That the run was taken back before is not forgotten by it.
    """
    try:
        facts = json.loads(line)
    except ValueError:  # it was cut off, and another process wrote on
        return False
    return facts["step"] <= last or facts["split"] == "recovery"


def joined(reports: list[StepReport]) -> StepReport:
    """Returns several loops' reports as one, each field a NumPy array of shape (steps,)."""
    return StepReport(*(np.concatenate(field) for field in zip(*reports, strict=True)))


def describe(results: dict[str, float]) -> str:
    """Returns results as a person reads them.

    Example:
        >>> describe({"loss": 0.05, "accuracy": 0.98765})
        'loss 0.0500  accuracy 0.9877'
    """
    return "  ".join(f"{name} {value:.4f}" for name, value in results.items())
