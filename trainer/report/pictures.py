"""The line plots of a report, one function each.

A function returns None if the run has not recorded the data for its plot.
"""

import collections
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from scaling.base.number_formats import HALF_MAX
from scaling.base.verdict import Cause
from trainer.log.summary import power_of_two
from trainer.report.canvas import (
    BLACK,
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Picture,
    add_legend,
    add_title,
    draw_shares,
    label_powers_of_two,
    make_panels,
    style_panels,
    to_picture,
)
from trainer.report.facts import HEADROOM_BITS, LEARNING_RATE, headroom, is_metric, last
from trainer.report.float8_pictures import draw_lost, draw_ranges
from trainer.report.reading import Curve, Run

# Color and marker of each cause, in the order in which a step checks for them.
CAUSES = {
    "weights": (BLACK, "X"),
    "forward": (ORANGE, "D"),
    "backward": (VERMILLION, "v"),
    "reduction": (GREEN, "s"),
    "unscaling": (PURPLE, "^"),
    "model": (SKY, "o"),
}
# Color and marker of each data set of an evaluation.
VALIDATION = ((VERMILLION, "D"), (GREEN, "s"), (PURPLE, "^"), (ORANGE, "v"), (SKY, "X"))
MAX_PANELS = 50  # a picture with many more would have more pixels than PNG files may
MAX_CURVES = 12  # in a panel, besides that of the training
MAX_MARKED_POINTS = 60  # a curve with more points has no markers
MAX_LARGE_MARKS = 200  # with more marks than this, marks are small and have no edge


def draw_all(run: Run) -> dict[str, Picture]:
    """Returns all pictures for which the run has recorded data, keyed by name."""
    drawn = {
        "loss": draw_curves(run),
        "loss_scale": draw_scale(run),
        "headroom": draw_headroom(run),
        "underflow": draw_shares(
            run.underflow,
            run.last_step,
            "underflow",
            "Share of each variable's gradient that underflowed in float16",
        ),
        "float8": draw_ranges(run),
        "float8_saturated": draw_lost(run, "saturated", "were too large for float8"),
        "float8_flushed": draw_lost(run, "flushed", "became 0 in float8"),
        "gradient_norm": draw_norm(run),
        "learning_rate": draw_learning_rates(run),
    }
    return {name: picture for name, picture in drawn.items() if picture is not None}


def plot(
    axes: Axes,
    curve: Curve,
    color: str,
    *,
    label: str | None = None,
    marker: str = "o",
    linestyle: str = "-",
    linewidth: float = 1.5,
) -> None:
    """Draws a curve, with a marker at each point if there are few."""
    if label is not None and label.startswith("_"):
        label = f" {label}"  # Matplotlib's legends leave out names that begin with "_"
    axes.plot(
        curve.step,
        curve.value,
        color=color,
        label=label,
        marker=marker if curve.step.size <= MAX_MARKED_POINTS else "",
        markersize=4,
        linestyle=linestyle,
        linewidth=linewidth,
    )


def choose_scale(axes: Axes, curves: Sequence[Curve]) -> None:
    """Makes the vertical axis logarithmic if all values are positive and span a wide range."""
    values = np.concatenate([curve.value for curve in curves])
    values = values[~np.isnan(values)]
    if values.size and values.min() > 0 and values.max() > 20 * values.min():
        axes.set_yscale("log")


def name_axis(axes: Axes, name: str) -> None:
    """Names the vertical axis. There is no room for long numbers: they lose a power of ten."""
    axes.set_ylabel(name)
    if axes.get_yscale() == "linear":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4))


def draw_curves(run: Run) -> Picture | None:
    """Draws the loss and each metric in its own panel, with training and validation together."""
    metrics = shown_metrics(run)
    if not metrics:
        return None
    figure, rows = make_panels([2.5] + [1.8] * (len(metrics) - 1))
    ends = []
    for [axes], (name, results) in zip(rows, metrics.items(), strict=True):
        draw_metric(axes, run, name, results)
        trained = training_curve(run, name)
        curves = [("training", name, trained)] if trained else []
        curves += [("validation", result, run.validation[result]) for result in results]
        ends += [f"{split} {result} ends at {last(curve):.4g}" for split, result, curve in curves]
    style_panels(rows, run)
    return to_picture(figure, "loss", f"Curves over {run.last_step:,} steps: {'; '.join(ends)}.")


