"""A run's log: collects step reports, and tells people and programs what stands in them."""

import contextlib
import datetime as dt
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import scaling
from scaling.telemetry.record import record_line
from trainer.log.console import RunConsole
from trainer.log.model_table import Row, as_markdown, table_of, total_of
from trainer.log.summary import Totals, TrainSummary, size, summarize
from trainer.log.writers import RunWriters
from trainer.step.report import StepReport, describe_skip, step_of
from trainer.step.xla import COMPILE_MODES


class RunLog:
    """Holds the reports that nobody has read yet. Only `read` and `flush` wait for the device.

    Args:
        model_dir: where files go; None writes none.
        style: of the screen: see `RunConsole`.
        variable_names: of `model.trainable_variables`, to say where a step went wrong.
        precision: the run's, for who reads its gradients.
        shares: into how many shares a batch is cut, for the same.
    """

    def __init__(
        self,
        model_dir: pathlib.Path | None,
        style: str,
        variable_names: Sequence[str] = (),
        precision: str = "float32",
        shares: int = 1,
    ) -> None:
        """Opens nothing yet; files appear with the first numbers."""
        self.writers = RunWriters(model_dir)
        self.console = RunConsole(style)
        self._precision = precision
        self._shares = shares
        self._variable_names = list(variable_names)
        self._reports: list[StepReport] = []
        self._unread = 0  # the first report that is still the device's
        self._untimed = 0  # reports at the front from before the clock was started
        self._began = time.perf_counter()
        self._loss_scale = math.nan  # of the last step that was read

    def say(self, line: str) -> None:
        """Prints a line, unless the run is to be quiet, or whoever read its output has gone."""
        self.console.say(line)

    def following(self, step: int, target: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which a terminal shows how far the run is; see `RunConsole`."""
        return self.console.following(step, target)

    def introduce(
        self, name: str, step: int, settings: dict[str, Any], rows: Sequence[Row]
    ) -> None:
        """Tells, when a process starts with a run, what is trained, and how.

        Args:
            name: of the trainer.
            step: where the run stands.
            settings: what does not change on the way.
            rows: of the model.
        """
        self.console.draw(table_of(rows, detailed=self.console.detailed))
        parameters, taken = total_of(rows)
        self.say(f"{name}: {parameters:,} parameters, {size(taken)}; {in_words(settings)}")
        shown = {name: value for name, value in settings.items() if name != "pipeline"}
        self.writers.line(
            {
                "step": step,
                "split": "run",
                "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                "settings": shown,
                "model": [row._asdict() for row in rows],
            }
        )
        self.writers.text("run", step, as_markdown(shown, rows))

    def conclude(self, summary: TrainSummary, target: int) -> None:
        """Tells how a call of `train` ended, and where its files are."""
        facts = {"seconds": summary.seconds, "stopped": summary.step < target}
        self.event("end", summary.step, facts)
        written = self.writers.written()
        if written:
            self.say(written)
        self.say(str(summary))

    def add(self, report: StepReport, step: int, *, compiling: bool) -> None:
        """Takes the report of one inner loop, without reading it.

        Args:
            report: each field of shape (steps,).
            step: the last of them.
            compiling: whether that loop also traced and compiled, so that its time says
                nothing about the speed of a step.
        """
        self._reports.append(report)
        self.console.advance(step)
        if compiling:
            self.restart_clock()

    def read(self) -> StepReport | None:
        """Reads what has come in since the last time; tells of each skip and each new scale.

        Returns:
            The new steps' reports, each field a NumPy array of shape (steps,), or None.
        """
        new = [StepReport(*(field.numpy() for field in r)) for r in self._reports[self._unread :]]
        self._reports[self._unread :] = new
        self._unread = len(self._reports)
        if not any(report.step.size for report in new):
            return None
        steps = joined(new)
        before = np.concatenate([[self._loss_scale], steps.loss_scale[:-1]])
        self._loss_scale = steps.loss_scale[-1]
        for place in np.flatnonzero(~steps.grads_finite | (steps.loss_scale != before)):
            self._tell(step_of(steps, int(place)), moved=steps.loss_scale[place] != before[place])
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
        steps, timed = joined(self._reports), self._reports[self._untimed :]
        seconds = time.perf_counter() - self._began
        interval = summarize(steps, totals, metrics, joined(timed) if timed else None, seconds)
        self.console.progress(interval, target, totals)
        self.writers.numbers("train", interval.step, interval.scalars())
        if steps.magnitude_counts.size:
            self.writers.line(record_line(steps, self._precision, self._shares))
            self._tell_underflow(steps)
        self._reports, self._unread, self._untimed = [], 0, 0
        self._began = time.perf_counter()

    def _tell(self, report: StepReport, *, moved: bool) -> None:
        """Tells of a step whose loss scale is another than before, or which was skipped."""
        step, loss_scale = int(report.step), float(report.loss_scale)
        if moved:
            self.writers.line({"step": step, "split": "scale", "loss_scale": loss_scale})
        if report.grads_finite:
            return
        variable, replica = int(report.bad_variable), int(report.bad_replica)
        cause = scaling.Cause(int(report.cause)).name.lower()
        self.writers.line(
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
        self.writers.curves("train", step, {f"skips/{cause}": loss_scale})
        if self.console.detailed:
            self.say(f"step {step} skipped: {describe_skip(report, self._variable_names)}")

    def _tell_underflow(self, steps: StepReport) -> None:
        """Writes each variable's share of underflow, over the applied steps."""
        if not steps.grads_finite.any():
            return
        means = steps.underflow[steps.grads_finite].mean(axis=0)
        shares = {name: float(mean) for name, mean in zip(self._variable_names, means, strict=True)}
        step = int(steps.step[-1])
        self.writers.line({"step": step, "split": "underflow", "share": shares})
        curves = {f"underflow/{name}": share for name, share in shares.items()}
        self.writers.curves("train", step, curves)

    def evaluation(self, step: int, results: dict[str, float]) -> None:
        """Prints and writes the results of an evaluation during training."""
        self.say(f"validation at step {step}: {describe(results)}")
        self.writers.numbers("validation", step, results)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves what has happened since the last step out of the speed of those to come."""
        self._untimed, self._began = len(self._reports), time.perf_counter()

    def rewind(self, step: int) -> None:
        """Goes back to a step: lines of later ones are removed, since they will come anew."""
        scales = [line for line in self.writers.rewind(step) if line["split"] == "scale"]
        self._loss_scale = scales[-1]["loss_scale"] if scales else math.nan

    def event(self, kind: str, step: int, facts: dict[str, Any]) -> None:
        """Writes a line about something that happened once, for programs."""
        self.writers.line({"step": step, "split": kind, **facts})


def joined(reports: list[StepReport]) -> StepReport:
    """Returns several loops' reports as one, each field a NumPy array of shape (steps,)."""
    return StepReport(*(np.concatenate(field) for field in zip(*reports, strict=True)))


def in_words(settings: dict[str, Any]) -> str:
    """Returns what a person wants to see of a run's settings."""
    rule = settings["loss_scale"].split("(")[0]
    replicas = settings["num_replicas"]
    parts = [settings["precision"], rule, f"global batch {settings['global_batch']}"]
    parts += [f"on {replicas} replicas of {settings['strategy']}"] if replicas > 1 else []
    compiled = settings["jit_compile"]
    parts += [f"XLA compiles {COMPILE_MODES[compiled]}"] if compiled else []
    return ", ".join(parts)


def describe(results: dict[str, float]) -> str:
    """Returns results as a person reads them.

    Example:
        >>> describe({"loss": 0.05, "accuracy": 0.98765})
        'loss 0.0500  accuracy 0.9877'
    """
    return "  ".join(f"{name} {value:.4f}" for name, value in results.items())
