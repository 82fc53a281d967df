"""The log of a run: collects the reports of its steps, prints them, and writes them to files."""

import contextlib
import datetime as dt
import json
import math
import pathlib
import time
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import scaling
from scaling.telemetry.record import record_line
from trainer.float8.lines import float8_line
from trainer.log.console import RunConsole
from trainer.log.model_table import (
    VariableRow,
    build_table,
    frozen_parameters,
    total_size,
)
from trainer.log.summary import (
    History,
    Interval,
    Totals,
    TrainSummary,
    format_bytes,
    format_number,
    summarize,
)
from trainer.log.trackers import Trackers
from trainer.log.writers import RunWriters, read_lines
from trainer.step.float8 import Float8Tensor
from trainer.step.report import StepReport, describe_skip, step_of
from trainer.step.xla import COMPILE_MODES


class RunLog:
    """Collects step reports, and logs them. Only `read` and `flush` wait for the device.

    Args:
        model_dir: the folder for the log files; None writes no files.
        style: the style of the console output; see `RunConsole`.
        variable_names: the names of `model.trainable_variables`, to say which gradient overflowed.
        precision: the name of the run's precision, which is written with recorded gradients.
        shares: the number of backward passes per batch (replicas times microbatches), which is
            written with recorded gradients.
        history: the numbers of the run so far, to which this log adds; None begins with none.
        trackers: where the numbers go besides; None for nowhere.
        float8: the float8 tensors, in the order of the reports' float8 fields.
    """

    def __init__(
        self,
        model_dir: pathlib.Path | None,
        style: str,
        variable_names: Sequence[str] = (),
        precision: str = "float32",
        shares: int = 1,
        history: History | None = None,
        trackers: Trackers | None = None,
        float8: Sequence[Float8Tensor] = (),
    ) -> None:
        """Creates the writers and the console, and starts the clock."""
        self.writers = RunWriters(model_dir)
        self.console = RunConsole(style)
        self.history = History() if history is None else history
        self.trackers = trackers or Trackers()
        self._precision = precision
        self._shares = shares
        self._variable_names = list(variable_names)
        self._float8 = float8
        # Reports since the last log line. From index `_unread` on, their fields are still tensors.
        self._reports: list[StepReport] = []
        self._unread = 0  # index of the first report that has not been read from the device
        self._untimed = 0  # number of reports that were added before the clock was restarted
        self._clock_start = time.perf_counter()
        self._loss_scale = math.nan  # loss scale of the last step that was read

    @property
    def unlogged(self) -> tuple[list[StepReport], int, float]:
        """Reports of an interval that has not ended, how many were read, and the last scale."""
        return self._reports, self._unread, self._loss_scale

    def go_on_with(self, unlogged: tuple[list[StepReport], int, float]) -> None:
        """Takes over an interval in which an error has ended a call to `train`.

        The metrics go on with it, too.
        """
        self._reports, self._unread, self._loss_scale = unlogged
        self._untimed = len(self._reports)

    def say(self, line: str) -> None:
        """Prints a line, unless the run is quiet or its output pipe is closed."""
        self.console.say(line)

    def log_start(
        self, name: str, step: int, settings: Mapping[str, Any], rows: Sequence[VariableRow]
    ) -> None:
        """Logs the model and the settings when a process starts or resumes a run.

        Args:
            name: the name of the trainer.
            step: the step that the run has reached.
            settings: the settings of the run, as JSON types.
            rows: the variables of the model.
        """
        self.console.print_table(build_table(rows, detailed=self.console.detailed))
        parameters, size = total_size(rows)
        frozen = frozen_parameters(rows)
        apart = f" ({frozen:,} frozen)" if frozen else ""
        self.say(
            f"{name}: {parameters:,} parameters{apart}, {format_bytes(size)}; "
            f"{format_settings(settings)}"
        )
        written = {key: value for key, value in settings.items() if key != "pipeline"}
        self.writers.write_line(
            {
                "step": step,
                "split": "run",
                "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                "settings": written,
                "model": [row._asdict() for row in rows],
            }
        )

    def log_end(self, summary: TrainSummary, target: int) -> None:
        """Logs the end of a call to `train`; prints the names of the log files, and the summary."""
        fields = {"seconds": summary.seconds, "stopped": summary.step < target}
        self.log_event("end", summary.step, fields)
        files = self.writers.describe_files()
        if files:
            self.say(files)
        self.say(str(summary))

    def log_failure(self, step: int, error: Exception) -> None:
        """Logs the error with which a call to `train` ended.

        A full disk may be that error, so a line that cannot be written is left out.
        """
        text = " ".join(f"{type(error).__name__}: {error}".split())  # on one line
        with contextlib.suppress(OSError, tf.errors.OpError):
            self.log_event("failure", step, {"error": text})

    def add(self, report: StepReport, step: int, *, compiling: bool) -> None:
        """Adds the report of one inner loop, without reading it from the device.

        Args:
            report: the report; each field has shape (steps,).
            step: the last step of the loop.
            compiling: whether the loop also traced and compiled. If so, it is not timed, because
                its duration says nothing about the speed of a step.
        """
        self._reports.append(report)
        self.console.advance(step)
        if compiling:
            self.restart_clock()

    def read(self) -> StepReport | None:
        """Reads the new reports from the device; logs each skip, retry and new loss scale.

        Returns:
            The new reports, each field a NumPy array of shape (steps,), or None if there are none.
        """
        new = [StepReport(*(field.numpy() for field in r)) for r in self._reports[self._unread :]]
        self._reports[self._unread :] = new
        if new and self._unread and shapes(self._reports[self._unread - 1]) != shapes(new[0]):
            del self._reports[: self._unread]  # a resumed run records gradients now, or no longer
            self._untimed = max(0, self._untimed - self._unread)
        self._unread = len(self._reports)
        if not any(report.step.size for report in new):
            return None
        steps = concatenate(new)
        previous = np.concatenate([[self._loss_scale], steps.loss_scale[:-1]])
        self._loss_scale = steps.loss_scale[-1]
        scale_changed = steps.loss_scale != previous
        for index in np.flatnonzero(~steps.grads_finite | scale_changed | (steps.retries > 0)):
            self._log_step(step_of(steps, int(index)), scale_changed=scale_changed[index])
        return steps

    @property
    def pending(self) -> bool:
        """Whether there are steps that `flush` has not logged yet."""
        return any(report.step.shape[0] for report in self._reports)

    def unfinished(self) -> dict[str, np.ndarray] | None:
        """Returns the reports since the last log line, for a checkpoint; None if there are none.

        A resumed run passes them to `rewind`. Its next line then says of the whole interval what
        the line of a run that never stopped says.
        """
        steps = concatenate(self._reports) if self.pending else None
        return None if steps is None else steps._asdict()

    @property
    def any_applied(self) -> bool:
        """Whether a step since the last log line was applied. Call `read` first."""
        return any(report.grads_finite.any() for report in self._reports)

    def flush(
        self,
        target: int,
        totals: Totals,
        metrics: Mapping[str, float],
        learning_rates: Mapping[str, float] = types.MappingProxyType({}),
    ) -> Interval:
        """Logs and returns a summary of the steps since the last call. Call `read` first.

        Args:
            target: the step at which the run ends.
            totals: the totals of the whole run.
            metrics: the values of the training metrics since the last call.
            learning_rates: the learning rates of the last update, keyed by name.
        """
        steps, timed = concatenate(self._reports), self._reports[self._untimed :]
        seconds = time.perf_counter() - self._clock_start
        timed_steps = concatenate(timed) if timed else None
        interval = summarize(steps, totals, metrics, timed_steps, seconds, learning_rates)
        self.console.show_interval(interval, target, totals)
        self._write_scalars("train", interval.step, interval.scalars())
        if steps.magnitude_counts.size:
            self.writers.write_line(record_line(steps, self._precision, self._shares))
            self._write_underflow(steps)
        if line := float8_line(steps, self._float8):
            self.writers.write_line(line)
        self._reports, self._unread, self._untimed = [], 0, 0
        self._clock_start = time.perf_counter()
        return interval

    def _log_step(self, report: StepReport, *, scale_changed: bool) -> None:
        """Logs a step that was skipped or retried, or has another loss scale than the last one."""
        step, loss_scale = int(report.step), float(report.loss_scale)
        if scale_changed:
            self.writers.write_line({"step": step, "split": "scale", "loss_scale": loss_scale})
        if report.retries:
            self.writers.write_line(
                {"step": step, "split": "retry", "retries": int(report.retries)}
            )
        if report.grads_finite:
            return
        variable, replica = int(report.bad_variable), int(report.bad_replica)
        cause = scaling.Cause(int(report.cause)).name.lower()
        self.writers.write_line(
            {
                "step": step,
                "split": "skip",
                "loss_scale": loss_scale,
                "cause": cause,
                "variable": self._variable_names[variable] if variable >= 0 else None,
                "replica": replica if replica >= 0 else None,
                "inf_count": int(report.inf_count),
                "nan_count": int(report.nan_count),
            }
        )
        self.writers.write_tensorboard("train", step, {f"skips/{cause}": loss_scale})
        if self.console.detailed:
            self.say(f"step {step} skipped: {describe_skip(report, self._variable_names)}")

    def _write_underflow(self, steps: StepReport) -> None:
        """Writes each variable's fraction of underflow, averaged over the applied steps."""
        if not steps.grads_finite.any():
            return
        means = steps.underflow[steps.grads_finite].mean(axis=0)
        states = {int(at) for each in self._float8 for at in (each.scale, each.history) if at}
        shares = {
            name: float(means[at])
            for at, name in enumerate(self._variable_names)
            if at not in states  # scales and histories of float8 have no gradient
        }
        step = int(steps.step[-1])
        self.writers.write_line({"step": step, "split": "underflow", "share": shares})
        curves = {f"underflow/{name}": share for name, share in shares.items()}
        self.writers.write_tensorboard("train", step, curves)

    def log_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Prints and writes the results of an evaluation during training."""
        self.say(f"validation at step {step}: {format_results(results)}")
        self._write_scalars("validation", step, results)

    def _write_scalars(self, split: str, step: int, scalars: Mapping[str, float]) -> None:
        """Writes numbers to the history, the files and the trackers."""
        self.history.add(split, step, scalars)
        self.writers.write_scalars(split, step, scalars)
        self.trackers.write_scalars(split, step, scalars)

    def restart_clock(self) -> None:
        """Restarts timing: the reported speed will cover only steps that begin after this call."""
        self._untimed, self._clock_start = len(self._reports), time.perf_counter()

    def set_aside(self) -> None:
        """Renames the files of a run that left no checkpoint, because this run begins anew."""
        if names := self.writers.set_aside():
            self.say(f"the folder holds no checkpoint; the earlier run is in {', '.join(names)}")

    def rewind(
        self,
        step: int,
        model_dir: pathlib.Path | None,
        unfinished: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Goes back to a step: removes the lines of later steps, which the run will write again.

        Args:
            step: the step to go back to.
            model_dir: the folder of the run, from which workers without log files read the history.
            unfinished: what `unfinished` returned at that step. A line that a run wrote about a
                part of this interval, because it was asked to stop, is removed too.
        """
        begun = self._take_up(step, unfinished)
        lines = self.writers.rewind(step, begun)
        if not lines and model_dir:
            lines = [*map(json.loads, read_lines(model_dir / "metrics.jsonl", step, begun)[1])]
        self.history.read(lines)
        scales = [line for line in lines if line["split"] == "scale"]
        self._loss_scale = scales[-1]["loss_scale"] if scales else math.nan

    def roll_back(self, step: int, unfinished: Mapping[str, np.ndarray] | None) -> int:
        """Goes back to a step in the same process.

        The lines of later steps stay in `metrics.jsonl`, in which a line says that they were
        undone.

        Args:
            step: the step to go back to.
            unfinished: what `unfinished` returned at that step.

        Returns:
            The first step of the interval that the next log line will be about.
        """
        begun = self._take_up(step, unfinished)
        self.history.rewind(step, begun)
        self._loss_scale = math.nan  # so that the next step's is written: its line may be undone
        return begun

    def _take_up(self, step: int, unfinished: Mapping[str, np.ndarray] | None) -> int:
        """Goes on with an interval that had not ended at `step`; returns its first step."""
        self._reports, self._unread, self._untimed = [], 0, 0
        if not unfinished or set(unfinished) != set(StepReport._fields):  # of another version
            return step + 1
        self._reports, self._unread, self._untimed = [StepReport(**unfinished)], 1, 1
        return int(unfinished["step"][0])

    def log_event(self, split: str, step: int, fields: Mapping[str, object]) -> None:
        """Appends a line about a single event to `metrics.jsonl`; prints nothing."""
        self.writers.write_line({"step": step, "split": split, **fields})


