"""Writes HTML pages with facts and pictures: the report of a run, and the comparison of several."""

import base64
import dataclasses
import itertools
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jinja2
import markupsafe
import numpy as np

from trainer.base.atomic_files import write_atomically
from trainer.log.summary import format_bytes, power_of_two
from trainer.report import facts
from trainer.report.canvas import (
    BLACK,
    BLUE,
    GREEN,
    MAX_ROWS,
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
from trainer.report.float8_pictures import counted, layers_left_out
from trainer.report.pictures import choose_scale, curves_left_out, draw_all, plot
from trainer.report.reading import Curve, Run, read_run

MAX_SKIPS = 50  # rows of the table of skipped steps
# Of a comparison: six colors in three styles of lines; more runs begin again.
STYLES = tuple(
    itertools.product(["-", "--", ":"], [BLUE, VERMILLION, GREEN, PURPLE, ORANGE, BLACK])
)
COLUMNS = 4  # of a legend
MAX_QUANTITIES = 50  # in a picture
LOSS_SCALE = "loss scale"
Runs = Mapping[str, Run]  # by the name that the page shows


def write_report(run_dir: str | pathlib.Path, output: str | pathlib.Path | None = None) -> str:
    r"""Writes the report of a run: a page, and its pictures as separate files.

    Args:
        run_dir: the run's `model_dir`.
        output: the folder to write to, which is created if needed; None means `run_dir/report`.

    Returns:
        The path of the page.

    Raises:
        ValueError: if `run_dir` has no readable `metrics.jsonl`, or if `output` is None and
            `run_dir/report` is a link.

    Example:
        >>> import json, tempfile
        >>> run = pathlib.Path(tempfile.mkdtemp())
        >>> line = {"split": "train", "step": 100, "loss": 0.5, "applied": 92, "skipped": 8}
        >>> size = (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        >>> pathlib.Path(write_report(run)).name, (run / "report" / "loss.png").exists()
        ('report.html', True)
    """
    run = read_run(run_dir)
    folder = pathlib.Path(run_dir) / "report" if output is None else pathlib.Path(output)
    if output is None and folder.is_symlink():  # whoever wrote the run may have chosen its target
        raise ValueError(f"`output` must be given where {str(folder)!r} is a link")
    pictures = draw_all(run)
    for picture in pictures.values():
        write_atomically(folder / picture.file, picture.png)
    write_atomically(folder / "report.html", render(run, pictures))
    return str(folder / "report.html")


def render(run: Run, pictures: Mapping[str, Picture]) -> str:
    """Returns the page of a run as HTML. Text from the run's log is escaped.

    Args:
        run: the run.
        pictures: the pictures of the run, keyed by name.
    """
    return template("report.html.jinja").render(
        run=dataclasses.replace(run, skips=run.skips[:MAX_SKIPS]),
        curves_left_out=curves_left_out(run),
        skipped=facts.last(run.train.get("skipped")),
        none_applied=facts.last(run.train.get("applied")) == 0,
        more_skips=len(run.skips) - MAX_SKIPS,
        pictures=pictures,
        tiles=facts.tiles(run),
        not_recorded=facts.NOT_RECORDED,
        rows_left_out=len({name for line in run.underflow for name in line.share}) - MAX_ROWS,
        float8_counted=counted(run),
        layers_left_out=layers_left_out(run),
        headroom_bits=facts.HEADROOM_BITS,
        advice=facts.advise(run.record) if run.record else None,
        settings=facts.settings_rows(run),
        model=run.starts[-1].model if run.starts else [],
    )


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
        facts.format_count(facts.last(run.train.get("skipped"))),
        facts.format_count(facts.median(run.train.get("examples_per_second"))),
        f"{best.label} {best.value} {best.note}",
    )


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
    figure, rows = make_panels([2.5 + 0.22 * rows_of_legend] * len(curves))
    for [axes], (quantity, of_runs) in zip(rows, curves.items(), strict=True):
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
    style_panels(rows, dataclasses.replace(longest, starts=[]))
    alt = f"{', '.join(curves)} over the steps of the runs {', '.join(runs)}."
    return to_picture(figure, title, alt)


def template(name: str) -> jinja2.Template:
    """Returns a template of this package. It escapes what it is given."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trainer", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_url"] = data_url
    environment.filters["power_of_two"] = power_of_two
    environment.filters["format_bytes"] = format_bytes
    environment.filters["superscript"] = superscript
    return environment.get_template(name)


def superscript(text: str) -> markupsafe.Markup:
    """Converts text to HTML, with the exponents of powers of two as superscripts.

    Example:
        >>> superscript("<b> 2^16")
        Markup('&lt;b&gt; 2<sup>16</sup>')
    """
    return markupsafe.Markup(  # noqa: S704 - the text is escaped, and only digits are inserted
        re.sub(r"\b2\^(-?\d+)", r"2<sup>\1</sup>", str(markupsafe.escape(text)))
    )


def data_url(picture: Picture) -> str:
    """Returns a picture as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(picture.png).decode('ascii')}"
