"""What pictures of a report share: colors, axes, heat maps, and the conversion to PNG."""

import io
import struct
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
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
SPACE = 0.6  # inches for the title, the legend and the labels of a panel
# Heat maps.
MAX_ROWS = 40  # variables; more rows would not be readable
MAX_NAME = 34  # characters of a variable's name
MIN_COLOR_RANGE = 0.01  # the color scale always reaches at least this share
ROW_HEIGHT, MIN_HEIGHT = 0.24, 0.72  # inches


class Picture(NamedTuple):
    """A picture on the page."""

    file: str  # file name
    alt: str  # description for readers who cannot see the picture
    png: bytes
    width: int  # in pixels
    height: int  # in pixels


def make_panels(heights: Sequence[float], columns: int = 1) -> tuple[Figure, list[list[Axes]]]:
    """Returns a figure, and rows of axes that share the step axis.

    Args:
        heights: the height of each row, in inches, without its title, legend and labels.
        columns: the number of axes in a row.
    """
    size = (WIDTH, sum(heights) + SPACE * len(heights))
    figure = Figure(figsize=size, dpi=DPI, facecolor="white", layout="constrained")
    grid = figure.subplots(
        len(heights), columns, sharex=True, squeeze=False, height_ratios=list(heights)
    )
    return figure, [list(row) for row in grid]


def style_panels(rows: Sequence[Sequence[Axes]], run: Run) -> None:
    """Adds a grid, the step axis, and a dotted line at each step where the run was resumed."""
    margin = max(run.last_step, 1) * 0.01
    for row in rows:
        for axes in row:
            for step in sorted({start.step for start in run.starts[1:]}):
                axes.axvline(step, color=GRAY, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
            axes.grid(color="#E3E3E3", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(GRAY)
            axes.tick_params(colors="#333333")
            axes.set_xlim(-margin, run.last_step + margin)
            label_steps(axes)
            axes.set_xlabel("step" if row is rows[-1] else "", color="#333333")


def label_steps(axes: Axes) -> None:
    """Labels the horizontal axis with round step numbers."""
    axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def add_title(axes: Axes, text: str, longest: int = MAX_LABEL) -> None:
    """Writes the title of a panel above its left end.

    The text may come from the user, so it is not parsed as a formula.
    """
    title = shorten(text, longest)
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


def label_powers_of_two(axes: Axes, ticks: int = 8) -> None:
    """Labels a vertical axis that shows logarithms to base 2 with 2^k."""
    axes.yaxis.set_major_locator(MaxNLocator(ticks, integer=True))
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
    names = list(dict.fromkeys(name for line in lines for name in line.share))
    if not names:
        return None
    # Shape (variables, lines). None, which was not measured, is NaN.
    shares = np.array([[line.share.get(name) for line in lines] for name in names], np.float64)
    means = np.nansum(shares, axis=1) / np.maximum(np.sum(~np.isnan(shares), axis=1), 1)
    shown = np.sort(np.argsort(-means, kind="stable")[:MAX_ROWS])
    height = max(ROW_HEIGHT * len(shown), MIN_HEIGHT)
    figure, [[axes]] = make_panels([height])
    image = axes.pcolormesh(
        np.array([0, *(line.step for line in lines)]),
        np.arange(len(shown) + 1),
        np.ma.masked_invalid(shares[shown]),
        cmap=colormaps["YlGnBu"],
        # Keeps small shares visible next to large ones.
        norm=PowerNorm(0.5, 0.0, max(float(np.nanmax(shares, initial=0.0)), MIN_COLOR_RANGE)),
    )
    axes.set_facecolor("#D0D0D0")  # shows where nothing was measured
    axes.invert_yaxis()
    axes.set_xlim(0, last_step)
    label_steps(axes)
    axes.set_xlabel("step", color="#333333")
    labels = [shorten(names[row], MAX_NAME) for row in shown]
    places = np.arange(len(labels)) + 0.5
    axes.set_yticks(places, labels, parse_math=False, fontsize=9, family="monospace")
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_color(GRAY)
    ticks = MaxNLocator(max(2, round(min(height, 3.0) * 2)))
    percent = FuncFormatter(lambda share, _: f"{100 * share:.3g}%")
    figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, ticks=ticks, format=percent)
    worst = int(np.argmax(means))
    return to_picture(
        figure,
        name,
        f"{what}, for {len(names):,} of them. {names[worst]} lost most, {means[worst]:.2%} on "
        "average.",
    )
