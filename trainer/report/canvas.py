"""What pictures of a report share: colors, axes, heat maps, and the conversion to PNG."""

import io
import math
import struct
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trainer.report.reading import Run, Underflow

# The palette of Okabe and Ito, whose colors color-blind readers can distinguish. Markers encode the
# same information.
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GRAY = "#CC79A7", "#56B4E9", "#000000", "#6B6B6B"

MAX_LABEL = 80  # characters of a name
WIDTH = 10.0  # inches
DPI = 144
# Margins in inches, the same in all line plots, so that their step axes line up.
LEFT, RIGHT, BOTTOM = 0.75, 0.35, 0.55
# Heat maps.
MAX_ROWS = 40  # variables; more rows would not be readable
MAX_NAME = 34  # characters of a variable's name
MIN_COLOR_RANGE = 0.01  # the color scale always reaches at least this share
# In inches.
CHARACTER_WIDTH = 0.076
ROW_HEIGHT = 0.24
MIN_HEIGHT = 0.72  # below it, the labels of the color scale would overlap
TOP = 0.2
COLOR_BAR_SPACE = 1.3  # the margin on the right


class Picture(NamedTuple):
    """A picture on the page."""

    file: str  # file name
    alt: str  # description for readers who cannot see the picture
    png: bytes
    width: int  # in pixels
    height: int  # in pixels


def make_panels(heights: Sequence[float], top: float) -> tuple[Figure, list[Axes]]:
    """Returns a figure with axes stacked vertically, which share the step axis.

    Args:
        heights: the height of each axes, in inches.
        top: the space above each axes for its title or legend, in inches.
    """
    total = sum(heights) + top * len(heights) + BOTTOM
    figure = Figure(figsize=(WIDTH, total), dpi=DPI, facecolor="white")
    panels: list[Axes] = []
    upper_edge = total
    for height in heights:
        upper_edge -= top + height
        rectangle = (
            LEFT / WIDTH,
            upper_edge / total,
            (WIDTH - LEFT - RIGHT) / WIDTH,
            height / total,
        )
        panels.append(figure.add_axes(rectangle, sharex=panels[0] if panels else None))
    return figure, panels


def style_panels(panels: Sequence[Axes], run: Run) -> None:
    """Adds a grid, the step axis, and a dotted line at each step where the run was resumed."""
    for axes in panels:
        for step in sorted({start.step for start in run.starts[1:]}):
            axes.axvline(step, color=GRAY, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        axes.grid(color="#E3E3E3", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GRAY)
        axes.tick_params(colors="#333333", labelbottom=axes is panels[-1])
    margin = max(run.last_step, 1) * 0.01
    panels[0].set_xlim(-margin, run.last_step + margin)
    label_steps(panels[-1])


def label_steps(axes: Axes) -> None:
    """Labels the horizontal axis with round step numbers."""
    axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.set_xlabel("step", color="#333333")


def add_title(axes: Axes, text: str) -> None:
    """Writes the title of a panel above its left end.

    The text may come from the user, so it is not parsed as a formula.
    """
    title = shorten(text, MAX_LABEL)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", parse_math=False)


def add_legend(axes: Axes, columns: int = 8) -> None:
    """Puts the legend above the right end of a panel, where it covers nothing."""
    if axes.get_legend_handles_labels()[1]:
        legend = axes.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=columns,
            frameon=False,
            borderaxespad=0.1,
            columnspacing=1.4,
            handletextpad=0.5,
        )
        for text in legend.get_texts():  # they hold names from the run, as the titles do
            text.set_parse_math(False)
            text.set_text(shorten(text.get_text(), MAX_LABEL))


def shorten(name: str, longest: int) -> str:
    """Returns a name on one line, with its middle left out if it is too long.

    Example:
        >>> shorten("functional/block_12/attention/query/kernel", 34)
        'functional/block…tion/query/kernel'
    """
    name, half = name.replace("\n", " "), longest // 2
    return name if len(name) <= longest else f"{name[: half - 1]}…{name[-half:]}"


def label_powers_of_two(axes: Axes) -> None:
    """Labels a vertical axis that shows log2 of a loss scale with 2^k."""
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda power, _: f"$2^{{{power:.0f}}}$"))


def to_picture(figure: Figure, name: str, alt: str) -> Picture:
    """Returns a figure as a picture.

    Args:
        figure: the figure.
        name: the name of the picture, without ".png".
        alt: a description for readers who cannot see it.
    """
    file = io.BytesIO()
    with warnings.catch_warnings():
        # A name may have characters that the font has not; the page itself shows them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        figure.savefig(file, format="png", dpi=DPI)
    # matplotlib rounds the size down, so read it from the PNG header, which has it at byte 16.
    width, height = struct.unpack(">II", file.getvalue()[16:24])
    return Picture(f"{name}.png", alt, file.getvalue(), width, height)


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
    labels = [shorten(name, MAX_NAME) for name in names]
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
    known: dict[str, list[float]] = {}
    for line in lines:
        for name, share in line.share.items():
            known.setdefault(name, []).extend([] if share is None else [share])
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
            shares[rows[name], column] = math.nan if share is None else share
    return list(rows), shares
