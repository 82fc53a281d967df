"""The numbers and sentences of the page: header, recommended scale, settings, and model."""

import collections
import math
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import scaling
from scaling.base.number_formats import HALF_MAX, SMALLEST_SCALE
from scaling.telemetry.record import Record
from scaling.telemetry.simulate_rules import best_fixed_scale
from scaling.telemetry.stats import GradientStats, describe_share, flushed_share
from trainer.log.model_table import flattened
from trainer.log.summary import INTERVAL_NUMBERS, power_of_two
from trainer.report.reading import Curve, Run

LEARNING_RATE = "learning_rate"  # its fields are "learning_rate" or "learning_rate/OPTIMIZER"
HEADROOM_BITS = 4  # the default of `scaling.recommend`
NOT_RECORDED = "not recorded"  # shown instead of a value


def is_metric(name: str) -> bool:
    """Returns whether a field of a "train" line is the loss or a metric of the user."""
    own = {*INTERVAL_NUMBERS} - {"loss"}
    return name not in own and name.split("/", maxsplit=1)[0] != LEARNING_RATE


class Tile(NamedTuple):
    """A value in the header of the page."""

    label: str
    value: str
    note: str = ""


def tiles(run: Run) -> list[Tile]:
    """Returns the values of the header."""
    applied, skipped = (last(run.train.get(name)) for name in ("applied", "skipped"))
    attempted = applied + skipped
    known = (
        ""
        if math.isnan(attempted)
        else f"of {attempted:,.0f} attempted steps, at the last log line"
    )
    speed = median(run.train.get("examples_per_second"))
    wait = mean(run.train.get("data_wait"))
    return [
        Tile("step reached", f"{run.last_step:,}", describe_end(run)),
        Tile("updates applied", format_count(applied), known),
        Tile("steps skipped", format_count(skipped), describe_skips(run)),
        scale_tile(run),
        best_tile(run),
        Tile("examples per second", format_count(speed), "median of the log lines"),
        Tile(
            "waiting for data",
            NOT_RECORDED if math.isnan(wait) else f"{wait:.1%}",
            "of the time, on average",
        ),
        start_tile(run),
    ]


def describe_skips(run: Run) -> str:
    """Returns the causes of the skipped steps, and the number of retries, as text."""
    causes = collections.Counter(skip.cause for skip in run.skips)
    parts = [f"{count:,} {cause}" for cause, count in causes.most_common()]
    if repeated := sum(retry.retries for retry in run.retries):
        parts.append(f"{repeated:,} {'retry' if repeated == 1 else 'retries'}")
    return ", ".join(parts)


def last(curve: Curve | None) -> float:
    """Returns the last value that is not NaN, or NaN if there is none."""
    known = curve.value[~np.isnan(curve.value)] if curve else np.zeros(0)
    return float(known[-1]) if known.size else math.nan


def median(curve: Curve | None) -> float:
    """Returns the median of the values that are not NaN, or NaN if there is none."""
    return float(np.nanmedian(curve.value)) if curve and not math.isnan(last(curve)) else math.nan


def mean(curve: Curve | None) -> float:
    """Returns the mean of the values that are not NaN, or NaN if there is none."""
    return float(np.nanmean(curve.value)) if curve and not math.isnan(last(curve)) else math.nan


def format_count(value: float) -> str:
    """Returns a count as text.

    Example:
        >>> format_count(12345.0), format_count(float("nan"))
        ('12,345', 'not recorded')
    """
    return NOT_RECORDED if math.isnan(value) else f"{value:,.0f}"


def describe_end(run: Run) -> str:
    """Returns a sentence about how the last call to `train` ended, or "" if nothing is known."""
    if run.failure is not None:
        return f"ended by {run.failure.error.partition(':')[0]}"
    if run.end is None:
        return "still running, or killed: no end is recorded" if run.starts else ""
    how = "stopped on request" if run.end.stopped else "ended"
    return f"{how} after {format_duration(run.end.seconds)}"


