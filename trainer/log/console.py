"""What a person watches: a bar on a terminal, and lines anywhere else."""

import contextlib
import datetime as dt
import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from trainer.log.summary import Interval, Totals, power_of_two

STYLES = ("quiet", "normal", "detailed")
WIDTH = 100  # of tables where there is no terminal


class RunConsole:
    """Shows a run. Nothing here waits for the device.

    Args:
        style: "quiet" shows nothing; "normal" a bar on a terminal, or else lines; "detailed"
            the lines on a terminal, too.
    """

    def __init__(self, style: str) -> None:
        """Shows nothing yet."""
        self.detailed = style == "detailed"
        self._console = OurConsole(quiet=style == "quiet", highlight=False)
        if not self._console.is_terminal:
            self._console.width = WIDTH
        columns = (
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._bar = Progress(*columns, console=self._console, speed_estimate_period=600)
        self._below = Text()
        self._running = False

    def say(self, line: str) -> None:
        """Prints a line; above the bar if there is one. Only a terminal wraps it."""
        whole = not self._console.is_terminal
        self._console.print(line, markup=False, emoji=False, soft_wrap=whole)

    def draw(self, table: Any) -> None:
        """Prints a table of rich's."""
        self._console.print(table)

    @contextlib.contextmanager
    def following(self, step: int, target: int) -> Iterator[None]:
        """Within, a bar stands at the bottom of a terminal; its last state stays there.

        Args:
            step: where the run stands.
            target: the step it is to reach.
        """
        if self._console.quiet or not self._console.is_terminal:
            yield
            return
        for old in self._bar.task_ids:
            self._bar.remove_task(old)
        self._bar.add_task("", total=target, completed=step)
        self._below.plain = "tracing and compiling the step ..."
        shown = Group(self._bar, self._below)
        with Live(shown, console=self._console, refresh_per_second=4):
            self._running = True
            try:
                yield
            finally:
                self._running = False

    def advance(self, step: int) -> None:
        """Moves the bar, if there is one."""
        for task in self._bar.task_ids:
            self._bar.update(task, completed=step)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Within, says below the bar what takes its time just now."""
        before, self._below.plain = self._below.plain, what
        try:
            yield
        finally:
            self._below.plain = before

    def progress(self, interval: Interval, target: int, totals: Totals) -> None:
        """Shows the steps since the last time: below the bar, or as a line."""
        self._below.plain = values_text(interval, totals)
        if not self._running or self.detailed:
            self.say(progress_line(interval, target, totals))


class OurConsole(Console):
    """A console that falls silent when whoever read it has gone, where rich ends the process."""

    def on_broken_pipe(self) -> None:
        """Prints no more. The run goes on: it has files to write."""
        self.quiet = True


def style_of(verbose: Any, *, shown: bool = True) -> str:
    """Returns the style of the screen that `verbose` stands for; see `RunConsole`.

    Args:
        verbose: a bool, or a style.
        shown: whether this process shows anything at all.

    Raises:
        ValueError: if it stands for none.
    """
    style = {True: "normal", False: "quiet"}[verbose] if isinstance(verbose, bool) else verbose
    if style not in STYLES:
        raise ValueError(
            f'`verbose` must be True, False or "detailed"; got {verbose!r}. It says how much of a '
            "run is shown. Leave it at True."
        )
    return style if shown else "quiet"


def progress_line(interval: Interval, target: int, totals: Totals) -> str:
    """Returns the line of a log file for the steps since the last one.

    Example:
        >>> from trainer.log.summary import Interval, Totals
        >>> interval = Interval(20, 0.25, 0.0, 1.0, 2.0**21, 17, 3, 5120.0, 80.0, 0.02, {})
        >>> progress_line(interval, 600, Totals(17, {"backward": 3}))[:62]
        'step  20/600   3%  loss 0.2500  loss_scale 2^21  3 skipped (3 '
    """
    width, left = len(str(target)), target - interval.step
    speed = interval.steps_per_second
    wait = dt.timedelta(seconds=round(left / speed)) if left and speed > 0 else None
    return (
        f"step {interval.step:>{width}}/{target} {interval.step / target:4.0%}  "
        + values_text(interval, totals)
        + (f"  {wait} left" if wait is not None else "")
    )


def values_text(interval: Interval, totals: Totals) -> str:
    """Returns what is known of an interval, as a person reads it.

    Example:
        >>> from trainer.log.summary import Interval, Totals
        >>> interval = Interval(20, 0.25, 0.0, 1.0, 2.0**21, 19, 1, 512.0, 8.0, 0.02, {})
        >>> values_text(interval, Totals(19, {"backward": 1}))
        'loss 0.2500  loss_scale 2^21  1 skipped (1 backward)  512 examples/s  2% waiting for data'
    """
    shown = {"loss": interval.loss, **interval.metrics}
    values = [
        f"{name} -     " if math.isnan(value) else f"{name} {value:.4f}"
        for name, value in shown.items()
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
