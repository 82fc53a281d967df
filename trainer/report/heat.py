"""Heat maps of what was lost, and when: of each variable's gradient, or of each float8 tensor."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trainer.report.canvas import DPI, GRAY, WIDTH, Picture, label_steps, to_picture
from trainer.report.reading import Underflow, finite_or_nan

MAX_ROWS = 40  # variables; more rows would not be readable
MAX_NAME = 34  # characters of a variable's name
MIN_COLOR_RANGE = 0.01  # the color scale always reaches at least this share
# In inches.
CHARACTER_WIDTH = 0.076
ROW_HEIGHT = 0.24
MIN_HEIGHT = 0.72  # below it, the labels of the color scale would overlap
TOP, BOTTOM = 0.2, 0.55
COLOR_BAR_SPACE = 1.3  # the margin on the right


def draw_underflow(lines: Sequence[Underflow], last_step: int) -> Picture | None:
    """Draws the share of each variable's gradient that underflowed; see `draw_shares`."""
    what = "Share of each variable's gradient that underflowed in float16"
    return draw_shares(lines, last_step, "underflow", what)


def draw_shares(lines: Sequence[Underflow], last_step: int, name: str, what: str) -> Picture | None:
    """Draws a row for each variable, in the model's order, and a column for each log line.

    If there are more than `MAX_ROWS` variables, only those with the largest mean shares are
    shown.

    Args:
        lines: the shares by variable or tensor.
        last_step: the last step of the run.
        name: the name of the picture.
        what: what the shares are, for readers who cannot see the picture.
    """
    means = mean_shares(lines)
    if not means:
        return None
    worst = max(means, key=means.__getitem__)
    shown = set(sorted(means, key=means.__getitem__, reverse=True)[:MAX_ROWS])
    names, shares = share_matrix(
        [
            Underflow(line.step, {n: s for n, s in line.share.items() if n in shown})
            for line in lines
        ]
    )
    labels = [shorten(name.replace("\n", " ")) for name in names]
    height = max(ROW_HEIGHT * len(names), MIN_HEIGHT)
    total = height + TOP + BOTTOM
    figure = Figure(figsize=(WIDTH, total), dpi=DPI, facecolor="white")
    left = 0.2 + CHARACTER_WIDTH * max(map(len, labels))
    axes = figure.add_axes(
        (left / WIDTH, BOTTOM / total, (WIDTH - left - COLOR_BAR_SPACE) / WIDTH, height / total)
    )
    largest = max(float(np.nanmax(shares, initial=0.0)), MIN_COLOR_RANGE)
    image = axes.pcolormesh(
        np.array([0, *(line.step for line in lines)]),
        np.arange(len(names) + 1),
        np.ma.masked_invalid(shares),
        cmap=colormaps["YlGnBu"],
        norm=PowerNorm(0.5, 0.0, largest),  # keeps small shares visible next to large ones
    )
    style_heat_map(axes, labels, last_step)
    add_color_bar(figure, image, height, total)
    return to_picture(
        figure,
        name,
        f"{what}, for {len(means):,} of them. {worst} lost most, {means[worst]:.2%} on average.",
    )


def mean_shares(lines: Sequence[Underflow]) -> dict[str, float]:
    """Returns the mean share of each variable, 0 if none was measured, in the model's order."""
    found: dict[str, list[float]] = {}
    for line in lines:
        for name, share in line.share.items():
            found.setdefault(name, []).append(finite_or_nan(share))
    known = {name: [x for x in shares if not math.isnan(x)] for name, shares in found.items()}
    return {name: math.fsum(shares) / max(len(shares), 1) for name, shares in known.items()}


def style_heat_map(axes: Axes, labels: Sequence[str], last_step: int) -> None:
    """Labels the rows with the variables' names, and the horizontal axis with steps."""
    axes.set_facecolor("#D0D0D0")  # shows where nothing was measured
    axes.invert_yaxis()
    axes.set_xlim(0, last_step)
    label_steps(axes)
    axes.set_yticks(
        np.arange(len(labels)) + 0.5, labels, parse_math=False, fontsize=9, family="monospace"
    )
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_color(GRAY)


def add_color_bar(figure: Figure, image: ScalarMappable, height: float, total: float) -> None:
    """Adds the color scale to the right of the heat map.

    Args:
        figure: the figure.
        image: the heat map.
        height: the height of the heat map, in inches.
        total: the height of the figure, in inches.
    """
    bar_height = min(height, 3.0)
    axes = figure.add_axes(
        (
            1 - 1.1 / WIDTH,
            (BOTTOM + height - bar_height) / total,
            0.18 / WIDTH,
            bar_height / total,
        )
    )
    figure.colorbar(
        image,
        cax=axes,
        ticks=MaxNLocator(max(2, round(bar_height * 2))),
        format=FuncFormatter(lambda share, _: f"{100 * share:.3g}%"),
    )


def share_matrix(lines: Sequence[Underflow]) -> tuple[list[str], np.ndarray]:
    """Returns the shares of all lines as one matrix.

    Returns:
        The names of the variables in the order in which they first appear, and an array of shape
        (variables, lines), with NaN where a line has no share for a variable.
    """
    names = dict.fromkeys(name for line in lines for name in line.share)
    rows = {name: row for row, name in enumerate(names)}
    shares = np.full([len(rows), len(lines)], np.nan)
    for column, line in enumerate(lines):
        for name, share in line.share.items():
            shares[rows[name], column] = finite_or_nan(share)
    return list(rows), shares


def shorten(name: str) -> str:
    """Returns a name with its middle left out if it is too long.

    Example:
        >>> shorten("functional/block_12/attention/query/kernel")
        'functional/block…tion/query/kernel'
    """
    half = MAX_NAME // 2
    return name if len(name) <= MAX_NAME else f"{name[: half - 1]}…{name[-half:]}"
