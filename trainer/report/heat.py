"""The heat map of underflow: which variable lost how much of its gradient, and when."""

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trainer.report.canvas import DPI, GRAY, WIDTH, Picture, finish, say_steps
from trainer.report.reading import Underflow, number

ROWS = 40  # variables; more would not be readable
LETTERS = 34  # of a name
LETTER = 0.076  # inches that one takes
LEAST = 0.01  # the scale of colours reaches at least this share


def draw_underflow(lines: list[Underflow], last_step: int) -> Picture | None:
    """Draws a row for each variable, in the model's order, and a column for each line.

    Of more than `ROWS` variables those that lost most are shown.
    """
    names, shares = table(lines)
    if not names:
        return None
    mean = np.nanmean(np.where(np.isnan(shares).all(axis=1, keepdims=True), 0.0, shares), axis=1)
    shown = np.sort(np.argsort(-mean, kind="stable")[:ROWS])
    height = 0.24 * len(shown)
    total = height + 0.2 + 0.55
    figure = Figure(figsize=(WIDTH, total), dpi=DPI, facecolor="white")
    left = 0.2 + LETTER * max(len(shorten(names[row])) for row in shown)
    axes = figure.add_axes(
        (left / WIDTH, 0.55 / total, (WIDTH - left - 1.3) / WIDTH, height / total)
    )
    edges = np.array([0, *(line.step for line in lines)])
    most = max(float(np.nanmax(shares, initial=0.0)), LEAST)
    image = axes.pcolormesh(
        edges,
        np.arange(len(shown) + 1),
        np.ma.masked_invalid(shares[shown]),
        cmap=colormaps["YlGnBu"],
        norm=PowerNorm(0.5, 0.0, most),  # a small share is to be seen beside a large one
    )
    axes.set_facecolor("#D0D0D0")  # where nothing was measured
    axes.invert_yaxis()
    axes.set_xlim(0, last_step)
    say_steps(axes)
    labels = [shorten(names[row]) for row in shown]
    axes.set_yticks(
        np.arange(len(shown)) + 0.5, labels, parse_math=False, fontsize=9, family="monospace"
    )
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_color(GRAY)
    bar_height = min(height, 3.0)
    bar = figure.add_axes(
        (1 - 1.1 / WIDTH, (0.55 + height - bar_height) / total, 0.18 / WIDTH, bar_height / total)
    )
    figure.colorbar(
        image,
        cax=bar,
        ticks=MaxNLocator(max(2, round(bar_height * 2))),
        format=FuncFormatter(lambda share, _: f"{100 * share:.3g}%"),
    )
    worst = int(np.argmax(mean))
    return finish(
        figure,
        "underflow",
        f"Share of each variable's gradient that underflowed in float16, {len(names):,} "
        f"variables. {names[worst]} lost most, {mean[worst]:.2%} on average.",
    )


def table(lines: list[Underflow]) -> tuple[list[str], np.ndarray]:
    """Returns the variables, in the order of their coming, and the shares: shape (variables,
    lines), NaN where none was written.
    """
    rows = {name: row for row, name in enumerate(dict.fromkeys(n for x in lines for n in x.share))}
    shares = np.full([len(rows), len(lines)], np.nan)
    for column, line in enumerate(lines):
        for name, share in line.share.items():
            shares[rows[name], column] = number(share)
    return list(rows), shares


def shorten(name: str) -> str:
    """Returns a name that is not too long; what is left out is in its middle.

    Example:
        >>> shorten("functional/block_12/attention/query/kernel")
        'functional/block…tion/query/kernel'
    """
    half = LETTERS // 2
    return name if len(name) <= LETTERS else f"{name[: half - 1]}…{name[-half:]}"
