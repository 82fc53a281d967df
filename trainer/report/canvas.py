"""What all pictures of a report share: colors, axes, and the conversion to PNG."""

import io
import struct
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trainer.report.facts import MAX_LABEL
from trainer.report.reading import Run, clean

# The palette of Okabe and Ito, whose colors color-blind readers can distinguish. Markers encode the
# same information.
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GRAY = "#CC79A7", "#56B4E9", "#000000", "#6B6B6B"

MAX_RESUMED = 200  # dotted lines; more would be gray all over
WIDTH = 10.0  # inches
DPI = 144
# Margins in inches, the same in all line plots, so that their step axes line up.
LEFT, RIGHT, BOTTOM = 0.75, 0.35, 0.55


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
        for step in sorted({start.step for start in run.starts[1:]})[:MAX_RESUMED]:
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
    title = clean(text.replace("\n", " "), MAX_LABEL)
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
            text.set_text(clean(text.get_text().replace("\n", " "), MAX_LABEL))


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
