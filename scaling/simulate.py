"""Which rule for the next run? Plays rules over the gradients that a run has recorded.

    python -m scaling.simulate RUN/metrics.jsonl --rules=dynamic,headroom,pytorch

prints for each rule how many steps it would have skipped, how many it would have spent below
the best fixed scale (the largest at which none would have been skipped), and what share of the
gradients' elements float16 would have flushed to zero; and draws the scales into
RUN/scales.png. The run must have been trained with `record_gradients=True`; what is assumed
stands in `scaling/play.py`.
"""

import itertools
import math
import pathlib
import sys
from typing import Any

import numpy as np
from absl import app, flags

from scaling.telemetry.play import Outcome, best_fixed_scale, compare
from scaling.telemetry.record import Record, read_record

RULES = flags.DEFINE_list(
    "rules", ["dynamic", "headroom", "logmax"], "Rules to play, as scaling.parse_rule takes them."
)
PLOT = flags.DEFINE_string("plot", None, "Picture file; by default scales.png beside the metrics.")


def table(record: Record, outcomes: list[Outcome]) -> str:
    """Returns the comparison as people read it."""
    best = f"2^{math.log2(best_fixed_scale(record)):.0f}"
    width = max(len(outcome.name) for outcome in outcomes)
    lines = [
        f"{len(record.step)} steps in {record.precision}; best fixed scale: {best}",
        f"{'rule':<{width}}  skipped  below {best:<5}  lost to underflow  last scale",
    ]
    blind = record.precision == "mixed_float16"
    for index, outcome in enumerate(outcomes):
        last = f"2^{math.log2(outcome.loss_scale[-1]):.0f}"
        lost = "-" if blind and index == 0 else f"{outcome.lost:.3%}"
        lines.append(
            f"{outcome.name:<{width}}  {int(outcome.skipped.sum()):>7}  {outcome.below_best:>11}"
            f"  {lost:>17}  {last:>10}"
        )
    if blind:
        lines.append("Lost: besides what the run's own float16 had already flushed, unseen.")
    if record.shares > 1:
        lines.append(
            f"Magnitudes are of sums over {record.shares} shares of a batch; float16 holds one "
            "share at a time, so that fewer steps may overflow."
        )
    return "\n".join(lines)


def draw(record: Record, outcomes: list[Outcome], path: str | pathlib.Path) -> Any:
    """Draws each rule's scale over the steps, its skips marked, into a picture file.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ModuleNotFoundError: if matplotlib is missing, naming the extra that brings it.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "matplotlib is needed to draw the scales; it is not installed. It comes with an extra "
            "of its own. Run pip install 'halfstep[plot]', or pass --plot= for no picture."
        ) from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    styles = itertools.cycle(["-", "--", "-.", ":"])  # rules that agree lie upon each other
    for outcome, style in zip(outcomes, styles, strict=False):
        exponents, skipped = np.log2(outcome.loss_scale), outcome.skipped
        [line] = axes.step(record.step, exponents, style, where="post", label=outcome.name)
        axes.plot(record.step[skipped], exponents[skipped], "x", color=line.get_color())
    best = math.log2(best_fixed_scale(record))
    axes.axhline(best, color="lightgray", linewidth=4, zorder=0, label="best fixed scale")
    axes.set(
        xlabel="step", ylabel="loss scale", title="Loss scale by rule; a cross is a skipped step"
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$"))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    return figure


def main(arguments: list[str]) -> None:
    """Reads the command line, prints the table and draws the picture."""
    if len(arguments) != 2:
        raise app.UsageError("give one file: python -m scaling.simulate RUN/metrics.jsonl")
    metrics = pathlib.Path(arguments[1])
    picture = metrics.with_name("scales.png") if PLOT.value is None else PLOT.value
    try:
        record = read_record(metrics)
        outcomes = compare(record, RULES.value)
        print(table(record, outcomes))
        if picture:
            draw(record, outcomes, picture)
            print(f"drawn in {picture}")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    app.run(main)
