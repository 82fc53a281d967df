"""The console output of a run: a progress bar on a terminal, log lines anywhere else."""

import contextlib
import importlib.machinery
import io
import re
import sys
import time
import types

import pytest
from helpers import STEEP, overflowing

from trainer.log.console import RunConsole, format_log_line, format_values, resolve_style
from trainer.log.summary import Interval, Totals


class Terminal(io.StringIO):
    """A stream that passes for a terminal."""

    def isatty(self):
        """Returns True, as a terminal's stream does."""
        return True


def run(**arguments):
    """Twelve steps, the first three of which overflow; a log line after every four."""
    trainer = overflowing(**arguments)
    trainer.train(STEEP, steps=12, global_batch=4, eval_data=STEEP, eval_interval=6)


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 150 columns, to which a test redirects standard output."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    return Terminal()


def plain(text):
    """The text without escape sequences and carriage returns; every redraw of the bar remains."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")


def test_a_terminal_shows_a_bar(terminal):
    """The bar shows the step, the percentage and the time left, with the latest values below it and
    evaluations above it. Log lines are not printed, and the cursor is shown again at the end.
    """
    with contextlib.redirect_stdout(terminal):
        run()
    text = plain(terminal.getvalue())

    assert re.search(r"step 12/12 \S+ 100% \d:\d\d:\d\d left", text)
    assert re.search(r"loss -55\.5000 .*loss_scale 2\^14  3 skipped \(3 backward\)", text)
    assert "validation at step 6: loss" in text
    assert "step  4/12" not in text
    assert "at step 12 after 12 steps in" in text.splitlines()[-1]
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1


def test_force_color_does_not_draw_the_bar_into_a_log(monkeypatch, capsys):
    """With FORCE_COLOR, as CI systems and kernels of notebooks set it, a pipe gets log lines."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    run()
    printed = capsys.readouterr().out

    assert "\x1b" not in printed
    assert "step  4/12" in printed


@pytest.mark.thorough
@pytest.mark.parametrize("closed", [True, False])
def test_a_process_without_an_output_can_train(closed):
    """In a daemon, standard output is closed or None. A run that prints nothing does not need it."""
    stream = io.StringIO() if closed else None
    if closed:
        stream.close()
    with contextlib.redirect_stdout(stream):
        run(verbose=False)


def test_a_terminal_can_show_everything(terminal):
    """verbose="detailed" adds log lines, and each skipped step with where the overflow was found."""
    with contextlib.redirect_stdout(terminal):
        run(verbose="detailed")
    text = plain(terminal.getvalue())

    assert "step  4/12  33%  loss 3.0000" in text
    assert re.search(r"step 2 skipped: backward, in \S+ on replica 0: \d+ inf, \d+ NaN", text)


NAN = float("nan")


def interval(step=20, *, loss=0.25, steps_per_second=80.0, examples_per_second=5120.0):
    """An interval of steps."""
    speeds = (examples_per_second, steps_per_second, 0.02)
    return Interval(step, loss, 0.0, 1.0, 2.0**21, 17, 3, *speeds, {"accuracy": loss})


def test_a_log_line_has_the_time_left():
    """580 steps at 80 steps per second take 7 seconds; at the end there is no time left."""
    totals = Totals(17, {"backward": 3})
    line = format_log_line(interval(), 600, totals)

    assert line.startswith("step  20/600   3%  loss 0.2500  accuracy 0.2500  loss_scale 2^21  ")
    assert line.endswith(
        "  3 skipped (3 backward)  5,120 examples/s  2% waiting for data  0:00:07 left"
    )
    assert "left" not in format_log_line(interval(600), 600, totals)


@pytest.mark.parametrize(("speed", "target"), [(NAN, 600), (0.0, 600), (80.0, 2**63 - 1)])
def test_without_a_known_end_there_is_no_time_left(speed, target):
    """The steps were not timed, or the target is never reached."""
    line = format_log_line(interval(steps_per_second=speed), target, Totals(17, {}))

    assert "left" not in line


def test_unknown_values_are_left_out():
    """Means over no update are dashes, and a speed that was not measured is left out."""
    text = format_values(interval(loss=NAN, examples_per_second=NAN), Totals(0, {"backward": 3}))

    assert text == "loss -       accuracy -       loss_scale 2^21  3 skipped (3 backward)"


def test_verbose_is_a_style():
    """`verbose` is a bool or the name of a style; workers other than the chief are quiet."""
    styles = {True: "normal", False: "quiet", "detailed": "detailed", "quiet": "quiet"}
    assert {verbose: resolve_style(verbose) for verbose in styles} == styles
    assert resolve_style("detailed", shown=False) == "quiet"
    with pytest.raises(ValueError, match="`verbose`"):
        resolve_style("loud")


@pytest.mark.parametrize("installed", [True, False])
def test_a_notebook_has_a_live_bar_if_it_has_widgets(monkeypatch, capsys, installed):
    """With ipywidgets the bar is drawn; without them, log lines are printed as text, and nothing
    warns.
    """
    module = types.ModuleType("ipywidgets")
    module.__spec__ = importlib.machinery.ModuleSpec("ipywidgets", None)
    monkeypatch.setitem(sys.modules, "ipywidgets", module if installed else None)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    drawn = []
    monkeypatch.setattr("rich.live.Live.refresh", lambda live: drawn.append(live.console))
    console = RunConsole("normal")
    with console.progress_bar(0, 10):
        console.advance(5)
    if not installed:
        console.say("one")
        console.say("two")
    printed = capsys.readouterr()

    assert bool(drawn) == installed
    assert installed or printed.out == "one\ntwo\n"
    assert "install" not in printed.err


@pytest.mark.parametrize("style", ["quiet", "normal"])
def test_what_takes_long_says_so(monkeypatch, capsys, style):
    """One line says what is being done, once it has taken a while; "quiet" says nothing."""
    monkeypatch.setattr("trainer.log.console.PATIENCE", 0.01)
    console = RunConsole(style)
    with console.busy("tracing ..."):
        time.sleep(0.5)
    monkeypatch.setattr("trainer.log.console.PATIENCE", 3600.0)
    with console.busy("compiling ..."):
        pass

    assert capsys.readouterr().out == ("tracing ...\n" if style == "normal" else "")
