"""The table and the picture of simulated float8 rules."""

import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from scaling.float8.formats import format_of
from scaling.telemetry.float8_record import Float8Record, TensorRecord
from scaling.telemetry.output import new_figure, printable, save_figure
from scaling.telemetry.simulate_float8 import Float8Outcome

LONGEST_NAME = 60  # characters
MOST_PICTURES = 4
HEADINGS = ("saturated", "unused bits", "scale moves")


def float8_table(record: Float8Record, outcomes: Sequence[Sequence[Float8Outcome]]) -> str:
    """Returns the outcomes as a text table: first of all tensors together, then of each.

    Args:
        record: the recorded tensors.
        outcomes: for each tensor, the outcomes as `compare_float8` returns them.
    """
    width = max(len(printable(outcome.rule)) for outcome in outcomes[0]) + 2
    first = min(int(tensor.step[0]) for tensor in record.tensors)
    last = max(int(tensor.step[-1]) for tensor in record.tensors)
    lines = [
        f"{len(record.tensors)} float8 tensors, steps {first} to {last}",
        "  ".join([" " * width, *HEADINGS]),
        "all tensors",
        *(row(together, width) for together in zip(*outcomes, strict=True)),
    ]
    for tensor, own in zip(record.tensors, outcomes, strict=True):
        lines += [heading(tensor), *(row([outcome], width) for outcome in own)]
    lines.append(
        "Saturated counts the steps whose largest magnitude was beyond the format. In the others, "
        "the scale left so many factors of two above it unused, on average: unused bits."
    )
    distance = max(np.max(np.diff(tensor.step), initial=1) for tensor in record.tensors)
    if distance > 1:
        lines.append(
            f"Lines are up to {distance} steps apart. Unless the steps between them were skipped, "
            "what happened there is not known. The rules take each line for one step: a history of "
            "16 is one of 16 lines."
        )
    if record.left_out:
        lines.append(f"{record.left_out} more tensors were left out.")
    return "\n".join(lines)


def heading(tensor: TensorRecord) -> str:
    """Returns the line above a tensor's rows: its name, and what happened to its numbers."""
    shares = [
        f"{np.nanmean(share):.3%} {verb}"
        for share, verb in ((tensor.saturated, "saturated"), (tensor.flushed, "became 0"))
        if not np.isnan(share).all()
    ]
    told = f": of its numbers, {' and '.join(shares)}" if shares else ""
    return f"{short(tensor.name)}, {tensor.dtype}{told}"


def row(outcomes: Sequence[Float8Outcome], width: int) -> str:
    """Returns the line of one rule, for one tensor or for several together.

    Args:
        outcomes: of one rule, for each tensor.
        width: characters of the first column.
    """
    bits = np.concatenate([outcome.unused_bits for outcome in outcomes])
    lost = f"{np.nanmean(bits):.2f}" if not np.isnan(bits).all() else "-"
    saturated = sum(int(outcome.saturated.sum()) for outcome in outcomes)
    moves = sum(outcome.moves for outcome in outcomes)
    cells = [
        f"{text:>{len(name)}}"
        for text, name in zip((str(saturated), lost, str(moves)), HEADINGS, strict=True)
    ]
    return "  ".join([f"  {printable(outcomes[0].rule)}".ljust(width), *cells])


def short(name: str) -> str:
    """Returns a name for the terminal, without the middle if it is long.

    Example:
        >>> short("a" * 40 + "/" + "b" * 40)
        'aaaaaaaaaaaaaaaaaaaaaaaaaaaaa...bbbbbbbbbbbbbbbbbbbbbbbbbbbb'
    """
    name = printable(name[: 2 * LONGEST_NAME] + name[2 * LONGEST_NAME :][-LONGEST_NAME:])
    half = LONGEST_NAME // 2 - 1
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}...{name[1 - half :]}"


def draw_float8(
    record: Float8Record,
    outcomes: Sequence[Sequence[Float8Outcome]],
    path: str | pathlib.Path,
) -> Any:
    """Plots the scales of a few tensors into a file: the worst first, as `rank` says.

    A gray line shows the scale at which a step's largest magnitude is the largest number of the
    format. A cross is a step that saturates.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        OSError: if the file cannot be written.
        ValueError: if matplotlib does not have the file's format.
    """
    chosen = sorted(range(len(outcomes)), key=lambda place: rank(outcomes[place]))[:MOST_PICTURES]
    figure = new_figure(figsize=(8, 1 + 2.5 * len(chosen)))
    all_axes = figure.subplots(len(chosen), squeeze=False)[:, 0]
    for axes, place in zip(all_axes, chosen, strict=True):
        draw_tensor(axes, record.tensors[place], outcomes[place])
    all_axes[-1].set_xlabel("step")
    lines, labels = all_axes[0].get_legend_handles_labels()
    legend = figure.legend(lines, labels, loc="outside upper center", ncols=3, fontsize="small")
    for text in legend.get_texts():
        text.set_parse_math(False)
    save_figure(figure, path)
    return figure


def rank(outcomes: Sequence[Float8Outcome]) -> tuple[float, float]:
    """Returns what tensors are sorted by, so that the worst come first."""
    bits = [
        np.nanmean(each.unused_bits) for each in outcomes if not np.isnan(each.unused_bits).all()
    ]
    return -max(each.saturated.sum() for each in outcomes), -max(bits, default=0.0)


def draw_tensor(axes: Any, tensor: TensorRecord, outcomes: Sequence[Float8Outcome]) -> None:
    """Plots the scales of one tensor."""
    largest = math.log2(format_of(tensor.dtype).largest)
    axes.plot(
        tensor.step,
        log2(tensor.amax) - largest,
        color="lightgray",
        linewidth=4,
        label="amax / largest number",
    )
    styles = itertools.cycle(["-", "--", "-.", ":"])  # to tell overlapping lines apart
    for outcome, style in zip(outcomes, styles, strict=False):
        exponents, saturated = log2(outcome.scale), outcome.saturated
        label = ascii_of(outcome.rule)
        [line] = axes.step(tensor.step, exponents, style, where="post", label=label)
        axes.plot(tensor.step[saturated], exponents[saturated], "x", color=line.get_color())
    axes.set_title(f"{ascii_of(tensor.name)}, {tensor.dtype}", fontsize="medium", parse_math=False)
    axes.set_ylabel("scale")
    axes.yaxis.set_major_formatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$")
    axes.grid(alpha=0.3)


def log2(x: np.ndarray) -> np.ndarray:
    """Returns exponents; NaN, which is not drawn, for 0."""
    with np.errstate(divide="ignore"):
        exponents = np.log2(x.astype(np.float64))
    return np.where(np.isfinite(exponents), exponents, np.nan)


def ascii_of(name: str) -> str:
    """Returns a name for a picture: not every font has other characters."""
    return short(name.encode("ascii", "backslashreplace").decode())
