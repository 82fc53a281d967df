"""The pictures of a report, one function each. What a run has not recorded has no picture."""

import collections
from typing import Any

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
    dress,
    finish,
    headline,
    legend,
    panels,
    powers_of_two,
)
from trainer.report.facts import HEADROOM_BITS, NOT_METRICS, headroom, last, scale_path
from trainer.report.heat import draw_underflow
from trainer.report.reading import Curve, Run

# Colour and marker of each cause, in the order in which a step looks.
CAUSES = {
    "weights": (BLACK, "X"),
    "forward": (ORANGE, "D"),
    "backward": (VERMILLION, "v"),
    "reduction": (GREEN, "s"),
    "unscaling": (PURPLE, "^"),
    "model": (SKY, "o"),
}
OTHER = (GRAY, "*")  # a cause that a later version may know
FEW = 60  # so many points are shown as points, too
CROWD = 200  # more marks than these are small and plain
MANY = 1500  # more points than these are shown as a band


def draw_all(run: Run) -> dict[str, Picture]:
    """Returns the pictures of all that the run has recorded, by name."""
    drawn = {
        "loss": draw_curves(run),
        "loss_scale": draw_scale(run),
        "headroom": draw_headroom(run),
        "underflow": draw_underflow(run.underflow, run.last_step),
        "gradient_norm": draw_norm(run),
    }
    return {name: picture for name, picture in drawn.items() if picture is not None}


def plot(axes: Axes, curve: Curve, color: str, **style: Any) -> None:
    """Draws a curve, its points marked if they are few."""
    style = dict[str, Any](marker="o", markersize=4) | style
    if curve.step.size > FEW:
        style["marker"] = ""
    axes.plot(curve.step, curve.value, color=color, **style)


def fit_scale(axes: Axes, curves: list[Curve]) -> None:
    """Makes the axis logarithmic if the values are positive and far apart."""
    values = np.concatenate([curve.value for curve in curves])
    values = values[~np.isnan(values)]
    if values.size and values.min() > 0 and values.max() > 20 * values.min():
        axes.set_yscale("log")


def draw_curves(run: Run) -> Picture | None:
    """Draws the loss and each metric, training and validation on the same axes."""
    names = [name for name in run.train if name not in NOT_METRICS - {"loss"}]
    names += [name for name in run.validation if name not in names]
    if not names:
        return None
    figure, axes = panels([2.5] + [1.8] * (len(names) - 1), top=0.38)
    for one, name in zip(axes, names, strict=True):
        shown = []
        for results, color, label in (
            (run.train, BLUE, "training"),
            (run.validation, VERMILLION, "validation"),
        ):
            if name in results:
                shown.append(results[name])
                marker = "o" if label == "training" else "D"
                plot(one, results[name], color, label=label, marker=marker)
        penalty = run.train.get("regularization_loss")
        if name == "loss" and penalty is not None and np.nansum(np.abs(penalty.value)):
            plot(one, penalty, GRAY, label="regularization", linestyle=":", marker="")
        fit_scale(one, shown)
        headline(one, name)
        legend(one)
    dress(axes, run)
    told = [
        f"{split} {name} ends at {last(results[name]):.4g}"
        for name in names
        for split, results in (("training", run.train), ("validation", run.validation))
        if name in results
    ]
    return finish(figure, "loss", f"Curves over {run.last_step:,} steps: {'; '.join(told)}.")


def draw_scale(run: Run) -> Picture | None:
    """Draws the loss scale as a staircase, with every skip where it happened."""
    scale, exact = scale_path(run)
    if not scale.step.size:
        return None
    figure, axes = panels([3.1], top=0.38)
    [one] = axes
    steps = np.append(scale.step, max(run.last_step, scale.step[-1]))
    powers = np.log2(np.append(scale.value, scale.value[-1]))
    style: dict[str, Any] = (
        {"drawstyle": "steps-post"} if exact else {"linestyle": ":", "marker": "."}
    )
    width = 0.6 if scale.step.size > CROWD else 1.6
    one.plot(steps, powers, color=BLUE, linewidth=width, **style)
    counts = mark_skips(one, run)
    margin = 0.6 if np.ptp(powers) > 1 else 1.6  # a scale that stands still has ticks, too
    one.set_ylim(powers.min() - margin, powers.max() + margin)
    powers_of_two(one)
    one.set_ylabel("loss scale")
    legend(one)
    dress(axes, run)
    skipped = ", ".join(f"{count:,} by {cause}" for cause, count in counts.items()) or "none"
    first, highest, lowest = scale.value[0], scale.value.max(), scale.value.min()
    return finish(
        figure,
        "loss_scale",
        f"The loss scale over {run.last_step:,} steps: from {power_of_two(first)} to "
        f"{power_of_two(scale.value[-1])}, between {power_of_two(lowest)} and "
        f"{power_of_two(highest)}. Skipped steps: {skipped}.",
    )