def all_metrics(run: Run) -> dict[str, list[str]]:
    """Returns the loss and the metrics, and for each the results of evaluations that have it.

    Those of which no value is known are left out: no step has been applied.
    """
    metrics: dict[str, list[str]] = {
        name: [] for name in run.train if is_metric(name) and training_curve(run, name)
    }
    for result in run.validation:
        metrics.setdefault(metric_of(result, run), []).append(result)
    return metrics


def training_curve(run: Run, name: str) -> Curve | None:
    """Returns the values of a metric or of the loss in training; None if none is known."""
    curve = run.train.get(name)
    return None if math.isnan(last(curve)) else curve


def shown_metrics(run: Run) -> dict[str, list[str]]:
    """Returns those of `all_metrics` for which there is room."""
    first = itertools.islice(all_metrics(run).items(), MAX_PANELS)
    return {name: results[:MAX_CURVES] for name, results in first}


def curves_left_out(run: Run) -> int:
    """Returns the number of curves for which there is no room."""

    def count(metrics: Mapping[str, Sequence[str]]) -> int:
        return sum(
            bool(training_curve(run, name)) + len(results) for name, results in metrics.items()
        )

    return count(all_metrics(run)) - count(shown_metrics(run))


def metric_of(result: str, run: Run) -> str:
    """Returns the name of a result of an evaluation, without its data set's name, if it has one."""
    parts = result.split("/")
    ends = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((end for end in ends if end in run.train), result)


def draw_metric(axes: Axes, run: Run, name: str, results: Sequence[str]) -> None:
    """Draws one metric or the loss; with the loss, any nonzero regularization loss too.

    Args:
        axes: where to draw.
        run: the run.
        name: the metric.
        results: the names of the results of evaluations to draw with it.
    """
    shown = []
    if trained := training_curve(run, name):
        shown.append(trained)
        plot(axes, trained, BLUE, label="training")
    for place, result in enumerate(results):
        shown.append(run.validation[result])
        color, marker = VALIDATION[place % len(VALIDATION)]
        label = result.removesuffix(name).rstrip("/") or "validation"
        plot(axes, run.validation[result], color, label=label, marker=marker)
    penalty = run.train.get("regularization_loss")
    if name == "loss" and penalty is not None and np.nansum(np.abs(penalty.value)):
        plot(axes, penalty, GRAY, label="regularization", linestyle=":", marker="")
    choose_scale(axes, shown)
    add_title(axes, name)
    add_legend(axes)


def draw_scale(run: Run) -> Picture | None:
    """Draws the loss scale as a step function, with a mark at each skipped step."""
    scale = run.scale
    if not scale.step.size:
        return None
    figure, [[axes]] = make_panels([3.1])
    steps = np.append(scale.step, max(run.last_step, scale.step[-1]))
    powers = np.log2(np.append(scale.value, scale.value[-1]))
    width = 0.6 if scale.step.size > MAX_LARGE_MARKS else 1.6
    axes.plot(steps, powers, color=BLUE, linewidth=width, drawstyle="steps-post")
    counts = mark_skips(axes, run)
    margin = 0.6 if np.ptp(powers) > 1 else 1.6  # fits several ticks even if the scale is constant
    axes.set_ylim(powers.min() - margin, powers.max() + margin)
    label_powers_of_two(axes)
    axes.set_ylabel("loss scale")
    add_legend(axes)
    style_panels([[axes]], run)
    skipped = ", ".join(f"{count:,} by {cause}" for cause, count in counts.items()) or "none"
    first, last_one, lowest, highest = (
        power_of_two(value)
        for value in (scale.value[0], scale.value[-1], scale.value.min(), scale.value.max())
    )
    return to_picture(
        figure,
        "loss_scale",
        f"The loss scale over {run.last_step:,} steps: from {first} to {last_one}, between "
        f"{lowest} and {highest}. Skipped steps: {skipped}.",
    )


