"""The pictures of float8 tensors: magnitudes, scales, and what the casts lost."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from scaling.float8.cast import FORMATS
from trainer.report.canvas import (
    BLUE,
    DPI,
    GRAY,
    VERMILLION,
    WIDTH,
    Picture,
    add_title,
    draw_shares,
    label_steps,
    to_picture,
)
from trainer.report.reading import Float8Tensors, Float8Values, Run, Underflow

MAX_LAYERS = 24  # rows of panels; a picture with many more would not be read
MAX_KINDS = 3  # columns of panels: inputs, kernel, and gradients of outputs
# In inches.
ROW_HEIGHT, ROW_SPACE = 0.8, 0.36
TOP, BOTTOM = 0.86, 0.55
LEFT, RIGHT, COLUMN_SPACE = 0.6, 0.3, 0.5
MAX_LETTERS = 24  # of a column's heading
MAX_MARKED_POINTS = 30  # a curve with more points has no markers

Grid = dict[str, dict[str, str]]  # layer -> kind of tensor -> the tensor's name


def draw_ranges(run: Run) -> Picture | None:
    """Draws a row of panels for each layer: largest magnitudes, and what the scales let through.

    If there are more than `MAX_LAYERS` layers, those are shown in which most steps saturated.
    """
    lines = run.float8
    grid = layers_of(lines)
    if not grid:
        return None
    shown = most_saturated(grid, lines)
    kinds = list(dict.fromkeys(kind for row in shown.values() for kind in row))[:MAX_KINDS]
    figure, panels = make_grid(len(shown), len(kinds))
    for own, (layer, row) in zip(panels, shown.items(), strict=True):
        for axes, kind in zip(own, kinds, strict=True):
            if kind in row:
                draw_tensor(axes, row[kind], lines)
            else:
                axes.set_visible(False)
        own[0].set_visible(True)  # it has the title
        add_title(own[0], layer)
    for axes in itertools.chain.from_iterable(panels):
        style_panel(axes, run, is_last=axes in panels[-1])
    add_headings(figure, panels[0], kinds)
    count = sum(map(len, grid.values()))
    return to_picture(figure, "float8", describe_ranges(lines, count))


def describe_ranges(lines: Sequence[Float8Tensors], count: int) -> str:
    """Returns a description of the panels for readers who cannot see them."""
    steps = saturated_steps(lines)
    worst = max(steps, key=steps.__getitem__)
    said = f"{worst} saturated most often, in {steps[worst]:,} steps" if steps[worst] else ""
    return (
        f"Largest magnitudes of {count:,} float8 tensors over the steps, and the largest numbers "
        f"that their scales let through. {said or 'In no step did one saturate'}."
    )


def layers_of(lines: Sequence[Float8Tensors]) -> Grid:
    """Returns the tensors by layer and kind, in the order in which they first appear."""
    grid: Grid = {}
    for name in dict.fromkeys(name for line in lines for name in line.values):
        layer, _, kind = name.rpartition("/")
        grid.setdefault(layer, {})[kind] = name
    return grid


def saturated_steps(lines: Sequence[Float8Tensors]) -> dict[str, int]:
    """Returns the number of steps in which each tensor saturated."""
    found: dict[str, int] = {}
    for line in lines:
        for name, values in line.values.items():
            found[name] = found.get(name, 0) + values.saturated_steps
    return found


def most_saturated(grid: Grid, lines: Sequence[Float8Tensors]) -> Grid:
    """Returns the layers for which there is room: those that saturated most, in their order."""
    steps = saturated_steps(lines)

    def in_layer(layer: str) -> int:
        return sum(steps[name] for name in grid[layer].values())

    chosen = set(sorted(grid, key=in_layer, reverse=True)[:MAX_LAYERS])
    return {layer: row for layer, row in grid.items() if layer in chosen}


def layers_left_out(run: Run) -> int:
    """Returns the number of layers for which there is no room."""
    return max(0, len(layers_of(run.float8)) - MAX_LAYERS)


def make_grid(rows: int, columns: int) -> tuple[Figure, list[list[Axes]]]:
    """Returns a figure with rows of axes, which share the step axis."""
    total = TOP + BOTTOM + rows * ROW_HEIGHT + (rows - 1) * ROW_SPACE
    figure = Figure(figsize=(WIDTH, total), dpi=DPI, facecolor="white")
    width = (WIDTH - LEFT - RIGHT - (columns - 1) * COLUMN_SPACE) / columns
    panels: list[list[Axes]] = []
    for row in range(rows):
        bottom = total - TOP - ROW_HEIGHT - row * (ROW_HEIGHT + ROW_SPACE)
        panels.append([])
        for column in range(columns):
            left = LEFT + column * (width + COLUMN_SPACE)
            rectangle = (left / WIDTH, bottom / total, width / WIDTH, ROW_HEIGHT / total)
            first = panels[0][0] if panels[0] else None
            panels[-1].append(figure.add_axes(rectangle, sharex=first))
    return figure, panels


def draw_tensor(axes: Axes, name: str, lines: Sequence[Float8Tensors]) -> None:
    """Draws a tensor's largest magnitudes, and the largest numbers that its scales let through."""
    known = [(line.step, line.values[name]) for line in lines if name in line.values]
    steps = [step for step, _ in known]
    amax = [log2(values.amax) for _, values in known]
    limit = [log2(limit_of(values)) for _, values in known]
    marker = "." if len(steps) <= MAX_MARKED_POINTS else ""
    axes.plot(steps, limit, color=GRAY, linewidth=1.2, linestyle="--", label="limit of the scale")
    axes.plot(steps, amax, color=BLUE, linewidth=1.4, marker=marker, label="largest magnitude")
    bad = [at for at, (_, values) in enumerate(known) if values.saturated_steps]
    axes.plot(
        [steps[at] for at in bad],
        [amax[at] for at in bad],
        "v",
        color=VERMILLION,
        markersize=6,
        label="saturated",
        zorder=3,
    )
    heights = np.array([*amax, *limit])
    heights = heights[np.isfinite(heights)]
    low, high = (heights.min(), heights.max()) if heights.size else (-1.0, 1.0)
    axes.set_ylim(low - 1.5, high + 1.5)


