"""Simulates what rules would have done in a run, using its recorded gradients.

The simulation makes these assumptions:

- A step that the run skipped has no recorded magnitude. It is given the magnitude of the next
  applied step or, at the end of the run, of the last applied one. An overflow is assumed to occur
  at the recorded scale and at every larger one.
- A step that was retried has overflowed at twice the scale of its last attempt.
- Overflows of a run or a step in float32 or bfloat16 cannot be cured by any scale, because these
  formats have far more range than float16.
- At scales that the run did not try in a step, the step overflows if the largest gradient of a
  weight would. Gradients of activations, which are not recorded, may overflow at smaller scales:
  see `unexplained`.
- The weights are always those of the recorded run, even where a rule would have skipped other
  steps.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from scaling.base.number_formats import HALF_MAX, LARGEST_SCALE, SMALLEST_SCALE
from scaling.base.verdict import Cause, Verdict
from scaling.rules.named import parse_rule
from scaling.rules.rule import LossScaleRule, RuleState
from scaling.telemetry.record import Record
from scaling.telemetry.stats import flushed_share


class StepEvidence(NamedTuple):
    """What the record implies for each step at other scales. Each field has shape (steps,)."""

    # float32: the largest unscaled magnitude. A skipped step has that of the next applied step,
    # or of the last applied one; 0 if no step was applied.
    magnitude: np.ndarray
    fits_at: np.ndarray  # float32: the scale at which the step was finite; 0 if unknown
    overflows_at: np.ndarray  # float32: the scale at which the step overflowed; inf if unknown
    incurable: np.ndarray  # int32: the cause, if no scale would have helped; NONE otherwise


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of simulating a rule."""

    name: str  # the rule, as text that `parse_rule` accepts
    loss_scale: np.ndarray  # shape=(steps,), float32: the scale of each step
    skipped: np.ndarray  # shape=(steps,), bool: whether the step would have been skipped
    below_best: int  # number of steps at a scale below the best fixed scale
    lost: float  # fraction of elements flushed to zero, averaged over the applied steps


def gather_evidence(record: Record) -> StepEvidence:
    """Returns what the record implies for its steps at scales other than the recorded ones."""
    in_float16 = (record.precision == "mixed_float16") & ~record.in_float32
    out_of_range = np.isin(record.cause, [Cause.BACKWARD, Cause.REDUCTION])
    overflowed = out_of_range & in_float16
    retried = ~record.skipped & in_float16 & (record.retries > 0)
    applied = np.flatnonzero(~record.skipped)
    magnitude = np.zeros_like(record.max_magnitude)
    if applied.size:
        following = np.searchsorted(applied, np.arange(len(magnitude)))
        magnitude = record.max_magnitude[applied[np.minimum(following, applied.size - 1)]]
    return StepEvidence(
        magnitude=magnitude,
        fits_at=np.where(record.skipped | ~in_float16, np.float32(0), record.loss_scale),
        overflows_at=np.select(
            [overflowed, retried],
            [record.loss_scale, 2 * record.loss_scale],
            np.float32(np.inf),
        ),
        incurable=np.select(
            [overflowed, out_of_range],
            [np.int32(Cause.NONE), np.int32(Cause.MODEL)],
            record.cause,
        ),
    )


def unexplained(record: Record) -> tuple[int, int]:
    """Returns how many steps overflowed, and how many of them though the weights' gradients fit.

    Those have overflowed at less than half of the scale that the weights' gradients would have
    allowed: a gradient of an activation was larger, or the batch was unusual. What a rule would
    have done at other steps is then less certain.
    """
    evidence = gather_evidence(record)
    overflowed = np.isfinite(evidence.overflows_at)
    fits = 2.0 * evidence.overflows_at[overflowed] * evidence.magnitude[overflowed] <= HALF_MAX
    return int(overflowed.sum()), int(fits.sum())


def simulate_rule(rule: LossScaleRule, record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Simulates a rule on a record, in one graph call.

    Returns:
        The scale of each step, shape (steps,), float32; and whether the step would have been
        skipped, shape (steps,), bool.
    """
    evidence = gather_evidence(record)
    steps = len(record.step)

    def one_step(
        index: tf.Tensor, state: RuleState, scales: tf.TensorArray, skips: tf.TensorArray
    ) -> tuple[tf.Tensor, RuleState, tf.TensorArray, tf.TensorArray]:
        here = StepEvidence(*(tf.gather(field, index) for field in evidence))
        scale = state.loss_scale
        too_large = here.magnitude > HALF_MAX / scale
        overflows = (scale >= here.overflows_at) | ((scale > here.fits_at) & too_large)
        incurable = here.incurable != int(Cause.NONE)
        skipped = overflows | incurable
        cause = tf.where(incurable, here.incurable, int(Cause.BACKWARD))
        state = rule.advance(state, Verdict(~skipped, cause, here.magnitude))
        return index + 1, state, scales.write(index, scale), skips.write(index, skipped)

    def all_steps() -> tuple[tf.Tensor, tf.Tensor]:
        arrays = tf.TensorArray(tf.float32, steps), tf.TensorArray(tf.bool, steps)
        _, _, scales, skips = tf.while_loop(
            lambda index, *_: index < steps,
            one_step,
            (tf.constant(0), rule.initial_state(), *arrays),
        )
        return scales.stack(), skips.stack()

    # The function is called only once, so skip the checks for retracing.
    scales, skipped = tf.function(all_steps).get_concrete_function()()
    return scales.numpy(), skipped.numpy()


def best_fixed_scale(record: Record) -> float:
    """Returns the largest power of two at which no step overflows float16."""
    evidence = gather_evidence(record)
    with np.errstate(divide="ignore"):
        fitting = HALF_MAX / evidence.magnitude.astype(np.float64)
    limit = np.minimum(np.maximum(fitting, evidence.fits_at), evidence.overflows_at / 2.0)
    limit = np.min(limit, where=evidence.incurable == Cause.NONE, initial=LARGEST_SCALE)
    return max(2.0 ** math.floor(math.log2(limit)), SMALLEST_SCALE)


def summarize(name: str, loss_scale: np.ndarray, skipped: np.ndarray, record: Record) -> Outcome:
    """Returns the `Outcome` of a rule, given the scales that it used and its skipped steps."""
    lost = np.zeros(len(loss_scale))
    # Elements are counted by their exponents, so scales between two powers of two flush as many.
    powers = np.ldexp(np.float32(1), np.frexp(loss_scale)[1] - 1)
    for scale in np.unique(powers):
        lost_by_interval = flushed_share(tf.constant(record.counts), tf.constant(scale)).numpy()
        at_scale = powers == scale
        lost[at_scale] = lost_by_interval[record.interval[at_scale]]
    return Outcome(
        name=name,
        loss_scale=loss_scale,
        skipped=skipped,
        below_best=int(np.sum(loss_scale < best_fixed_scale(record))),
        lost=float(lost[~skipped].mean()) if not skipped.all() else math.nan,
    )


def compare(record: Record, rules: Iterable[str]) -> list[Outcome]:
    """Returns the outcome of the run as it was, followed by the simulated outcome of each rule.

    Args:
        record: the recorded run.
        rules: rules as text, as `parse_rule` accepts them.

    Raises:
        ValueError: if a rule is none, or if the run has not applied a step.
    """
    if record.skipped.all():
        raise ValueError("every recorded step was skipped, so no gradient is known")
    recorded = summarize("as recorded", record.loss_scale, record.skipped, record)
    simulated = [
        summarize(text, *simulate_rule(parse_rule(text), record), record) for text in rules
    ]
    return [recorded, *simulated]
