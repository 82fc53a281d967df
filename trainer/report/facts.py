"""The numbers and sentences of the page: header, recommended scale, settings, and model."""

import collections
import math
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import scaling
from scaling.base.number_formats import HALF_MAX, SMALLEST_SCALE
from scaling.telemetry.recommend import describe_share
from scaling.telemetry.record import Record
from scaling.telemetry.simulate_rules import best_fixed_scale
from scaling.telemetry.stats import GradientStats, flushed_share
from trainer.log.model_table import flattened
from trainer.log.summary import format_bytes, power_of_two
from trainer.report.reading import Curve, Run, clean

# Fields of a "train" line other than the user's metrics.
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
LEARNING_RATE = "learning_rate"  # its fields are "learning_rate" or "learning_rate/OPTIMIZER"
HEADROOM_BITS = 4  # the default of `scaling.recommend`
NOT_RECORDED = "not recorded"  # shown instead of a value
MAX_CAUSES = 12  # a legend with more does not fit
OTHER_CAUSES = "other causes"
MAX_LABEL = 80  # characters of a name in a picture or a tile
MAX_OTHERS = 20  # results beside the best one
MAX_ROWS = 2000  # of the tables of settings and variables


def is_metric(name: str) -> bool:
    """Returns whether a field of a "train" line is the loss or a metric of the user."""
    own = name in NOT_METRICS - {"loss"} or name.split("/", maxsplit=1)[0] == LEARNING_RATE
    return not own


class Tile(NamedTuple):
    """A value in the header of the page."""

    label: str
    value: str
    note: str = ""


def tiles(run: Run) -> list[Tile]:
    """Returns the values of the header."""
    applied, skipped = (last(run.train.get(name)) for name in ("applied", "skipped"))
    speed = median(run.train.get("examples_per_second"))
    wait = mean(run.train.get("data_wait"))
    return [
        Tile("step reached", f"{run.last_step:,}", describe_end(run)),
        Tile("updates applied", format_count(applied), describe_attempted(applied, skipped)),
        Tile("steps skipped", format_count(skipped), describe_skips(run, skipped)),
        scale_tile(run),
        best_tile(run),
        Tile("examples per second", format_count(speed), "median of the log lines"),
        Tile("waiting for data", format_share(wait), "of the time, on average"),
        start_tile(run),
    ]


def describe_skips(run: Run, skipped: float) -> str:
    """Returns the causes of the skipped steps, and the number of retries, as text.

    Args:
        run: the run.
        skipped: the number of skipped steps up to the last log line; NaN if it is unknown.
    """
    causes = collections.Counter(causes_of(run))
    parts = [f"{count:,} {cause}" for cause, count in causes.most_common()]
    if lines_lost(run):
        parts.append(f"{skipped - len(run.skips):,.0f} of unknown cause")
    if repeated := sum(retry.retries for retry in run.retries):
        parts.append(f"{repeated:,} {'retry' if repeated == 1 else 'retries'}")
    return ", ".join(parts)


def lines_lost(run: Run) -> bool:
    """Returns whether lines about skipped steps are missing, as if the file had been shortened."""
    return last(run.train.get("skipped")) > len(run.skips)


def causes_of(run: Run) -> list[str]:
    """Returns the cause of each skipped step, for counts and legends.

    A step has one of six causes, and a later version may add others. If there are more than
    `MAX_CAUSES`, all but the most frequent are `OTHER_CAUSES`. Long causes are shortened.
    """
    causes = [clean(skip.cause, MAX_LABEL) for skip in run.skips]
    frequent = {cause for cause, _ in collections.Counter(causes).most_common(MAX_CAUSES)}
    return [cause if cause in frequent else OTHER_CAUSES for cause in causes]


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


def format_share(value: float) -> str:
    """Returns a fraction as text.

    Example:
        >>> format_share(0.031), format_share(float("nan"))
        ('3.1%', 'not recorded')
    """
    return NOT_RECORDED if math.isnan(value) else f"{value:.1%}"


def describe_attempted(applied: float, skipped: float) -> str:
    """Returns a sentence with the number of attempted steps, or "" if it is unknown."""
    if math.isnan(applied + skipped):
        return ""
    return f"of {applied + skipped:,.0f} attempted steps, at the last log line"


def describe_end(run: Run) -> str:
    """Returns a sentence about how the last call to `train` ended, or "" if nothing is known."""
    if run.failure is not None:
        return f"ended by {clean(run.failure.error.partition(':')[0], MAX_LABEL)}"
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
    """Returns the last known loss scale, and the range of its values."""
    scale, exact = scale_path(run)
    if not scale.step.size:
        return Tile("loss scale at the end", NOT_RECORDED)
    return Tile(
        "loss scale at the end", power_of_two(scale.value[-1]), describe_range(scale, exact)
    )


