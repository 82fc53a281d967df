"""What the page says in words and numbers: from a run to what stands in its header and tables."""

import collections
import math
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import scaling
from scaling.base.number_formats import HALF_MAX
from scaling.telemetry.play import best_fixed_scale
from scaling.telemetry.recommend import describe_share
from scaling.telemetry.record import Record
from scaling.telemetry.stats import GradientStats
from trainer.log.summary import format_bytes, power_of_two
from trainer.report.reading import Curve, Run

# What a "train" line holds besides the metrics.
NOT_METRICS = {
    "loss",
    "regularization_loss",
    "gradient_norm",
    "loss_scale",
    "applied",
    "skipped",
    "examples_per_second",
    "steps_per_second",
    "data_wait",
}
HEADROOM_BITS = 4  # what `scaling.recommend` leaves


class Tile(NamedTuple):
    """A number in the header, what it is, and what else there is to say of it."""

    label: str
    value: str
    note: str = ""


def tiles(run: Run) -> list[Tile]:
    """Returns the numbers that a reader wants first."""
    applied, skipped = (last(run.train.get(name)) for name in ("applied", "skipped"))
    causes = collections.Counter(skip.cause for skip in run.skips)
    by_cause = ", ".join(f"{count:,} {cause}" for cause, count in causes.most_common())
    scale, exact = scale_path(run)
    speed = run.train.get("examples_per_second")
    wait = run.train.get("data_wait")
    none = "not recorded"
    return [
        Tile("step reached", f"{run.last_step:,}", how_it_ended(run)),
        Tile("updates applied", count(applied), attempted(applied, skipped)),
        Tile("steps skipped", count(skipped), by_cause),
        Tile("loss scale at the end", power_of_two(scale.value[-1]), between(scale, exact))
        if scale.step.size
        else Tile("loss scale at the end", none),
        best(run),
        Tile("examples a second", count(middle(speed)), "the median of the log's lines"),
        Tile("waiting for data", share(mean(wait)), "of the time, on average"),
        began(run),
    ]


def last(curve: Curve | None) -> float:
    """Returns the last value that is a number, or NaN."""
    known = curve.value[~np.isnan(curve.value)] if curve else np.zeros(0)
    return float(known[-1]) if known.size else math.nan


def middle(curve: Curve | None) -> float:
    """Returns the median, or NaN."""
    return float(np.nanmedian(curve.value)) if not math.isnan(last(curve)) and curve else math.nan


def mean(curve: Curve | None) -> float:
    """Returns the mean, or NaN."""
    return float(np.nanmean(curve.value)) if not math.isnan(last(curve)) and curve else math.nan


def count(value: float) -> str:
    """Returns a count as people read it.

    Example:
        >>> count(12345.0), count(float("nan"))
        ('12,345', 'not recorded')
    """
    return "not recorded" if math.isnan(value) else f"{value:,.0f}"


def share(value: float) -> str:
    """Returns a share as people read it."""
    return "not recorded" if math.isnan(value) else f"{value:.1%}"


def attempted(applied: float, skipped: float) -> str:
    """Says of how many steps these were the applied ones."""
    if math.isnan(applied + skipped):
        return ""
    return f"of {applied + skipped:,.0f} attempted, at the last log line"


def how_it_ended(run: Run) -> str:
    """Says how the last call of `train` ended, as far as the file knows."""
    if run.end is None:
        return "no end is recorded: it runs on, or was killed" if run.starts else ""
    how = "stopped on request" if run.end.stopped else "ended"
    return f"{how} after {duration(run.end.seconds)}"


