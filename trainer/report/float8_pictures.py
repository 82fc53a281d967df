"""The pictures of float8 tensors: magnitudes, scales, and what the casts lost."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from scaling.float8.cast import FORMATS
from trainer.report.canvas import (
    BLUE,
    GRAY,
    MAX_LABEL,
    VERMILLION,
    Picture,
    add_title,
    draw_shares,
    label_powers_of_two,
    make_panels,
    style_panels,
    to_picture,
)
from trainer.report.reading import Float8Tensors, Run, Underflow

MAX_LAYERS = 24  # rows of panels; a picture with many more would not be read
MAX_KINDS = 3  # columns of panels: inputs, kernel, and gradients of outputs
HEIGHT = 0.8  # inches of a row of panels
MAX_MARKED_POINTS = 30  # a curve with more points has no markers

Grid = dict[str, list[str]]  # layer -> the names of its tensors


def draw_ranges(run: Run) -> Picture | None:
    """Draws a row of panels for each layer: largest magnitudes, and what the scales let through.

    If there are more than `MAX_LAYERS` layers, those are shown in which most steps saturated.
    """
    grid = layers_of(run)
    if not grid:
        return None
    saturated: Counter[str] = Counter()
    for line in run.float8:
        saturated.update({name: its.saturated_steps for name, its in line.values.items()})
    most = sorted(grid, key=lambda layer: -sum(saturated[name] for name in grid[layer]))
    shown = [layer for layer in grid if layer in most[:MAX_LAYERS]]
    columns = min(MAX_KINDS, max(len(grid[layer]) for layer in shown))
    figure, rows = make_panels([HEIGHT] * len(shown), columns)
    for row, layer in zip(rows, shown, strict=True):
        for axes, name in itertools.zip_longest(row, grid[layer][:columns]):
            if name is None:
                axes.set_visible(False)
            else:
                draw_tensor(axes, name, run.float8)
                add_title(axes, name, MAX_LABEL // columns)
    style_panels(rows, run)
    figure.legend(
        *rows[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False
    )
    [(worst, steps)] = saturated.most_common(1)
    said = f"{worst} saturated most often, in {steps:,} steps" if steps else "None saturated"
    return to_picture(
        figure,
        "float8",
        f"Largest magnitudes of {len(saturated):,} float8 tensors over the steps, and the largest "
        f"numbers that their scales let through. {said}.",
    )


def layers_of(run: Run) -> Grid:
    """Returns the tensors by layer, in the order in which they first appear."""
    grid: Grid = {}
    for name in dict.fromkeys(name for line in run.float8 for name in line.values):
        grid.setdefault(name.rpartition("/")[0], []).append(name)
    return grid


def layers_left_out(run: Run) -> int:
    """Returns the number of layers for which there is no room."""
    return max(0, len(layers_of(run)) - MAX_LAYERS)


def draw_tensor(axes: Axes, name: str, lines: Sequence[Float8Tensors]) -> None:
    """Draws a tensor's largest magnitudes, and the largest numbers that its scales let through."""
    known = [(line.step, line.values[name]) for line in lines if name in line.values]
    steps = [step for step, _ in known]
    amax = [log2(its.amax) for _, its in known]
    limit = [log2(its.scale * FORMATS[its.format].largest) for _, its in known]
    marker = "." if len(steps) <= MAX_MARKED_POINTS else ""
    axes.plot(steps, limit, color=GRAY, linewidth=1.2, linestyle="--", label="limit of the scale")
    axes.plot(steps, amax, color=BLUE, linewidth=1.4, marker=marker, label="largest magnitude")
    bad = [at for at, (_, its) in enumerate(known) if its.saturated_steps]
    places = [steps[at] for at in bad], [amax[at] for at in bad]
    axes.plot(*places, "v", color=VERMILLION, markersize=6, label="saturated", zorder=3)
    heights = np.array([*amax, *limit])
    heights = heights[np.isfinite(heights)]
    low, high = (heights.min(), heights.max()) if heights.size else (-1.0, 1.0)
    axes.set_ylim(low - 1.5, high + 1.5)
    label_powers_of_two(axes, ticks=3)


def log2(value: float | None) -> float:
    """Returns the logarithm of a positive number, and NaN for 0 and None."""
    return math.log2(value) if value else math.nan


def draw_lost(run: Run, field: str, what: str) -> Picture | None:
    """Draws a heat map of a share, with a row for each tensor that lost something at all.

    Args:
        run: the run.
        field: the field of `Float8Values`.
        what: what happened to these numbers, for readers who cannot see the picture.
    """
    shares = [
        {name: getattr(its, field) for name, its in line.values.items()} for line in run.float8
    ]
    lost = {name for of_line in shares for name, share in of_line.items() if share}
    lines = [
        Underflow(line.step, {name: share for name, share in of_line.items() if name in lost})
        for line, of_line in zip(run.float8, shares, strict=True)
    ]
    what = f"Share of each tensor's numbers that {what}"
    return draw_shares(lines, run.last_step, f"float8_{field}", what)


def counted(run: Run) -> bool:
    """Returns whether the run has counted what its casts lost."""
    return any(its.flushed is not None for line in run.float8 for its in line.values.values())
