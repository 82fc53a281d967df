"""Compares runs on one page: their curves over each other, and the settings that differ."""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainer.base.atomic_files import write_atomically
from trainer.report import facts
from trainer.report.canvas import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILLION,
    Picture,
    add_legend,
    add_title,
    label_powers_of_two,
    make_panels,
    style_panels,
    to_picture,
)
from trainer.report.page import template
from trainer.report.pictures import choose_scale, plot
from trainer.report.reading import Curve, Run, read_run

# Six colors in three styles of lines: more runs begin again.
STYLES = tuple(
    itertools.product(["-", "--", ":"], [BLUE, VERMILLION, GREEN, PURPLE, ORANGE, BLACK])
)
COLUMNS = 4  # of a legend
MAX_QUANTITIES = 50  # in a picture
LOSS_SCALE = "loss scale"
Runs = Mapping[str, Run]  # by the name that the page shows


class Row(NamedTuple):
    """A run in the table of runs."""

    name: str
    step: str
    skipped: str
    speed: str
    result: str


def compare_runs(run_dirs: Sequence[str | pathlib.Path], output: str | pathlib.Path) -> str:
    """Writes the page `output/comparison.html`, and returns its path.

    Args:
        run_dirs: the `model_dir` of each run.
        output: the folder to write to, which is created if needed.

    Raises:
        OSError: if a file cannot be read or written.
        ValueError: if a run has no readable `metrics.jsonl`.
    """
    found = [read_run(each) for each in run_dirs]
    names = [run.name for run in found]
    if len({*names}) < len(names):  # folders of the same name in several places
        names = [str(each) for each in run_dirs]
    runs = dict(zip(names, found, strict=True))
    text = template("comparison.html.jinja").render(
        rows=[row_of(name, run) for name, run in runs.items()],
        settings=differing_settings(runs),
        pictures=draw(runs),
    )
    page = pathlib.Path(output) / "comparison.html"
    write_atomically(page, text)
    return str(page)


def row_of(name: str, run: Run) -> Row:
    """Returns what the table of runs says about a run."""
    best = facts.best_tile(run)
    return Row(
        name,
        f"{run.last_step:,}",
        shown_number(facts.last(run.train.get("skipped"))),
        shown_number(facts.median(run.train.get("examples_per_second"))),
        f"{best.label} {best.value} {best.note}",
    )


def shown_number(value: float) -> str:
    """Returns a number for a table, or "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:,.0f}"


def differing_settings(runs: Runs) -> list[tuple[str, list[str]]]:
    """Returns the settings that differ, each with its value in every run, or "-" if it has none."""
    of_runs = [
        {name: value for name, value, _ in facts.settings_rows(run)} for run in runs.values()
    ]
    names = dict.fromkeys(itertools.chain.from_iterable(of_runs))
    rows = [(name, [settings.get(name, "-") for settings in of_runs]) for name in names]
    return [(name, values) for name, values in rows if len({*values}) > 1]


def draw(runs: Runs) -> dict[str, Picture]:
    """Returns the pictures of the page, keyed by title."""
    train = by_quantity({name: run.train for name, run in runs.items()})
    speed = train.get("examples_per_second", {})
    drawn = {
        "Training": {name: curves for name, curves in train.items() if facts.is_metric(name)},
        "Evaluations": by_quantity({name: run.validation for name, run in runs.items()}),
        "Loss scale": by_quantity({name: scale_of(run) for name, run in runs.items()}),
        "Throughput": {"examples per second": speed} if speed else {},
    }
    return {title: draw_panels(runs, title, curves) for title, curves in drawn.items() if curves}


def by_quantity(curves: Mapping[str, Mapping[str, Curve]]) -> dict[str, dict[str, Curve]]:
    """Turns the curves of each run into those of each quantity; leaves out what is not known."""
    found: dict[str, dict[str, Curve]] = {}
    for run, known in curves.items():
        for quantity, curve in known.items():
            if not np.isnan(curve.value).all():
                found.setdefault(quantity, {})[run] = curve
    return dict(itertools.islice(found.items(), MAX_QUANTITIES))


def scale_of(run: Run) -> dict[str, Curve]:
    """Returns the loss scale over the steps, as a curve with corners; nothing if it is unknown."""
    scale = run.scale
    if not scale.step.size:
        return {}
    ends = np.append(scale.step[1:], max(run.last_step, scale.step[-1]))
    corners = np.stack([scale.step, ends], axis=1).ravel()
    return {LOSS_SCALE: Curve(corners, np.log2(np.repeat(scale.value, 2)))}


def draw_panels(runs: Runs, title: str, curves: Mapping[str, Mapping[str, Curve]]) -> Picture:
    """Draws quantities, each in a panel with a curve for every run that has it.

    Args:
        runs: the runs. Each has its color and style of lines in all panels.
        title: the title of the picture.
        curves: the curves of each quantity, keyed by run.
    """
    styles = dict(zip(runs, itertools.cycle(STYLES), strict=False))
    rows_of_legend = math.ceil(len(runs) / COLUMNS)
    figure, panels = make_panels([2.5] * len(curves), top=0.38 + 0.22 * rows_of_legend)
    for axes, (quantity, of_runs) in zip(panels, curves.items(), strict=True):
        for name, curve in of_runs.items():
            line, color = styles[name]
            marker = "" if quantity == LOSS_SCALE else "o"
            plot(axes, curve, color, label=name, linestyle=line, marker=marker)
        if quantity == LOSS_SCALE:
            label_powers_of_two(axes)
        else:
            choose_scale(axes, list(of_runs.values()))
        add_title(axes, quantity)
        add_legend(axes, COLUMNS)
    longest = max(runs.values(), key=lambda run: run.last_step)
    style_panels(panels, dataclasses.replace(longest, starts=[]))
    alt = f"{', '.join(curves)} over the steps of the runs {', '.join(runs)}."
    return to_picture(figure, title, alt)
