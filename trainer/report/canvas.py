"""What all pictures of a report share: colours, axes, and how one becomes a file."""

import io
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trainer.report.reading import Run

# Okabe and Ito's colours, which those who cannot tell red from green tell apart. Markers say the
# same once more.
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GRAY = "#CC79A7", "#56B4E9", "#000000", "#6B6B6B"

WIDTH = 10.0  # inches
DPI = 144
# In inches, and the same in every picture: a step stands at the same place in all of them.
LEFT, RIGHT, BOTTOM = 0.75, 0.35, 0.55


class Picture(NamedTuple):
    """A picture on the page."""

    file: str
    alt: str  # what it shows, for those who cannot see it
    png: bytes
    width: int  # in pixels
    height: int


def panels(heights: list[float], top: float) -> tuple[Figure, list[Axes]]:
    """Returns a figure with axes below each other that share the steps.

    Args:
        heights: of each, in inches.
        top: what is left above each, in inches, for its title or legend.
    """
    total = sum(heights) + top * len(heights) + BOTTOM
    figure = Figure(figsize=(WIDTH, total), dpi=DPI, facecolor="white")
    axes: list[Axes] = []
    ceiling = total
    for height in heights:
        ceiling -= top + height
        place = (
            LEFT / WIDTH,
            ceiling / total,
            (WIDTH - LEFT - RIGHT) / WIDTH,
            height / total,
        )
        axes.append(figure.add_axes(place, sharex=axes[0] if axes else None))
    return figure, axes


def dress(axes: list[Axes], run: Run) -> None:
    """Gives axes their grid and their steps, which the lowest ones say; and a dotted line where
    the run was taken up again.
    """
    for one in axes:
        for start in run.starts[1:]:
            one.axvline(start.step, color=GRAY, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        one.grid(color="#E3E3E3", linewidth=0.8)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color(GRAY)
        one.tick_params(colors="#333333", labelbottom=one is axes[-1])
    margin = max(run.last_step, 1) * 0.01
    axes[0].set_xlim(-margin, run.last_step + margin)
    say_steps(axes[-1])


def say_steps(axes: Axes) -> None:
    """Writes round steps below an axis."""
    axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.set_xlabel("step", color="#333333")


def headline(axes: Axes, text: str) -> None:
    """Writes a panel's title above its left end. The text may be anything, a formula is not made
    of it.
    """
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", parse_math=False)


def legend(axes: Axes, columns: int = 8) -> None:
    """Puts the legend above the right end, where it covers nothing."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=columns,
            frameon=False,
            borderaxespad=0.1,
            columnspacing=1.4,
            handletextpad=0.5,
        )


def powers_of_two(axes: Axes) -> None:
    """Lets the axis of a loss scale, drawn as its logarithm, say 2^k."""
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda power, _: f"$2^{{{power:.0f}}}$"))


def finish(figure: Figure, name: str, alt: str) -> Picture:
    """Returns a figure as a picture."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    width, height = (round(inches * DPI) for inches in figure.get_size_inches())
    return Picture(f"{name}.png", alt, file.getvalue(), width, height)