def format_duration(seconds: float) -> str:
    """Returns a time span as text.

    Example:
        >>> format_duration(27.46), format_duration(754), format_duration(7260)
        ('27.5 s', '12 min 34 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def scale_tile(run: Run) -> Tile:
    """Returns the last loss scale, and the range of its values."""
    if not run.scale.step.size:
        return Tile("loss scale at the end", NOT_RECORDED)
    lowest, highest = run.scale.value.min(), run.scale.value.max()
    moved = f"between {power_of_two(lowest)} and {power_of_two(highest)}"
    note = "never changed" if lowest == highest else moved
    return Tile("loss scale at the end", power_of_two(run.scale.value[-1]), note)


def best_tile(run: Run) -> Tile:
    """Returns the best evaluation, or the best training result if there was no evaluation.

    The run's settings `best_metric` and `best_is` define which result is best.
    """
    settings = run.starts[-1].settings if run.starts else {}
    name = str(settings.get("best_metric", "loss"))
    direction = "highest" if settings.get("best_is") == "highest" else "lowest"
    split, results = ("validation", run.validation) if run.validation else ("training", run.train)
    named = (result for result in results if result.endswith(f"/{name}"))  # several data sets
    name = name if name in results else next(named, name)
    curve = results.get(name)
    if curve is None or math.isnan(last(curve)):
        return Tile("best loss", NOT_RECORDED)
    index = int((np.nanargmax if direction == "highest" else np.nanargmin)(curve.value))
    step = int(curve.step[index])
    others = [
        f"{other} {result:.4g}"
        for other, values in results.items()
        if is_metric(other) and other != name
        for result in values.value[(values.step == step) & ~np.isnan(values.value)]
    ]
    value = f"{curve.value[index]:.4g}"
    return Tile(f"{direction} {split} {name}", value, ", ".join([f"at step {step:,}", *others]))


def start_tile(run: Run) -> Tile:
    """Returns when the run started, and how often it was resumed and rolled back."""
    if not run.starts:
        return Tile("started", NOT_RECORDED)
    day, _, clock = format_time(run.starts[0].time).partition(" ")
    notes = [f"at {clock}"]
    if resumed := len(run.starts) - 1:
        latest = format_time(run.starts[-1].time)
        notes.append(f"resumed {format_times(resumed)}, last at {latest}")
    if run.recoveries:
        notes.append(f"rolled back {format_times(len(run.recoveries))}")
    return Tile("started", day, "; ".join(notes))


def format_time(text: str) -> str:
    """Returns a time in ISO 8601 as text in UTC.

    Example:
        >>> format_time("2026-11-22T03:30:00+01:00")
        '2026-11-22 02:30 UTC'
    """
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def format_times(number: int) -> str:
    """Returns a number of times as text.

    Example:
        >>> format_times(1), format_times(3)
        ('once', '3 times')
    """
    return "once" if number == 1 else f"{number:,} times"


def headroom(record: Record) -> Curve:
    """Returns the headroom of each applied step, in bits.

    The headroom is log2 of the largest float16 divided by the largest scaled gradient. Steps
    whose gradients were all zero are left out.
    """
    scaled = record.max_magnitude.astype(np.float64) * record.loss_scale
    known = scaled > 0  # false for the NaN of a skipped step
    return Curve(record.step[known], np.log2(HALF_MAX / scaled[known]))


class Advice(NamedTuple):
    """The loss scale that the recorded gradients call for."""

    recommended: str  # such as "2^13"
    largest: str  # magnitude of the largest gradient of an applied step
    bound_by_skips: bool  # whether steps that overflowed ask for a smaller scale than this one
    lost: str  # share of elements that float16 would flush to zero, such as "0.40%"
    best_fixed: str  # largest scale at which no step overflows, such as "2^15"
    gradients_were_float16: bool  # float16 may have flushed elements before they were recorded
    shares: int  # backward passes per batch: replicas times microbatches


def advise(record: Record) -> Advice | None:
    """Returns what to recommend for a whole run; None if no step was applied.

    That is what `scaling.recommend` advises, and at most a sixteenth of the best fixed scale. How
    large the gradients of a skipped step were is not known, and gradients of activations may
    overflow where those of the weights are small.
    """
    applied = record.max_magnitude[~record.skipped]
    if not applied.size:
        return None
    stats = GradientStats(
        loss_scale=tf.constant(record.loss_scale[-1]),
        counts=tf.constant(record.counts.sum(axis=0, dtype=np.float64)[None], tf.float32),
        max_magnitude=tf.constant([applied.max()]),
    )
    recommended = scaling.recommend(stats, headroom_bits=HEADROOM_BITS).loss_scale
    best = best_fixed_scale(record)
    scale = max(min(recommended, best / 2.0**HEADROOM_BITS), SMALLEST_SCALE)
    lost = float(flushed_share(stats.counts, tf.constant(scale, tf.float32))[0])
    return Advice(
        recommended=power_of_two(scale),
        largest=f"{applied.max():.3g}",
        bound_by_skips=scale < recommended,
        lost=describe_share(lost) if lost else "none",
        best_fixed=power_of_two(best),
        gradients_were_float16=record.precision == "mixed_float16",
        shares=record.shares,
    )


def settings_rows(run: Run) -> list[tuple[str, str, str]]:
    """Returns (name, value, value at the first start) for each setting.

    The value at the first start is "" if it equals the latest value.
    """
    if not run.starts:
        return []
    first, latest = (flattened(run.starts[place].settings) for place in (0, -1))
    rows = [(name, str(value), str(first.get(name, value))) for name, value in latest.items()]
    return [(name, value, "" if before == value else before) for name, value, before in rows]