def mark_skips(axes: Axes, run: Run) -> collections.Counter[str]:
    """Marks each skipped step at its loss scale, with the color and marker of its cause.

    Returns:
        The number of skipped steps by cause.
    """
    counts = collections.Counter(skip.cause for skip in run.skips)
    if counts:
        axes.plot([], [], " ", label="skipped:")  # the first entry of the legend
    crowded = len(run.skips) > MAX_LARGE_MARKS
    for cause, (color, marker) in CAUSES.items():
        skips = [skip for skip in run.skips if skip.cause == cause]
        if not skips:
            continue
        axes.scatter(
            [skip.step for skip in skips],
            np.log2([skip.loss_scale for skip in skips]),
            color=color,
            marker=marker,
            s=14 if crowded else 42,
            edgecolors="white",
            linewidths=0 if crowded else 0.6,
            zorder=3 + 1 / len(skips),  # draws rare causes on top of frequent ones
            label=f"{len(skips):,} {cause}",
        )
    return counts


def draw_headroom(run: Run) -> Picture | None:
    """Draws the headroom of each step's largest scaled gradient below the largest float16."""
    if run.record is None:
        return None
    room = headroom(run.record)
    if not room.step.size:
        return None
    figure, [[axes]] = make_panels([2.7])
    plot(axes, room, BLUE, linewidth=1.2, label="headroom")
    overflows = run.record.step[np.isin(run.record.cause, [Cause.BACKWARD, Cause.REDUCTION])]
    if overflows.size:
        axes.plot(
            overflows,
            np.zeros(overflows.size),
            "|" if overflows.size > MAX_LARGE_MARKS else "x",
            color=VERMILLION,
            label="skipped, size unknown",
            zorder=3,
        )
    axes.axhline(0, color=VERMILLION, linewidth=1.2, linestyle="--", label="overflow")
    axes.axhline(HEADROOM_BITS, color=GRAY, linewidth=1, linestyle=":", label="recommended minimum")
    axes.set_ylim(min(0, room.value.min()) - 1, max(HEADROOM_BITS, room.value.max()) + 1)
    axes.set_ylabel("bits")
    add_legend(axes)
    style_panels([[axes]], run)
    return to_picture(
        figure,
        "headroom",
        f"Headroom below {HALF_MAX:.0f} in bits: from {room.value.min():.1f} to "
        f"{room.value.max():.1f}, {room.value[-1]:.1f} at the end.",
    )


def draw_norm(run: Run) -> Picture | None:
    """Draws the global norm of the gradients, averaged over the steps of each log line."""
    norm = {"gradient norm": run.train["gradient_norm"]} if "gradient_norm" in run.train else {}
    return draw_numbers(run, "gradient_norm", "gradient norm", norm)


def draw_learning_rates(run: Run) -> Picture | None:
    """Draws the learning rate of each optimizer."""
    prefix = f"{LEARNING_RATE}/"
    rates = {
        name.removeprefix(prefix): curve
        for name, curve in run.train.items()
        if name == LEARNING_RATE or name.startswith(prefix)
    }
    return draw_numbers(run, "learning_rate", "learning rate", rates)


def draw_numbers(run: Run, picture: str, what: str, curves: Mapping[str, Curve]) -> Picture | None:
    """Draws curves in one panel, with their names if there are several.

    Args:
        run: the run.
        picture: the name of the picture.
        what: what the numbers are.
        curves: the curves, keyed by name. Those of which no value is known are left out.
    """
    known = {name: curve for name, curve in curves.items() if not math.isnan(last(curve))}
    shown = dict(itertools.islice(known.items(), MAX_CURVES))
    if not shown:
        return None
    figure, [[axes]] = make_panels([2.2])
    colors = itertools.cycle([BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY])
    for (name, curve), color in zip(shown.items(), colors, strict=False):
        plot(axes, curve, color, label=name if len(shown) > 1 else None, linewidth=1.4)
    choose_scale(axes, list(shown.values()))
    name_axis(axes, what)
    add_legend(axes)
    style_panels([[axes]], run)
    ends = [
        f"{name} from {np.nanmin(curve.value):.3g} to {np.nanmax(curve.value):.3g}, "
        f"{last(curve):.3g} at the end"
        for name, curve in shown.items()
    ]
    return to_picture(figure, picture, f"Over {run.last_step:,} steps: {'; '.join(ends)}.")