def limit_of(values: Float8Values) -> float:
    """Returns the largest number that a tensor's scale lets through."""
    return values.scale * FORMATS[values.format].largest


def log2(value: float | None) -> float:
    """Returns the logarithm of a positive number, and NaN for 0 and None."""
    return math.log2(value) if value else math.nan


def style_panel(axes: Axes, run: Run, *, is_last: bool) -> None:
    """Adds a grid and the axes of a panel; the last row has the labels of the steps."""
    axes.grid(color="#E3E3E3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRAY)
    label_steps(axes)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], integer=True))
    axes.tick_params(colors="#333333", labelbottom=is_last, labelsize=8)
    axes.set_xlabel("step" if is_last else "", color="#333333")
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda power, _: f"$2^{{{power:.0f}}}$"))
    margin = max(run.last_step, 1) * 0.01
    axes.set_xlim(-margin, run.last_step + margin)


def add_headings(figure: Figure, first: Sequence[Axes], kinds: Sequence[str]) -> None:
    """Writes the kind of tensor above each column, and one legend for all panels."""
    height = figure.get_figheight()
    for axes, kind in zip(first, kinds, strict=True):
        place = axes.get_position()
        figure.text(
            place.x0,
            1 - 0.33 / height,
            kind[:MAX_LETTERS],
            va="top",
            color=GRAY,
            fontsize=10,
            parse_math=False,
        )
    figure.legend(
        *next(axes for axes in first if axes.get_visible()).get_legend_handles_labels(),
        loc="upper right",
        bbox_to_anchor=(1 - RIGHT / WIDTH, 1 - 0.04 / height),
        ncols=3,
        frameon=False,
        borderaxespad=0.1,
    )


def draw_lost(run: Run, field: str, what: str) -> Picture | None:
    """Draws a heat map of a share, with a row for each tensor that lost something at all.

    Args:
        run: the run.
        field: the field of `Float8Values`.
        what: what happened to these numbers, for readers who cannot see the picture.
    """
    names = list(dict.fromkeys(name for line in run.float8 for name in line.values))
    start = len(common_folder(names))
    lines = [
        Underflow(
            line.step, {name[start:]: getattr(its, field) for name, its in line.values.items()}
        )
        for line in run.float8
    ]
    lost = {name for line in lines for name, share in line.share.items() if share}
    rows = [
        Underflow(line.step, {n: s for n, s in line.share.items() if n in lost}) for line in lines
    ]
    return draw_shares(
        rows, run.last_step, f"float8_{field}", f"Share of each tensor's numbers that {what}"
    )


def common_folder(names: Sequence[str]) -> str:
    """Returns the part up to a "/" with which all names begin.

    Example:
        >>> common_folder(["model/block_1/up/inputs", "model/block_2/up/inputs"])
        'model/'
    """
    if not names:
        return ""
    parts = zip(*(name.split("/")[:-1] for name in names), strict=False)
    same = itertools.takewhile(lambda part: len(set(part)) == 1, parts)
    return "".join(f"{part[0]}/" for part in same)


def counted(run: Run) -> bool:
    """Returns whether the run has counted what its casts lost."""
    return any(its.flushed is not None for line in run.float8 for its in line.values.values())