def describe_range(scale: Curve, exact: bool) -> str:
    """Returns the range of the loss scale as text, or "" if it is unknown.

    Args:
        scale: the known loss scales.
        exact: whether the loss scale is known at every step.
    """
    lowest, highest = scale.value.min(), scale.value.max()
    if lowest == highest:
        return "never changed" if exact else ""
    return f"between {power_of_two(lowest)} and {power_of_two(highest)}"


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
        f"{clean(other, MAX_LABEL)} {result:.4g}"
        for other, values in results.items()
        if is_metric(other) and other != name
        for result in values.value[(values.step == step) & ~np.isnan(values.value)]
    ]
    value = f"{curve.value[index]:.4g}"
    notes = [f"at step {step:,}", *others[:MAX_OTHERS]]
    label = clean(f"{direction} {split} {name}", MAX_LABEL)
    return Tile(label, value, ", ".join(notes))


def start_tile(run: Run) -> Tile:
    """Returns when the run started, and how often it was resumed and rolled back."""
    if not run.starts:
        return Tile("started", NOT_RECORDED)
    day, _, clock = clean(format_time(run.starts[0].time), MAX_LABEL).partition(" ")
    notes = [f"at {clock}"] if clock else []
    resumed = len(run.starts) - 1
    if resumed:
        latest = clean(format_time(run.starts[-1].time), MAX_LABEL)
        notes.append(f"resumed {format_times(resumed)}, last at {latest}")
    if run.recoveries:
        notes.append(f"rolled back {format_times(len(run.recoveries))}")
    return Tile("started", day, "; ".join(notes))


def format_time(text: str) -> str:
    """Returns a time in ISO 8601 as text in UTC, and any other text unchanged.

    Example:
        >>> format_time("2026-11-22T03:30:00+01:00")
        '2026-11-22 02:30 UTC'
    """
    try:
        time = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, TypeError, OverflowError):  # a day before year 1, or after 9999
        return str(text)
    return f"{time:%Y-%m-%d %H:%M} UTC"


def format_times(number: int) -> str:
    """Returns a number of times as text.

    Example:
        >>> format_times(1), format_times(3)
        ('once', '3 times')
    """
    return "once" if number == 1 else f"{number:,} times"


def scale_path(run: Run) -> tuple[Curve, bool]:
    """Returns the loss scale over the steps, and whether it is known at every step.

    It is known at every step if the run logged each change of the scale or recorded its gradients.
    Runs of older versions, and of those whose file has lost lines, have only the values in their
    log lines and skipped steps.
    """
    if run.scale.step.size and not lines_lost(run):
        return run.scale, True
    if run.record is not None:
        scale = run.record.loss_scale.astype(np.float64)
        changed = np.flatnonzero(np.diff(scale, prepend=np.nan) != 0)
        return Curve(run.record.step[changed], scale[changed]), True
    known = dict(zip(run.scale.step.tolist(), run.scale.value.tolist(), strict=True))
    known |= {skip.step: skip.loss_scale for skip in run.skips}
    if "loss_scale" in run.train:
        lines = run.train["loss_scale"]
        known |= dict(zip(lines.step.tolist(), lines.value.tolist(), strict=True))
    steps = sorted(step for step, scale in known.items() if scale > 0)
    return Curve(np.array(steps, np.int64), np.array([known[step] for step in steps])), False


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


class ModelRow(NamedTuple):
    """A variable of the model, as a row of the table."""

    name: str
    shape: str
    dtype: str
    compute_dtype: str
    parameters: str
    bytes: str


def model_rows(run: Run) -> list[ModelRow]:
    """Returns the table of the model's variables."""
    return [
        ModelRow(
            name=row["name"],
            shape=" x ".join(str(length) for length in row["shape"]) or "scalar",
            dtype=row["dtype"],
            compute_dtype=row["compute_dtype"],
            parameters=f"{row['parameters']:,}",
            bytes=format_bytes(row["bytes"]),
        )
        for row in (run.starts[-1].model if run.starts else [])
    ]


def model_totals(run: Run) -> tuple[str, str]:
    """Returns the number of the model's parameters and their size, both as text."""
    rows = run.starts[-1].model if run.starts else []
    return f"{sum(row['parameters'] for row in rows):,}", format_bytes(
        sum(row["bytes"] for row in rows)
    )
