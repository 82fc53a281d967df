"""Simulates rules on a run's recorded gradients, to choose the rule of the next run.

    python -m scaling.simulate RUN/metrics.jsonl --rules=dynamic,headroom,pytorch

For each rule, this prints how many steps the rule would have skipped, how many it would have spent
below the best fixed scale (the largest scale at which no step overflows), and what fraction of the
gradients' elements float16 would have flushed to zero. The program also plots the scales into
RUN/scales.png. The run must have been trained with `record_gradients=True`. The assumptions of the
simulation are listed in `scaling/telemetry/simulate_rules.py`.
"""

import itertools
import math
import pathlib
import sys
from typing import Any

import numpy as np
from absl import app, flags

from scaling.telemetry.record import Record, read_record
from scaling.telemetry.simulate_rules import Outcome, best_fixed_scale, compare, unexplained

RULES = flags.DEFINE_list(
    "rules",
    ["dynamic", "headroom", "logmax"],
    "Comma-separated loss-scale rules to simulate, such as dynamic, pytorch or 2^16; see "
    "scaling.parse_rule. A rule with commas of its own goes into double quotes.",
)
PLOT = flags.DEFINE_string(
    "plot",
    None,
    "File for the plot of the scales, by default scales.png beside the metrics; empty for no plot.",
)


def table(record: Record, outcomes: list[Outcome]) -> str:
    """Returns the outcomes as a text table, with notes on what the figures leave out."""
    best = f"2^{math.log2(best_fixed_scale(record)):.0f}"
    width = max(len(outcome.name) for outcome in outcomes)
    lines = [
        f"{len(record.step)} steps in {record.precision}; best fixed scale: {best}",
        f"{'rule':<{width}}  skipped  below {best:<5}  lost to underflow  last scale",
    ]
    is_float16 = record.precision == "mixed_float16"
    for index, outcome in enumerate(outcomes):
        last = f"2^{math.log2(outcome.loss_scale[-1]):.0f}"
        unknown = (is_float16 and index == 0) or math.isnan(outcome.lost)
        lost = "-" if unknown else f"{outcome.lost:.3%}"
        lines.append(
            f"{outcome.name:<{width}}  {int(outcome.skipped.sum()):>7}  {outcome.below_best:>11}"
            f"  {lost:>17}  {last:>10}"
        )
    if is_float16:
        lines.append("Lost to underflow: not counting what float16 flushed before it was recorded.")
    overflowed, hidden = unexplained(record)
    if hidden:
        lines.append(
            f"{hidden} of {overflowed} overflows came at scales at which the gradients of the "
            "weights fit, so those of activations were larger, or the batches were unusual: rules "
            "may skip more steps in reality."
        )
    if record.shares > 1:
        lines.append(
            f"Magnitudes were measured on sums over {record.shares} parts of a batch, but float16 "
            "holds one part at a time, so fewer steps may overflow in reality."
        )
    return "\n".join(lines)


def draw(record: Record, outcomes: list[Outcome], path: str | pathlib.Path) -> Any:
    """Plots each rule's scale over the steps, with a cross at each skipped step, into a file.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # of the extra "plot"

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    styles = itertools.cycle(["-", "--", "-.", ":"])  # to tell overlapping lines apart
    for outcome, style in zip(outcomes, styles, strict=False):
        exponents, skipped = np.log2(outcome.loss_scale), outcome.skipped
        [line] = axes.step(record.step, exponents, style, where="post", label=outcome.name)
        axes.plot(record.step[skipped], exponents[skipped], "x", color=line.get_color())
    best = math.log2(best_fixed_scale(record))
    axes.axhline(best, color="lightgray", linewidth=4, zorder=0, label="best fixed scale")
    axes.set(
        xlabel="step", ylabel="loss scale", title="Loss scale by rule; a cross is a skipped step"
    )
    axes.yaxis.set_major_formatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    return figure


def main(arguments: list[str]) -> None:
    """Runs the program: prints the table and plots the scales."""
    if len(arguments) != 2:
        raise app.UsageError("Pass one file: python -m scaling.simulate RUN/metrics.jsonl")
    metrics = pathlib.Path(arguments[1])
    try:
        record = read_record(metrics)
        outcomes = compare(record, RULES.value)
        print(table(record, outcomes))
        plot = metrics.with_name("scales.png") if PLOT.value is None else PLOT.value
        if plot:
            draw(record, outcomes, plot)
            print(f"Plot written to {plot}")
    except (OSError, TypeError, ValueError, ModuleNotFoundError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    app.run(main)