def shapes(report: StepReport) -> list[tuple[int, ...]]:
    """Returns the shape of each field, without the number of steps."""
    return [tuple(field.shape[1:]) for field in report]


def concatenate(reports: Sequence[StepReport]) -> StepReport:
    """Returns the reports of several loops as one, each field a NumPy array of shape (steps,)."""
    if len(reports) == 1:
        return reports[0]
    return StepReport(*(np.concatenate(field) for field in zip(*reports, strict=True)))


def format_settings(settings: Mapping[str, Any]) -> str:
    """Returns the most important settings of a run as text."""
    rule = settings["loss_scale"].split("(")[0]
    replicas = settings["num_replicas"]
    parts = [settings["precision"], rule]
    # `train_on_batch` takes batches of any size.
    parts += [f"global batch {settings['global_batch']}"] if "global_batch" in settings else []
    parts += [f"on {replicas} replicas of {settings['strategy']}"] if replicas > 1 else []
    compiled = settings["jit_compile"]
    parts += [f"XLA compiles {COMPILE_MODES[compiled]}"] if compiled else []
    return ", ".join(parts)


def format_results(results: Mapping[str, float]) -> str:
    """Returns the results of an evaluation as text.

    Example:
        >>> format_results({"loss": 0.05, "accuracy": 0.98765})
        'loss 0.0500  accuracy 0.9877'
    """
    return "  ".join(f"{name} {format_number(value)}" for name, value in results.items())