def duration(seconds: float) -> str:
    """Returns a time span as people say it.

    Example:
        >>> duration(27.46), duration(754), duration(7260)
        ('27.5 s', '12 min 34 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def best(run: Run) -> Tile:
    """Returns the best evaluation, or else the lowest training loss.

    Which is best is what the run's own `best_metric` and `best_is` say.
    """
    settings = run.starts[-1].settings if run.starts else {}
    name, direction = settings.get("best_metric", "loss"), settings.get("best_is", "lowest")
    split, results = ("validation", run.validation) if run.validation else ("training", run.train)
    curve = results.get(name)
    if curve is None or math.isnan(last(curve)):
        return Tile("best loss", "not recorded")
    place = int((np.nanargmax if direction == "highest" else np.nanargmin)(curve.value))
    step = int(curve.step[place])
    others = [
        f"{other} {result:.4g}"
        for other, values in results.items()
        if other not in (NOT_METRICS - {"loss"}) | {name}
        for result in values.value[(values.step == step) & ~np.isnan(values.value)]
    ]
    value = f"{curve.value[place]:.4g}"
    return Tile(f"{direction} {split} {name}", value, ", ".join([f"at step {step:,}", *others]))


def between(scale: Curve, exact: bool) -> str:
    """Says within what a loss scale has moved, as far as that is known."""
    lowest, highest = scale.value.min(), scale.value.max()
    if lowest == highest:
        return "it never moved" if exact else ""
    return f"between {power_of_two(lowest)} and {power_of_two(highest)}"


def began(run: Run) -> Tile:
    """Returns when the run began, how often it was started again, and how often taken back."""
    if not run.starts:
        return Tile("began", "not recorded")
    day, _, clock = moment(run.starts[0].time).partition(" ")
    said = [f"at {clock}"] if clock else []
    again = len(run.starts) - 1
    if again:
        said.append(f"taken up again {times(again)}, last {moment(run.starts[-1].time)}")
    if run.recoveries:
        said.append(f"taken back {times(len(run.recoveries))}")
    return Tile("began", day, "; ".join(said))


def moment(text: str) -> str:
    """Returns a time of ISO 8601 as people read it, in UTC; any other text as it is.

    Example:
        >>> moment("2026-11-22T03:30:00+01:00")
        '2026-11-22 02:30 UTC'
    """
    try:
        time = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, TypeError):
        return str(text)
    return f"{time:%Y-%m-%d %H:%M} UTC"


def times(number: int) -> str:
    """Returns how often, in words.

    Example:
        >>> times(1), times(3)
        ('once', '3 times')
    """
    return "once" if number == 1 else f"{number:,} times"


def scale_path(run: Run) -> tuple[Curve, bool]:
    """Returns the loss scale over the steps, and whether it is known at every step.

    The lines of its changes know it, and so do recorded gradients; a run of an older version has
    only what its log lines and its skips say.
    """
    if run.scale.step.size:
        return run.scale, True
    if run.record is not None:
        scale = run.record.loss_scale.astype(np.float64)
        moved = np.flatnonzero(np.diff(scale, prepend=np.nan) != 0)
        return Curve(run.record.step[moved], scale[moved]), True
    known = {skip.step: skip.loss_scale for skip in run.skips}
    if "loss_scale" in run.train:
        lines = run.train["loss_scale"]
        known |= dict(zip(lines.step.tolist(), lines.value.tolist(), strict=True))
    steps = sorted(step for step, scale in known.items() if scale > 0)
    return Curve(np.array(steps, np.int64), np.array([known[step] for step in steps])), False


def headroom(record: Record) -> Curve:
    """Returns, for each applied step, how many factors of two its largest gradient stayed below
    the largest float16; steps whose gradients were all zero are left out.
    """
    scaled = record.max_magnitude.astype(np.float64) * record.loss_scale
    known = scaled > 0  # NaN, of a skipped step, is not
    return Curve(record.step[known], np.log2(HALF_MAX / scaled[known]))


class Advice(NamedTuple):
    """Which loss scale the recorded gradients ask for."""

    recommended: str  # "2^13"
    largest: str  # the largest gradient
    lost: str  # "0.40%"
    best_fixed: str
    blind: bool  # whether float16 had already flushed what the record cannot show
    shares: int


def advise(record: Record) -> Advice | None:
    """Returns what `scaling.recommend` says of a whole run; None if no step was applied."""
    applied = record.max_magnitude[~record.skipped]
    if not applied.size:
        return None
    stats = GradientStats(
        loss_scale=tf.constant(record.loss_scale[-1]),
        counts=tf.constant(record.counts.sum(axis=0, dtype=np.float64)[None], tf.float32),
        max_magnitude=tf.constant([applied.max()]),
    )
    recommended = scaling.recommend(stats, headroom_bits=HEADROOM_BITS)
    lost = next(iter(recommended.lost.values()), 0.0)
    return Advice(
        recommended=power_of_two(recommended.loss_scale),
        largest=f"{applied.max():.3g}",
        lost=describe_share(lost) if lost else "none",
        best_fixed=power_of_two(best_fixed_scale(record)),
        blind=record.precision == "mixed_float16",
        shares=record.shares,
    )


def settings_rows(run: Run) -> list[tuple[str, str, str]]:
    """Returns (name, value, value at the first start if it was another) for each setting."""
    if not run.starts:
        return []
    first, now = run.starts[0].settings, run.starts[-1].settings
    return [
        (name, str(value), "" if first.get(name, value) == value else str(first[name]))
        for name, value in now.items()
    ]


def model_rows(run: Run) -> list[dict[str, Any]]:
    """Returns the model's variables as a table shows them."""
    return [
        {
            "name": row["name"],
            "shape": " x ".join(str(length) for length in row["shape"]) or "scalar",
            "dtype": row["dtype"],
            "compute_dtype": row["compute_dtype"],
            "parameters": f"{row['parameters']:,}",
            "bytes": format_bytes(row["bytes"]),
        }
        for row in (run.starts[-1].model if run.starts else [])
    ]


def model_totals(run: Run) -> tuple[str, str]:
    """Returns how many parameters the model has, and their size."""
    rows = run.starts[-1].model if run.starts else []
    return f"{sum(row['parameters'] for row in rows):,}", format_bytes(
        sum(row["bytes"] for row in rows)
    )
