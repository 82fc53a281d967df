"""Playing a rule over a run's recorded gradients: what it would have done with that run.

What is not known is taken so: a step that the run skipped left no magnitude; it gets that of
the next applied step, or at the end of the last one, and overflows at the scale at which it did.
A run in float32 or bfloat16 has range to spare: what overflowed there is helped by no scale. The
weights are those of the recorded run, whatever a rule would have skipped.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from scaling.base.number_formats import HALF_MAX, LARGEST_SCALE, SMALLEST_SCALE
from scaling.base.verdict import Cause, Verdict
from scaling.rules.named import parse_rule
from scaling.rules.rule import LossScaleRule
from scaling.telemetry.record import Record
from scaling.telemetry.stats import flushed_share


class Known(NamedTuple):
    """What a record tells of each step at another scale; each field of shape (steps,)."""

    magnitude: np.ndarray  # float32: unscaled; of a skipped step, the next applied one's, or at
    # the end of the record the last one's; 0 if there is none
    fits_at: np.ndarray  # float32: the scale at which it is known to fit; 0 if none is
    overflows_at: np.ndarray  # float32: the scale at which it is known to overflow, or inf
    incurable: np.ndarray  # int32: the cause, if no scale would have helped; else NONE


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a rule would have done."""

    name: str
    loss_scale: np.ndarray  # shape=(steps,), float32: what each step would have used
    skipped: np.ndarray  # shape=(steps,), bool
    below_best: int  # steps at a scale below the best fixed one
    lost: float  # share of the elements, over the steps not skipped, that were flushed to zero


def what_is_known(record: Record) -> Known:
    """Returns what the record tells of its steps at scales other than their own."""
    bounded = record.precision == "mixed_float16"
    for_want_of_range = np.isin(record.cause, [Cause.BACKWARD, Cause.REDUCTION])
    overflowed = for_want_of_range & bounded
    applied = np.flatnonzero(~record.skipped)
    magnitude = np.zeros_like(record.max_magnitude)
    if applied.size:
        following = np.searchsorted(applied, np.arange(len(magnitude)))
        magnitude = record.max_magnitude[applied[np.minimum(following, applied.size - 1)]]
    return Known(
        magnitude=magnitude,
        fits_at=np.where(record.skipped | (not bounded), np.float32(0), record.loss_scale),
        overflows_at=np.where(overflowed, record.loss_scale, np.float32(np.inf)),
        incurable=np.select(
            [overflowed, for_want_of_range],
            [np.int32(Cause.NONE), np.int32(Cause.MODEL)],
            record.cause,
        ),
    )


def play(rule: LossScaleRule, record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Plays a rule over a record, in one graph call.

    Returns:
        The scale of each step, shape (steps,), float32; and whether it would have been
        skipped, shape (steps,), bool.
    """
    known = what_is_known(record)
    steps = len(record.step)

    def one_step(
        index: tf.Tensor, state: Any, scales: tf.TensorArray, bad: tf.TensorArray
    ) -> tuple:
        here = Known(*(tf.gather(field, index) for field in known))
        scale = state.loss_scale
        too_large = here.magnitude > HALF_MAX / scale
        overflows = (scale >= here.overflows_at) | ((scale > here.fits_at) & too_large)
        incurable = here.incurable != int(Cause.NONE)
        skipped = overflows | incurable
        cause = tf.where(incurable, here.incurable, int(Cause.BACKWARD))
        state = rule.advance(state, Verdict(~skipped, cause, here.magnitude))
        return index + 1, state, scales.write(index, scale), bad.write(index, skipped)

    @tf.function
    def all_steps() -> tuple[tf.Tensor, tf.Tensor]:
        arrays = tf.TensorArray(tf.float32, steps), tf.TensorArray(tf.bool, steps)
        _, _, scales, bad = tf.while_loop(
            lambda index, *_: index < steps,
            one_step,
            (tf.constant(0), rule.initial_state(), *arrays),
        )
        return scales.stack(), bad.stack()

    scales, skipped = all_steps.get_concrete_function()()  # called once: nothing to retrace
    return scales.numpy(), skipped.numpy()


def best_fixed_scale(record: Record) -> float:
    """Returns the largest power of two at which no step overflows for want of range."""
    known = what_is_known(record)
    with np.errstate(divide="ignore"):
        fitting = HALF_MAX / known.magnitude.astype(np.float64)
    limit = np.minimum(np.maximum(fitting, known.fits_at), known.overflows_at / 2.0)
    limit = np.min(limit, where=known.incurable == Cause.NONE, initial=LARGEST_SCALE)
    return max(2.0 ** math.floor(math.log2(limit)), SMALLEST_SCALE)


def account(name: str, loss_scale: np.ndarray, skipped: np.ndarray, record: Record) -> Outcome:
    """Sums up how a rule has done: see `Outcome`."""
    lost = np.zeros(len(loss_scale))
    for scale in np.unique(loss_scale):
        shares = flushed_share(tf.constant(record.counts), tf.constant(scale)).numpy()
        at_scale = loss_scale == scale
        lost[at_scale] = shares[record.interval[at_scale]]
    return Outcome(
        name=name,
        loss_scale=loss_scale,
        skipped=skipped,
        below_best=int(np.sum(loss_scale < best_fixed_scale(record))),
        lost=float(lost[~skipped].mean()) if not skipped.all() else math.nan,
    )


def compare(record: Record, rules: Iterable[str]) -> list[Outcome]:
    """Returns how the run has done, and how each rule would have.

    Args:
        record: of the run.
        rules: texts as `parse_rule` takes them.
    """
    recorded = account("as recorded", record.loss_scale, record.skipped, record)
    played = [account(text, *play(parse_rule(text), record), record) for text in rules]
    return [recorded, *played]
