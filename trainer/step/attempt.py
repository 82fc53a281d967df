"""The step, from a global batch to a report: read `attempt_step`, then on to `replica_step`.

Weigh, cast, run forward, scale, run backward, sum over replicas, unscale, judge, clip; then
apply on every replica or on none, and move the loss scale. A skipped step moves nothing
else, and says why it was one.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import tensorflow as tf

import scaling
import strategies
from trainer.base.autograph import call_user, without_autograph
from trainer.step.apply import applied_as_they_are, commit, commit_here, write_held_back
from trainer.step.checks import check_same_rule, check_weights
from trainer.step.diagnose import locate
from trainer.step.plan import Phase, StepPlan
from trainer.step.randomness import key_source
from trainer.step.replica import ReplicaResult, replica_step
from trainer.step.report import Outcome, StepReport, outcome_spec
from trainer.step.rollback import Copies, read_copies, write_copies
from trainer.step.state import TrainState

# How many overflows in a row a rule may bear before it moves its scale, if it ever does.
MOST_OVERFLOWS = 1000


class Attempt(NamedTuple):
    """One attempt, and where it leaves the loss scale."""

    outcome: Outcome
    loss_scale: tf.Tensor  # shape=(), float32: the scale it used
    state: Any  # the loss-scale rule's, after it
    unretried: Any  # the same, had the step not been meant to be attempted again
    again: tf.Tensor  # shape=(), bool: whether the same batch may fit at the scale of `state`


@without_autograph
def attempt_step(batch: Any, plan: StepPlan, run: TrainState) -> StepReport:
    """Attempts one update, once or, after an overflow, again with the same batch.

    Call it in cross-replica context, in a graph.

    Args:
        batch: the global batch; each replica takes its share.
        plan: the run's constants.
        run: the run's loss scale and counts, which move.

    Returns:
        The step's report, each field of shape (). A loop of one's own stops when `run.halted` is
        true.
    """
    check_same_rule(plan, run)
    weights = check_weights(call_user(plan.example_weights, batch), batch)
    in_float32 = run.due_in_float32(plan.float32_after)
    # Of the step and not of the attempt: at another scale the same numbers are drawn.
    random = tf.stack([run.random_seed.read_value(), run.step])
    once = functools.partial(
        attempt_once, batch=batch, weights=weights, random=random, in_float32=in_float32, plan=plan
    )
    state = run.loss_scaler.state
    last, retries = (
        attempt_until_applied(once, state, plan) if plan.max_retries else (once(state), 0)
    )
    if strategies.is_asynchronous(plan.strategy):
        run.loss_scaler.merge(state, last.state)
    else:
        run.loss_scaler.assign(last.state)
    run.count(last.outcome, retries, in_float32, plan)
    return StepReport(
        step=run.step,
        loss_scale=last.loss_scale,
        retries=tf.convert_to_tensor(retries),
        consecutive_skips=run.consecutive_skips.read_value(),
        in_float32=tf.constant(False) if in_float32 is None else in_float32,
        examples=tf.shape(weights, tf.int64)[0],
        data_wait_secs=tf.constant(0.0),  # only a loop that reads the data knows
        **last.outcome._asdict(),
    )


def attempt_until_applied(once: Any, state: Any, plan: StepPlan) -> tuple[Attempt, tf.Tensor]:
    """Attempts an update until it is applied, no other scale can help, or enough is enough.

    Whatever an attempt might have moved is put back before the next: it sees the same
    weights, statistics and random numbers, at another scale.

    Returns:
        The last attempt, and how many came before it: shape (), int32. If no scale could help,
        the loss scale is where it would be after a single overflow.
    """
    nothing = tf.nest.map_structure(
        lambda spec: tf.zeros(spec.shape, spec.dtype), outcome_spec(plan.recorded)
    )
    start = Attempt(nothing, state.loss_scale, state, state, tf.constant(True))

    def body(attempts: tf.Tensor, last: Attempt) -> tuple[tf.Tensor, Attempt]:
        now = once(last.state)
        first = tf.nest.map_structure(
            lambda new, old: tf.where(attempts == 0, new, old), now.unretried, last.unretried
        )
        return attempts + 1, now._replace(unretried=first)

    attempts, last = tf.while_loop(
        lambda attempts, last: last.again & (attempts <= plan.max_retries),
        body,
        (tf.constant(0), start),
        parallel_iterations=1,
    )
    # The way down to the floor was for nothing, and the way up again takes thousands of steps.
    hopeless = last.outcome.cause == int(scaling.Cause.MODEL)
    kept = tf.nest.map_structure(
        lambda moved, first: tf.where(hopeless, first, moved), last.state, last.unretried
    )
    return last._replace(state=kept), attempts - 1


def attempt_once(
    state: Any,
    *,
    batch: Any,
    weights: tf.Tensor,
    random: tf.Tensor,
    in_float32: tf.Tensor | None,
    plan: StepPlan,
) -> Attempt:
    """Attempts an update at one scale; applies it, or moves nothing.

    Args:
        state: the loss-scale rule's: its one scale multiplies and divides.
        batch: the global batch.
        weights: shape (global_batch,), float32.
        random: the run's seed, and the steps before this one: shape (2,), int64.
        in_float32: whether to compute in float32: shape (), bool; None never does.
        plan: the run's constants.
    """
    before = read_copies(plan.undo, plan.strategy)
    rest = (before, batch, weights, state, random, in_float32)
    outcome = attempt_phases(plan.phases, *rest, plan=plan)
    if plan.undo:
        tf.cond(
            outcome.grads_finite,
            lambda: True,
            lambda: write_copies(plan.undo, before, plan.strategy),
        )
    verdict = scaling.Verdict(outcome.grads_finite, outcome.cause, outcome.max_magnitude)
    curable = verdict.overflowed
    if not plan.attribute_causes:
        verdict = verdict._replace(cause=scaling.Cause.BACKWARD)
    unretried = plan.rule.advance(state, verdict)
    if in_float32 is not None:
        # What fits in float32 says nothing of the scale that half precision needs.
        unretried = tf.nest.map_structure(
            lambda new, old: tf.where(in_float32, old, new), unretried, state
        )
        curable &= ~in_float32
    after = unretried
    if plan.max_retries:
        after = advanced_until_moved(unretried, state, verdict, curable, plan)
    moved = after.loss_scale != state.loss_scale
    return Attempt(outcome, state.loss_scale, after, unretried, curable & moved)


def advanced_until_moved(
    after: Any, state: Any, verdict: scaling.Verdict, curable: tf.Tensor, plan: StepPlan
) -> Any:
    """Returns the state after as many overflows as it takes to move the scale.

    A rule with hysteresis holds its scale through some. The same batch would overflow again
    at the same scale, so the rule is told so without trying.

    Args:
        after: the state after one overflow.
        state: the state before it.
        verdict: of the step.
        curable: whether a smaller scale may help: shape (), bool.
        plan: the run's constants.

    Returns:
        `after`, if the scale moves never: it is fixed, or at its floor.
    """

    def may_move(tries: tf.Tensor, before: Any, after: Any) -> tf.Tensor:
        changed = [new != old for new, old in zip(after, before, strict=True)]
        holds = after.loss_scale == state.loss_scale
        return curable & holds & tf.reduce_any(changed) & (tries < MOST_OVERFLOWS)

    _, _, moved = tf.while_loop(
        may_move,
        lambda tries, _, after: (tries + 1, after, plan.rule.advance(after, verdict)),
        (tf.constant(0), state, after),
    )
    helped = moved.loss_scale != state.loss_scale
    return tf.nest.map_structure(lambda new, old: tf.where(helped, new, old), moved, after)


def attempt_phases(
    phases: tuple[Phase, ...],
    before: Copies,
    batch: Any,
    weights: tf.Tensor,
    state: Any,
    random: tf.Tensor,
    in_float32: tf.Tensor | None,
    *,
    plan: StepPlan,
) -> Outcome:
    """Attempts one phase and, if it is applied, those after it.

    Args:
        phases: those that are left.
        before: of `plan.undo`.
        batch: the global batch.
        weights: shape (global_batch,), float32.
        state: the loss-scale rule's.
        random: as in `attempt_once`.
        in_float32: as there.
        plan: the run's constants.

    Returns:
        What came of them together: finite only if all were.
    """
    if strategies.decides_inside(plan.strategy):
        return attempt_inside(phases, before, batch, weights, state, random, in_float32, plan=plan)
    phase, later = phases[0], phases[1:]
    replica = functools.partial(replica_step, phase=phase, plan=plan)
    source = key_source(random, len(plan.phases) - len(phases), len(plan.phases))
    result = plan.strategy.run(replica, args=(batch, weights, state, source, in_float32))
    agreed = on_first_replica(result._replace(gradients=[], batch=(), aux=()), plan.strategy)

    def applied() -> Outcome:
        commit(result, agreed.written, before, phase, plan, last=not later)
        if not later:
            return agreed.outcome
        rest = (before, batch, weights, state, random, in_float32)
        return together(agreed.outcome, attempt_phases(later, *rest, plan=plan))

    # The condition stands outside the replicas: what is behind it may be a collective.
    return tf.cond(
        agreed.outcome.grads_finite, applied, lambda: explained(agreed, phase, state, plan)
    )


def attempt_inside(
    phases: tuple[Phase, ...],
    before: Copies,
    batch: Any,
    weights: tf.Tensor,
    state: Any,
    random: tf.Tensor,
    in_float32: tf.Tensor | None,
    *,
    plan: StepPlan,
) -> Outcome:
    """Does what `attempt_phases` does in one program of each replica's, as a TPU asks.

    The condition stands inside; it is computed from sums over all replicas, so all take the
    same branch, and collectives may stand behind it.
    """
    sources = [key_source(random, place, len(phases)) for place in range(len(phases))]

    def replica(
        batch: Any, weights: tf.Tensor, state: Any, sources: list[tf.Tensor], in_float32: Any
    ) -> Outcome:
        def attempt_from(place: int) -> Outcome:
            phase, last = phases[place], place + 1 == len(phases)
            arguments = (batch, weights, state, sources[place], in_float32)
            result = replica_step(*arguments, phase=phase, plan=plan)

            def applied() -> Outcome:
                write_held_back(result.written, plan)
                rest = (before, phase, plan)
                commit_here(result.gradients, result.batch, result.aux, *rest, last=last)
                return result.outcome if last else together(result.outcome, attempt_from(place + 1))

            return tf.cond(
                result.outcome.grads_finite,
                applied,
                lambda: explained(result, phase, state, plan),
            )

        return attempt_from(0)

    with contextlib.ExitStack() as stack:
        for phase in phases:
            stack.enter_context(applied_as_they_are(phase, plan))
        outcome = plan.strategy.run(replica, args=(batch, weights, state, sources, in_float32))
    return on_first_replica(outcome, plan.strategy)


def explained(agreed: ReplicaResult, phase: Phase, state: Any, plan: StepPlan) -> Outcome:
    """Returns the outcome of a step that was not finite, with cause and place."""
    weights = [
        tf.convert_to_tensor(plan.model.trainable_variables[position])
        for position in phase.positions
    ]
    finding = locate(
        agreed.table,
        agreed.statistics_finite,
        agreed.summed,
        agreed.unscaled,
        weights,
        state,
        plan.rule,
        alone=plan.alone,
    )
    known = finding.bad_variable >= 0
    position = tf.gather(phase.positions, tf.maximum(finding.bad_variable, 0))
    finding = finding._replace(bad_variable=tf.where(known, position, -1))
    return agreed.outcome._replace(**finding._asdict())


def together(first: Outcome, rest: Outcome) -> Outcome:
    """Returns what came of several phases: sums, and what the one that failed found out."""
    return rest._replace(
        loss=first.loss + rest.loss,
        gradient_norm=tf.sqrt(first.gradient_norm**2 + rest.gradient_norm**2),
        max_magnitude=tf.maximum(first.max_magnitude, rest.max_magnitude),
        magnitude_counts=first.magnitude_counts + rest.magnitude_counts,
        underflow=first.underflow + rest.underflow,  # of a phase's own variables; else 0
    )


def on_first_replica(structure: Any, strategy: tf.distribute.Strategy) -> Any:
    """Returns the first replica's values of what `strategy.run` returned."""
    return tf.nest.map_structure(
        lambda value: strategy.experimental_local_results(value)[0], structure
    )
