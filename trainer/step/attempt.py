"""The step, from a global batch to a report. Read `attempt_step` first, then `replica_step`.

A step weights the examples, runs the model forward, scales the loss, runs backward, and sums the
gradients over replicas. It unscales, judges and clips them, applies the update on every replica or
on none, and moves the loss scale. A skipped step changes only the loss scale and the step counts,
and its report says why it was skipped.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import tensorflow as tf

import scaling
import strategies
from scaling.base.argument_checks import shown
from scaling.rules.rule import select_state
from trainer.base.autograph import call_user, without_autograph
from trainer.step.apply import apply_on_all
from trainer.step.attempt_in_replica import attempt_in_replica
from trainer.step.checks import check_weights
from trainer.step.diagnose import Evidence, count_by_variable
from trainer.step.held_back import frozen_or_unfrozen
from trainer.step.microbatch import GlobalBatchSize, Rows
from trainer.step.outcomes import apply_or_skip, combined, diagnosed, on_first_replica
from trainer.step.plan import StepPlan, UpdateGroup
from trainer.step.randomness import key_source
from trainer.step.replica import (
    ReplicaResult,
    count_nonfinite_gradients,
    recompute_in_branch,
    replica_step,
    run_passes,
)
from trainer.step.report import Outcome, StepReport, outcome_spec
from trainer.step.rollback import Before, read_copies, write_copies
from trainer.step.state import TrainState
from trainer.step.trace import ByHandle, forbid_writes, note_attempt, written_variables
from trainer.step.types import Batch, ScaleState, StepInputs, Variable
from trainer.step.xla import check_microbatches, compiled_step

# Upper bound on simulated overflows when looking for the next scale: a rule with hysteresis keeps
# its scale for some overflows.
MAX_SIMULATED_OVERFLOWS = 1000


class Attempt(NamedTuple):
    """One attempt at an update, and the loss-scale state after it."""

    outcome: Outcome
    loss_scale: tf.Tensor  # shape=(), float32: the scale of this attempt
    scale_state: ScaleState  # after the attempt
    without_retry: ScaleState  # after the attempt, if the step is not attempted again
    retry: tf.Tensor  # shape=(), bool: whether to retry at the scale in `scale_state`


AttemptAt: TypeAlias = Callable[[ScaleState], Attempt]


@without_autograph
def attempt_step(batch: Batch, plan: StepPlan, run: TrainState) -> StepReport:
    """Attempts one update, and retries it after an overflow if the plan allows retries.

    Call it in cross-replica context, in a graph.

    Args:
        batch: the global batch; each replica takes its share.
        plan: the run's constants.
        run: the run's loss scale and step counts, which this function updates.

    Returns:
        The step's report, each field of shape (). In a custom loop, stop when `run.halted` is true.
    """
    check_plan_and_run(plan, run)
    check_call(batch, plan)
    note_attempt()
    with forbid_writes():
        weights = check_weights(call_user(plan.example_weights, batch), batch)
    check_microbatches(plan.jit_compile, plan.num_microbatches, weights.shape[0])

    def attempt(batch: Batch, weights: tf.Tensor) -> StepReport:
        return attempt_with(batch, weights, plan, run)

    return compiled_step(attempt, plan.jit_compile, run.halted.device)(batch, weights)


def attempt_with(batch: Batch, weights: tf.Tensor, plan: StepPlan, run: TrainState) -> StepReport:
    """Attempts one update with checked weights, and counts it; see `attempt_step`."""
    # All attempts share this value, so that a retry draws the same random numbers.
    random = tf.stack([run.random_seed.read_value(), run.step])
    state = run.loss_scaler.state
    in_float32 = run.due_in_float32(plan.skips.float32_after)
    inputs = StepInputs(batch, weights, state, random, in_float32)

    def attempt_at(scale_state: ScaleState) -> Attempt:
        return attempt_once(inputs._replace(scale_state=scale_state), plan)

    if plan.skips.retries:
        last, retries = attempt_until_applied(attempt_at, state, plan)
    else:
        last, retries = attempt_at(state), tf.constant(0)
    if strategies.capabilities(plan.strategy).asynchronous:
        # After retries, or where some steps say nothing about the scale, not one verdict led here.
        single = not plan.skips.retries and in_float32 is None
        verdict = verdict_for_rule(last.outcome, plan) if single else None
        run.loss_scaler.merge(state, last.scale_state, verdict)
    else:
        run.loss_scaler.assign(last.scale_state)
    run.count(last.outcome, retries, in_float32, plan)
    return StepReport(
        step=run.step,
        loss_scale=last.loss_scale,
        retries=retries,
        consecutive_skips=run.consecutive_skips.read_value(),
        in_float32=tf.constant(False) if in_float32 is None else in_float32,
        examples=tf.shape(weights, tf.int64)[0],
        weight=GlobalBatchSize.of(weights).weight,
        data_wait_secs=tf.constant(0.0),  # set by the loop that reads the data
        **last.outcome._asdict(),
    )


def check_plan_and_run(plan: StepPlan, run: TrainState) -> None:
    """Raises TypeError for a wrong type, or ValueError if `plan` and `run` have different rules."""
    if not isinstance(plan, StepPlan):
        raise TypeError(
            f"`plan` must be a StepPlan; got {type(plan).__name__}. A StepPlan holds the "
            "constants of the step. Pass the result of plan_step()."
        )
    if not isinstance(run, TrainState):
        raise TypeError(
            f"`run` must be a TrainState; got {type(run).__name__}. A TrainState holds the loss "
            "scale and the step counts. Pass TrainState(plan.rule)."
        )
    in_plan, in_run = plan.rule, run.loss_scaler.rule
    if in_plan is not in_run and in_plan != in_run:
        raise ValueError(
            f"`run` must have the same loss-scale rule as `plan`; got {shown(in_run)}, but the "
            f"plan has {in_plan!r}. The plan's rule would update the state of another rule. Create "
            "`run` with TrainState(plan.rule)."
        )


def check_call(batch: Batch, plan: StepPlan) -> None:
    """Checks where and with what a step is attempted.

    Raises:
        RuntimeError: inside `strategy.run`.
        TypeError: if the batch is divided among the replicas already.
        ValueError: if layers were frozen or unfrozen since the step was planned.
    """
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            "`attempt_step` must be called in cross-replica context; got a call inside "
            "strategy.run(). It runs the replicas itself. Call attempt_step(batch, plan, run) "
            "directly in your tf.function."
        )
    if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(batch)):
        raise TypeError(
            "`batch` must be a global batch; got the values of each replica, as a distributed "
            "dataset yields them. Each replica takes its share of a global batch. Iterate over the "
            "tf.data.Dataset itself."
        )
    if (names := frozen_or_unfrozen(plan.weights, plan.model)) is not None:
        raise ValueError(
            "`plan` must be made for the variables that are trained now; got one from before these "
            f"were frozen or unfrozen: {shown(names)}. A step updates the variables that it was "
            "planned for. Call plan_step() again, with an optimizer for the variables to train."
        )


def attempt_until_applied(
    attempt_at: AttemptAt, scale_state: ScaleState, plan: StepPlan
) -> tuple[Attempt, tf.Tensor]:
    """Attempts an update until it is applied, no other scale can help, or the retries are used up.

    Everything that a failed attempt changed is restored before the next one. So each attempt uses
    the same weights, statistics and random numbers, at another scale.

    Args:
        attempt_at: a function that makes one attempt with the given loss-scale state.
        scale_state: the loss-scale rule's state before the step.
        plan: the run's constants.

    Returns:
        The last attempt, and the number of attempts before it: shape (), int32. If no scale could
        help, the attempt's scale state is the state after a single overflow.
    """
    nothing = tf.nest.map_structure(
        lambda spec: tf.zeros(spec.shape, spec.dtype), outcome_spec(plan.recorded, len(plan.float8))
    )
    start = Attempt(nothing, scale_state.loss_scale, scale_state, scale_state, tf.constant(True))

    def body(attempts: tf.Tensor, last: Attempt) -> tuple[tf.Tensor, Attempt]:
        now = attempt_at(last.scale_state)
        first = select_state(attempts == 0, now.without_retry, last.without_retry)
        return attempts + 1, now._replace(without_retry=first)

    attempts, last = tf.while_loop(
        lambda attempts, last: last.retry & (attempts <= plan.skips.retries),
        body,
        (tf.constant(0), start),
        parallel_iterations=1,
    )
    # Undo a backoff to the minimum that did not help: growing back would take thousands of steps.
    no_scale_helps = last.outcome.cause == int(scaling.Cause.MODEL)
    kept = select_state(no_scale_helps, last.without_retry, last.scale_state)
    return last._replace(scale_state=kept), attempts - 1


def attempt_once(inputs: StepInputs, plan: StepPlan) -> Attempt:
    """Attempts an update at one scale; applies it, or changes nothing.

    Args:
        inputs: the step's inputs, with the scale state to use.
        plan: the run's constants.
    """
    passes, updates = written_in_passes(inputs, plan), list(plan.updated)
    restored = [*passes, *updates]
    before = Before(passes, updates, read_copies(restored, plan.strategy))
    in_replica = strategies.capabilities(plan.strategy).decides_in_replica
    attempt = attempt_in_replica if in_replica else attempt_groups
    outcome = attempt(inputs, before, plan)
    if restored:
        tf.cond(
            outcome.grads_finite,
            lambda: True,
            lambda: write_copies(restored, before.copies, plan.strategy),
        )
    verdict = verdict_for_rule(outcome, plan)
    curable = scaling.Verdict(outcome.grads_finite, outcome.cause).overflowed
    state = inputs.scale_state
    without_retry = plan.rule.advance(state, verdict)
    if inputs.in_float32 is not None:
        # Keep the state: a step in float32 says nothing about the scale that half precision needs.
        without_retry = select_state(inputs.in_float32, state, without_retry)
        curable &= ~inputs.in_float32
    after = without_retry
    if plan.skips.retries:
        after = advance_until_scale_moves(without_retry, state, verdict, curable, plan)
    moved = after.loss_scale != state.loss_scale
    return Attempt(outcome, state.loss_scale, after, without_retry, curable & moved)


def written_in_passes(inputs: StepInputs, plan: StepPlan) -> list[Variable | ByHandle]:
    """Returns the variables that the forward and backward passes write themselves.

    The passes are traced for this, once per replica; the step then calls the same traces. Where
    graphs do not tell which variable a resource belongs to, on TPUs and with parameter servers,
    these are the variables that the model and the given objects hold.

    Args:
        inputs: the step's inputs.
        plan: the run's constants.

    Raises:
        ValueError: if a pass writes to a table, a queue or an iterator: none can be restored.
    """
    found = strategies.capabilities(plan.strategy)
    if found.asynchronous or found.decides_in_replica or tf.executing_eagerly():
        return list(plan.declared)

    def passes(inputs: StepInputs) -> None:
        source = key_source(inputs.random, 0, 1)
        for group in plan.groups:
            run = functools.partial(run_passes, group=group, plan=plan)
            plan.strategy.run(run, args=(inputs._replace(random=source),))

    traced = tf.function(passes, autograph=False).get_concrete_function(inputs)
    variables, others = written_variables(traced, plan.strategy)
    for write in others:
        raise ValueError(
            "`compute_loss` must not change a table, a queue or an iterator: a skip cannot restore "
            f"it; got {write.kind} at {write.name!r}"
        )
    return variables


def verdict_for_rule(outcome: Outcome, plan: StepPlan) -> scaling.Verdict:
    """Returns what the loss-scale rule is told about an attempt."""
    cause = outcome.cause if plan.skips.attribute_causes else scaling.Cause.BACKWARD
    return scaling.Verdict(outcome.grads_finite, cause, outcome.max_magnitude)


def advance_until_scale_moves(
    after: ScaleState,
    state: ScaleState,
    verdict: scaling.Verdict,
    curable: tf.Tensor,
    plan: StepPlan,
) -> ScaleState:
    """Returns the rule's state after as many overflows as it takes to move the scale.

    A rule with hysteresis keeps its scale for some overflows. The same batch would overflow again
    at the same scale, so these overflows are reported to the rule without another attempt.

    Args:
        after: the state after one overflow.
        state: the state before that overflow.
        verdict: the verdict of the attempt.
        curable: whether a smaller scale may help: shape (), bool.
        plan: the run's constants.

    Returns:
        The new state, or `after` if the scale never moves because it is fixed or at its minimum.
    """

    def may_move(tries: tf.Tensor, before: ScaleState, after: ScaleState) -> tf.Tensor:
        changed = [new != old for new, old in zip(after, before, strict=True)]
        holds = after.loss_scale == state.loss_scale
        return curable & holds & tf.reduce_any(changed) & (tries < MAX_SIMULATED_OVERFLOWS)

    _, _, moved = tf.while_loop(
        may_move,
        lambda tries, _, after: (tries + 1, after, plan.rule.advance(after, verdict)),
        (tf.constant(0), state, after),
    )
    result: ScaleState = select_state(moved.loss_scale != state.loss_scale, moved, after)
    return result


def attempt_groups(
    inputs: StepInputs, before: Before, plan: StepPlan, *, first: int = 0
) -> Outcome:
    """Attempts the update groups in order; each one only if all earlier ones were applied.

    Args:
        inputs: the step's inputs.
        before: what to restore after a skip, and its values before the step.
        plan: the run's constants.
        first: index in `plan.turns` of the first group to attempt.

    Returns:
        The combined outcome; it is finite only if the outcomes of all groups are.
    """
    group, following = plan.turns[first], plan.turns[first + 1 :]
    replica = functools.partial(replica_step, group=group, plan=plan)
    source = key_source(inputs.random, first, len(plan.turns))
    result: ReplicaResult = plan.strategy.run(replica, args=(inputs._replace(random=source),))
    if plan.kept:
        examples = inputs.weights.shape[0] if plan.jit_compile == "step" else None
        plan.kept.keep(result.rows, plan.strategy, examples)
    agreed = on_first_replica(
        result._replace(gradients=[], batch=(), rows=Rows((), {})), plan.strategy
    )

    def apply() -> Outcome:
        own = recompute_in_branch(result, inputs.scale_state, plan)
        apply_on_all(own, agreed.written, before, group, plan, last=not following)
        if not following:
            return agreed.outcome
        later = attempt_groups(inputs, before, plan, first=first + 1)
        return combined(agreed.outcome, later, repeated=following[0] is group)

    # The condition is evaluated outside the replicas because its branches contain collectives.
    def skip() -> Outcome:
        found = not_inlined(lambda: diagnosed(agreed, group, inputs.scale_state, plan))()
        return retest_at_min_scale(
            found, agreed.evidence, inputs._replace(random=source), group, plan
        )

    if not following:
        return apply_or_skip(agreed.outcome, apply, skip)
    outcome: Outcome = tf.cond(~agreed.outcome.grads_finite, skip, apply)
    return outcome


def not_inlined(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """Returns a function that TensorFlow prepares when it is first called.

    So runs that never call it do not wait for it. Collectives fail in such a function.
    """
    attributes = {"_noinline": True}
    apart: Callable[[], Outcome] = tf.function(
        function, autograph=False, experimental_attributes=attributes
    )
    return apart


def retest_at_min_scale(
    outcome: Outcome,
    evidence: Evidence,
    inputs: StepInputs,
    group: UpdateGroup,
    plan: StepPlan,
) -> Outcome:
    """Returns a skipped step's outcome, after testing whether a smaller loss scale can help.

    An overflow of the backward pass gives inf. If the gradients hold NaN and no inf, then the NaN
    may have come from the forward pass, although the loss is finite: an activation that is inf in
    half precision and is divided by, or a norm at 0. No scale removes that NaN, and the rule would
    lower its scale for each such batch. So the gradients are computed again at the rule's smallest
    scale. If they are still not finite on a replica, the cause is the model, and the rule's
    state stays as it is.

    Only steps that are skipped for NaN do this. Rules without a `min_scale` never lower their
    scale. With several workers, with parameter servers and on TPUs nothing is tested, and such
    steps lower the scale.

    Args:
        outcome: the outcome of the group, from `diagnosed`.
        evidence: the evidence of its skip.
        inputs: the step's inputs, in which `random` is the group's.
        group: the update group.
        plan: the run's constants.
    """
    min_scale = getattr(plan.rule, "min_scale", None)
    several_processes = strategies.capabilities(plan.strategy).several_processes
    if min_scale is None or not plan.skips.attribute_causes or several_processes:
        return outcome

    lowest = inputs.scale_state._replace(loss_scale=tf.constant(min_scale, tf.float32))
    count = functools.partial(count_nonfinite_gradients, group=group, plan=plan)

    def at_min_scale() -> Outcome:
        counts = plan.strategy.run(count, args=(inputs._replace(scale_state=lowest),))
        found = tf.add_n(plan.strategy.experimental_local_results(counts))
        cause = tf.where(found > 0, int(scaling.Cause.MODEL), outcome.cause)
        return outcome._replace(cause=cause)

    overflowed = scaling.Verdict(outcome.grads_finite, outcome.cause).overflowed
    test = at_min_scale if plan.gathers else not_inlined(at_min_scale)  # it holds collectives
    infs = count_by_variable(evidence.summed, in_xla=plan.one_program)[:, 0]
    tested: Outcome = tf.cond(overflowed & tf.reduce_all(infs == 0), test, lambda: outcome)
    return tested
