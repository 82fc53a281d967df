"""The console output of a run: a progress bar on a terminal, plain log lines anywhere else."""

import contextlib
import datetime as dt
import importlib.util
import math
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from trainer.log.summary import ENDLESS, Interval, Totals, format_number, power_of_two

STYLES = ("quiet", "normal", "detailed")
CENTURY = 100 * 365 * 86_400  # seconds; of longer waits nothing is shown
PATIENCE = 2.0  # seconds of silence, after which `busy` says what takes so long
WIDTH = 1000  # columns of a table at most when the output is not a terminal: no name is broken


class RunConsole:
    """Prints the progress of a run. Never waits for the device.

    Args:
        style: "quiet" prints nothing. "normal" shows a progress bar on a terminal and log lines
            anywhere else. "detailed" prints log lines on a terminal too, and describes each
            skipped step.
    """

    def __init__(self, style: str) -> None:
        """Creates the console, and the progress bar that `progress_bar` shows."""
        self.detailed = style == "detailed"
        # In a notebook, Rich draws the bar with ipywidgets. Without it, log lines are printed as
        # text, because Rich would make a block of HTML of each one.
        widgets = importlib.util.find_spec("ipywidgets") is not None
        # With FORCE_COLOR set, as in CI and in the kernels of notebooks, Rich treats even a pipe as
        # a terminal, and would write every redraw of the bar into the log.
        self._console = PipeSafeConsole(
            quiet=style == "quiet",
            highlight=False,
            force_terminal=None if is_terminal(sys.stdout) else False,
            force_jupyter=None if widgets else False,
        )
        if not self._console.is_terminal:
            self._console.width = WIDTH
        self._draws = self._console.is_terminal or self._console.is_jupyter
        columns = (
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._bar = Progress(*columns, console=self._console, speed_estimate_period=600)
        self._status = Text()  # the line below the bar
        self._bar_is_shown = False

    def say(self, line: str) -> None:
        """Prints a line, above the progress bar if there is one. Lines wrap only on a terminal."""
        is_file = not self._console.is_terminal
        self._console.print(line, markup=False, emoji=False, soft_wrap=is_file)

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """Context manager: prints a line if the `with` block takes longer than `PATIENCE`."""
        timer = threading.Timer(PATIENCE, self.say, [text])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def print_table(self, table: Table) -> None:
        """Prints a table."""
        self._console.print(table)

    @contextlib.contextmanager
    def progress_bar(self, step: int, target: int) -> Iterator[None]:
        """Context manager: shows a progress bar at the bottom of a terminal, or in a notebook.

        The last state of the bar stays there.

        Args:
            step: the step to start from.
            target: the step at which the run ends.
        """
        if self._console.quiet or not self._draws:
            yield
            return
        for previous in self._bar.task_ids:
            self._bar.remove_task(previous)
        self._bar.add_task("", total=target, completed=step)
        self._status.plain = "tracing and compiling the step ..."
        with Live(Group(self._bar, self._status), console=self._console, refresh_per_second=4):
            self._bar_is_shown = True
            try:
                yield
            finally:
                self._bar_is_shown = False

    def advance(self, step: int) -> None:
        """Moves the progress bar to a step, if there is a bar."""
        for task in self._bar.task_ids:
            self._bar.update(task, completed=step)

    @contextlib.contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Context manager: shows a message below the progress bar inside the `with` block."""
        previous, self._status.plain = self._status.plain, text
        try:
            yield
        finally:
            self._status.plain = previous

    def show_interval(self, interval: Interval, target: int, totals: Totals) -> None:
        """Shows the values of the latest steps below the progress bar, or prints a log line."""
        self._status.plain = format_values(interval, totals)
        if not self._bar_is_shown or self.detailed:
            self.say(format_log_line(interval, target, totals))


class PipeSafeConsole(Console):
    """A console that goes quiet when its output pipe is closed.

    By default, Rich ends the process when that happens. A training run must continue, because it
    still has files to write.
    """

    def on_broken_pipe(self) -> None:
        """Stops printing."""
        self.quiet = True


def is_terminal(stream: Any) -> bool:
    """Returns whether a stream is a terminal. None and a closed stream, as in a daemon, are not."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def resolve_style(verbose: bool | str, *, shown: bool = True) -> str:
    """Returns the console style for a value of `verbose`; see `RunConsole`.

    Args:
        verbose: True for "normal", False for "quiet", or the name of a style.
        shown: whether this process prints at all.

    Raises:
        ValueError: if `verbose` is neither a bool nor a style.
    """
    style = {True: "normal", False: "quiet"}[verbose] if isinstance(verbose, bool) else verbose
    if style not in STYLES:
        raise ValueError(f'`verbose` must be True, False or "detailed"; got {verbose!r}')
    return style if shown else "quiet"


def format_log_line(interval: Interval, target: int, totals: Totals) -> str:
    """Returns the log line for an interval.

    Args:
        interval: the steps since the previous log line.
        target: the step at which the run ends; `ENDLESS` if nobody knows.
        totals: the totals of the whole run.

    Example:
        >>> from trainer.log.summary import Interval, Totals
        >>> interval = Interval(20, 0.25, 0.0, 1.0, 2.0**21, 17, 3, 5120.0, 80.0, 0.02, {})
        >>> format_log_line(interval, 600, Totals(17, {"backward": 3}))[:62]
        'step  20/600   3%  loss 0.2500  loss_scale 2^21  3 skipped (3 '
    """
    if target == ENDLESS:
        return f"step {interval.step}  {format_values(interval, totals)}"
    width, steps_left = len(str(target)), target - interval.step
    speed = interval.steps_per_second
    seconds = steps_left / speed if speed > 0 else math.inf
    time_left = dt.timedelta(seconds=round(seconds)) if 0 < seconds < CENTURY else None
    return (
        f"step {interval.step:>{width}}/{target} {interval.step / target:4.0%}  "
        + format_values(interval, totals)
        + (f"  {time_left} left" if time_left is not None else "")
    )


def format_values(interval: Interval, totals: Totals) -> str:
    """Returns the values of an interval as one line of text.

    Example:
        >>> from trainer.log.summary import Interval, Totals
        >>> interval = Interval(20, 0.25, 0.0, 1.0, 2.0**21, 19, 1, 512.0, 8.0, 0.02, {})
        >>> format_values(interval, Totals(19, {"backward": 1}))
        'loss 0.2500  loss_scale 2^21  1 skipped (1 backward)  512 examples/s  2% waiting for data'
    """
    means = {"loss": interval.loss, **interval.metrics}
    values = [
        f"{name} -     " if math.isnan(value) else f"{name} {format_number(value)}"
        for name, value in means.items()
    ]
    speed = (
        []
        if math.isnan(interval.examples_per_second)
        else [
            f"{interval.examples_per_second:,.0f} examples/s",
            f"{interval.data_wait:.0%} waiting for data",
        ]
    )
    return "  ".join(
        [*values, f"loss_scale {power_of_two(interval.loss_scale)}", str(totals), *speed]
    )