def mark_skips(axes: Axes, run: Run) -> collections.Counter[str]:
    """Marks every skip by its cause, at the scale it used; returns how many there are of each."""
    counts = collections.Counter(skip.cause for skip in run.skips)
    if counts:
        axes.plot([], [], " ", label="skipped:")  # the legend's first word
    crowded = len(run.skips) > CROWD
    for cause in [name for name in (*CAUSES, *sorted(set(counts) - set(CAUSES))) if counts[name]]:
        color, marker = CAUSES.get(cause, OTHER)
        skips = [skip for skip in run.skips if skip.cause == cause]
        axes.scatter(
            [skip.step for skip in skips],
            np.log2([skip.loss_scale for skip in skips]),
            color=color,
            marker=marker,
            s=14 if crowded and len(skips) > CROWD // 4 else 42,
            edgecolors="white",
            linewidths=0 if crowded else 0.6,
            zorder=3 + 1 / len(skips),  # the rare lie upon the many
            label=f"{len(skips):,} {cause}",
        )
    return counts


def draw_headroom(run: Run) -> Picture | None:
    """Draws how far below the largest float16 each step's largest scaled gradient stayed."""
    if run.record is None:
        return None
    room = headroom(run.record)
    if not room.step.size:
        return None
    figure, axes = panels([2.7], top=0.38)
    [one] = axes
    if room.step.size > MANY:
        bands = np.array_split(np.arange(room.step.size), MANY // 3)
        step = [room.step[band[0]] for band in bands]
        low, mid, high = (
            [float(of(room.value[band])) for band in bands] for of in (np.min, np.median, np.max)
        )
        one.fill_between(step, low, high, color=SKY, alpha=0.5, linewidth=0, label="all steps")
        one.plot(step, mid, color=BLUE, linewidth=1.2, label="median")
    else:
        plot(one, room, BLUE, linewidth=1.2, label="headroom")
    full = run.record.step[np.isin(run.record.cause, [Cause.BACKWARD, Cause.REDUCTION])]
    if full.size:
        label = "skipped, its size unknown"
        marker = "|" if full.size > CROWD else "x"
        one.plot(full, np.zeros(full.size), marker, color=VERMILLION, label=label, zorder=3)
    one.axhline(0, color=VERMILLION, linewidth=1.2, linestyle="--", label="overflow")
    one.axhline(HEADROOM_BITS, color=GRAY, linewidth=1, linestyle=":", label="recommended at least")
    one.set_ylim(min(0, room.value.min()) - 1, max(HEADROOM_BITS, room.value.max()) + 1)
    one.set_ylabel("bits")
    legend(one)
    dress(axes, run)
    return finish(
        figure,
        "headroom",
        f"Headroom below {HALF_MAX:.0f} in bits: from {room.value.min():.1f} to "
        f"{room.value.max():.1f}, {room.value[-1]:.1f} at the end.",
    )


def draw_norm(run: Run) -> Picture | None:
    """Draws the mean global norm of the gradients between two log lines."""
    norm = run.train.get("gradient_norm")
    if norm is None or np.isnan(norm.value).all():
        return None
    figure, axes = panels([2.2], top=0.15)
    plot(axes[0], norm, BLUE, linewidth=1.4)
    fit_scale(axes[0], [norm])
    axes[0].set_ylabel("gradient norm")
    dress(axes, run)
    return finish(
        figure,
        "gradient_norm",
        f"The gradients' global norm: from {np.nanmin(norm.value):.3g} to "
        f"{np.nanmax(norm.value):.3g}, {last(norm):.3g} at the end.",
    )
