"""The step, from a global batch to a report, in the order of the ten stages of README.md.

A step weights the examples, runs the model forward, scales the loss, runs backward, and sums the
gradients over replicas. It unscales, judges and clips them, applies the update on every replica or
on none, and moves the loss scale. A skipped step changes only the loss scale and the step counts,
and its report says why it was skipped.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

import scaling
import strategies
from scaling.base.argument_checks import shown
from scaling.rules.rule import select_state
from trainer.base.autograph import call_user, without_autograph
from trainer.base.tracking import read_copies, write_copies
from trainer.keras_compat import NOT_INLINED
from trainer.step.accumulate import accumulate, microbatch_inputs, real_examples, sum_over_replicas
from trainer.step.apply import (
    Before,
    apply_in_replica,
    apply_on_all,
    assign_held_back,
    optimizers_prepared,
)
from trainer.step.checks import check_weights
from trainer.step.diagnose import (
    Evidence,
    Finding,
    ReplicaResult,
    count_by_variable,
    diagnose,
    no_finding,
)
from trainer.step.float8 import measure_float8, with_own_scales
from trainer.step.held_back import frozen_or_unfrozen, read_values
from trainer.step.plan import StepPlan, UpdateGroup
from trainer.step.randomness import key_source, make_keys
from trainer.step.report import Outcome, StepReport, outcome_spec
from trainer.step.state import TrainState
from trainer.step.trace import ByHandle, forbid_writes, note_attempt, written_variables
from trainer.step.types import (
    Batch,
    GlobalBatchSize,
    Gradient,
    Microbatch,
    PassInputs,
    Rows,
    ScaleState,
    StepInputs,
    Values,
    Variable,
)
from trainer.step.verdict import clip, global_norm, judge, measure, stay_finite
from trainer.step.xla import adds_in_rows, compiled_step

# Upper bound on simulated overflows when looking for the next scale: a rule with hysteresis keeps
# its scale for some overflows.
MAX_SIMULATED_OVERFLOWS = 1000

Tree = TypeVar("Tree")

# Fields of an outcome about parts of the model, of which a group reaches its own only.
BY_PART = "underflow", "float8_amax", "float8_scale", "float8_saturated", "float8_flushed"


class Attempt(NamedTuple):
    """One attempt at an update, and the loss-scale state after it."""

    outcome: Outcome
    loss_scale: tf.Tensor  # shape=(), float32: the scale of this attempt
    scale_state: ScaleState  # after the attempt
    without_retry: ScaleState  # after one overflow of the first attempt; kept if no scale helps
    retry: tf.Tensor  # shape=(), bool: whether to retry at the scale in `scale_state`


UpdateAt: TypeAlias = Callable[[ScaleState], Attempt]
# An update group's forward and backward passes on all replicas, given the loss-scale state and the
# source of the random keys; returns each replica's results and the values that its pass was given.
Passes: TypeAlias = Callable[[ScaleState, tf.Tensor], tuple[Microbatch, Values]]


# 1. Attempt: once, or again at a smaller scale; moves the loss scale.


@without_autograph
def attempt_step(batch: Batch, plan: StepPlan, run: TrainState) -> StepReport:
    """Attempts one update, and retries it after an overflow if the plan allows retries.

    Call it in cross-replica context, in a graph.

    Args:
        batch: the global batch, of which each replica is handed its share.
        plan: the run's constants.
        run: the run's loss scale and step counts, which this function updates.

    Returns:
        The step's report, each field of shape (). In a custom loop, stop when `run.halted` is true.

    Raises:
        ValueError: if `run` has another loss-scale rule than `plan`, or layers were frozen or
            unfrozen since the step was planned.
    """
    rule = run.loss_scaler.rule
    if rule is not plan.rule and rule != plan.rule:
        raise ValueError(f"`run` must have the loss-scale rule of `plan`; got {shown(rule)}")
    if (names := frozen_or_unfrozen(plan.weights, plan.model)) is not None:
        raise ValueError(
            "`plan` must be made anew by plan_step() after layers were frozen or unfrozen; got "
            f"{shown(names)}"
        )
    note_attempt()
    with forbid_writes():
        weights = check_weights(call_user(plan.example_weights, batch), batch)

    def take(batch: Batch, weights: tf.Tensor) -> StepReport:
        return take_step(batch, weights, plan, run)

    return compiled_step(take, plan.jit_compile, run.halted.device)(batch, weights)


def take_step(batch: Batch, weights: tf.Tensor, plan: StepPlan, run: TrainState) -> StepReport:
    """Takes a step: makes its attempts, moves the loss scale and counts it; see `attempt_step`."""
    # All attempts share this value, so that a retry draws the same random numbers.
    random = tf.stack([run.random_seed.read_value(), run.step])
    state = run.loss_scaler.state
    in_float32 = run.due_in_float32(plan.skips.float32_after)
    shares, size = strategies.shares(batch, weights, plan.strategy), GlobalBatchSize.of(weights)
    inputs = StepInputs(shares, size, state, random, in_float32)

    def update_at(scale_state: ScaleState) -> Attempt:
        return update_or_restore(inputs._replace(scale_state=scale_state), plan)

    # A loop around the first attempt, too, would save the branch here and `retest_at_min_scale`,
    # and was measured: it costs 8% of the CPU time of a step of an MLP, and 35% of a small one's.
    if plan.skips.retries:
        last, retries = retry_until_applied(update_at, state, plan)
    else:
        last, retries = update_at(state), tf.constant(0)
    if strategies.capabilities(plan.strategy).asynchronous:
        # `merge` replays one verdict. After retries, or with steps in float32, there is none.
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
        weight=size.weight,
        data_wait_secs=tf.constant(0.0),  # set by the loop that reads the data
        **last.outcome._asdict(),
    )


def retry_until_applied(
    update_at: UpdateAt, scale_state: ScaleState, plan: StepPlan
) -> tuple[Attempt, tf.Tensor]:
    """Attempts an update until it is applied, no other scale can help, or the retries are used up.

    Everything that a failed attempt changed is restored before the next one. So each attempt uses
    the same weights, statistics and random numbers, at another scale.

    Args:
        update_at: a function that makes one attempt with the given loss-scale state.
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
        now = update_at(last.scale_state)
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


def update_or_restore(inputs: StepInputs, plan: StepPlan) -> Attempt:
    """Makes one attempt at an update, at one scale: applies it, or restores what it changed.

    Args:
        inputs: the step's inputs, with the scale state to use.
        plan: the run's constants.
    """
    passes, written = trace_passes(inputs, plan)
    restored = [*written, *plan.updated]
    copies = read_copies(restored, plan.strategy)
    before = Before(written, copies[: len(written)])
    if strategies.capabilities(plan.strategy).decides_in_replica:
        outcome = update_in_replicas(before, inputs, plan)
    else:
        outcome = update_across_replicas(passes, before, inputs, plan)
    if restored:
        tf.cond(
            outcome.grads_finite,
            lambda: True,
            lambda: write_copies(restored, copies, plan.strategy),
        )
    verdict = verdict_for_rule(outcome, plan)
    # By the true cause, which the rule may not be told: see `attribute_causes`.
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


class Turn(NamedTuple):
    """The turn of an update group in a step."""

    outcome: Outcome
    apply: Callable[[], None]  # applies the group
    skip: Callable[[], Outcome]  # finds out why the step is skipped


def take_turns(turn_of: Callable[[int], Turn], plan: StepPlan, first: int = 0) -> Outcome:
    """Takes the turns of a step's update groups in order, until one of them is skipped.

    Args:
        turn_of: returns a turn, given its index in `plan.turns`.
        plan: the run's constants.
        first: index of the first turn to take.

    Returns:
        The combined outcome; it is finite only if the outcomes of all turns are.
    """
    turn, following = turn_of(first), plan.turns[first + 1 :]

    def apply() -> Outcome:
        turn.apply()
        if not following:
            return turn.outcome
        later = take_turns(turn_of, plan, first + 1)
        return combined(turn.outcome, later, repeated=following[0] is plan.turns[first])

    if not following:
        return apply_or_skip(turn.outcome, apply, turn.skip)
    outcome: Outcome = tf.cond(~turn.outcome.grads_finite, turn.skip, apply)
    return outcome


def update_across_replicas(
    passes: Sequence[Passes], before: Before, inputs: StepInputs, plan: StepPlan
) -> Outcome:
    """Takes a step's turns; decides outside the replicas, as branches contain collectives.

    Args:
        passes: the passes of each of `plan.groups`.
        before: what the passes write themselves, and its values before the step.
        inputs: the step's inputs.
        plan: the run's constants.
    """
    strategy, scale_state = plan.strategy, inputs.scale_state
    turns = [index for index, group in enumerate(plan.groups) for _ in range(group.updates)]

    def turn_of(number: int) -> Turn:
        group, run = plan.groups[turns[number]], passes[turns[number]]
        source = key_source(inputs.random, number, len(turns))
        replica = functools.partial(replica_step, group=group, plan=plan)
        local = run(scale_state, source)
        result: ReplicaResult = strategy.run(replica, args=(*local, inputs))
        if plan.kept:
            examples = inputs.share.weights.shape[0] if plan.jit_compile == "step" else None
            plan.kept.keep(result.rows, strategy, examples)
        agreed = on_first_replica(
            result._replace(gradients=[], batch=(), rows=Rows((), {})), strategy
        )

        def apply() -> None:
            own = result._replace(gradients=gradients_in_branch(result, scale_state, plan))
            last = number == len(turns) - 1
            apply_on_all(own, agreed.written, before, group, plan, last=last)

        def skip() -> Outcome:
            find = not_inlined(lambda: diagnosed(agreed, group, scale_state, plan))
            outcome, no_inf = find()
            return retest_at_min_scale(
                outcome, no_inf, lambda lowest: run(lowest, source), scale_state, plan
            )

        return Turn(agreed.outcome, apply, skip)

    return take_turns(turn_of, plan)


# On a TPU, a decision outside the replicas would split the step into two programs, with every
# gradient copied to the host in between. There an attempt is a single program on each replica. The
# verdict is computed from sums over all replicas, so all of them take the same branch, and
# collectives are safe inside it.


def update_in_replicas(before: Before, inputs: StepInputs, plan: StepPlan) -> Outcome:
    """Takes a step's turns in one program on each replica; see `update_across_replicas`."""
    turns = len(plan.turns)
    sources = [key_source(inputs.random, index, turns) for index in range(turns)]

    def replica(inputs: StepInputs, sources: list[tf.Tensor]) -> Outcome:
        inputs = inputs._replace(share=strategies.own_share(inputs.share))

        def turn_of(number: int) -> Turn:
            group = plan.turns[number]
            local = run_share(inputs._replace(random=sources[number]), group=group, plan=plan)
            result = replica_step(*local, inputs, group=group, plan=plan)

            def apply() -> None:
                assign_held_back(result.written, plan)
                gradients = gradients_in_branch(result, inputs.scale_state, plan)
                own = result._replace(gradients=gradients)
                apply_in_replica(own, before, group, plan, last=number == turns - 1)

            def skip() -> Outcome:
                return diagnosed(result, group, inputs.scale_state, plan)[0]

            return Turn(result.outcome, apply, skip)

        return take_turns(turn_of, plan)

    with contextlib.ExitStack() as stack:
        for group in plan.groups:
            stack.enter_context(optimizers_prepared(group, plan))
        # `sources` replaces the step's `random`, which is therefore left out.
        outcome: Outcome = plan.strategy.run(replica, args=(inputs._replace(random=()), sources))
    return on_first_replica(outcome, plan.strategy)


# 2 to 8. On each replica: share, microbatches, forward, backward, reduce, judge, clip. No variable
# of a Keras model is assigned here, and all replicas reach the same verdict.


def trace_passes(
    inputs: StepInputs, plan: StepPlan
) -> tuple[list[Passes], list[Variable | ByHandle]]:
    """Traces each group's passes once on every replica, and asks the traces what they write.

    The step calls these traces, each as often as the group has turns, and once more to test the
    smallest scale. On TPUs and with parameter servers, where graphs do not tell which variable a
    resource belongs to, nothing is traced beforehand, and what the passes may write are the
    variables that the model and the given objects hold.

    Args:
        inputs: the step's inputs.
        plan: the run's constants.

    Returns:
        The passes of each of `plan.groups`, and the variables that they write themselves.

    Raises:
        ValueError: if a pass writes to a table, a queue or an iterator: none can be restored.
    """

    def passes_of(group: UpdateGroup) -> Passes:
        replica = functools.partial(run_share, group=group, plan=plan)

        def run(scale_state: ScaleState, random: tf.Tensor) -> tuple[Microbatch, Values]:
            # Other inputs are captured: an argument of a function is no constant inside of it.
            own = inputs._replace(scale_state=scale_state, random=random)
            results: tuple[Microbatch, Values] = plan.strategy.run(replica, args=(own,))
            return results

        return run

    passes = [passes_of(group) for group in plan.groups]
    found = strategies.capabilities(plan.strategy)
    if found.asynchronous or found.decides_in_replica or tf.executing_eagerly():
        return passes, list(plan.declared)
    arguments = inputs.scale_state, key_source(inputs.random, 0, 1)
    traces = [tf.function(run, autograph=False).get_concrete_function(*arguments) for run in passes]
    written: dict[int, Variable | ByHandle] = {}
    for trace in traces:
        variables, others = written_variables(trace, plan.strategy)
        for write in others:
            raise ValueError(
                "`compute_loss` must not change a table, a queue or an iterator: a skip cannot "
                f"restore it; got {write.kind} at {write.name!r}"
            )
        for each in variables:
            written[id(each.handle if isinstance(each, ByHandle) else each)] = each
    return traces, list(written.values())


def run_share(
    inputs: StepInputs, *, group: UpdateGroup, plan: StepPlan
) -> tuple[Microbatch, Values]:
    """Runs the forward and backward passes on this replica's share. Call it in replica context.

    Args:
        inputs: the step's inputs, in which `random` is the result of `randomness.key_source`.
        group: the update group whose gradients to compute.
        plan: the run's constants.

    Returns:
        The results, and the values of variables in `plan.held_back` that the pass was given.
    """
    values = read_values(plan.held_back, positions_by_value(plan))
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return run_model(pass_inputs(inputs, values, replica, plan), inputs.in_float32, group), values


def replica_step(
    local: Microbatch, values: Values, inputs: StepInputs, *, group: UpdateGroup, plan: StepPlan
) -> ReplicaResult:
    """Computes one replica's part of an update, ready to apply.

    It assigns none of a Keras model's variables. What a pass writes itself, as of a `tf.Module`, is
    restored after a skip.

    Args:
        local: the results of this replica's passes, from `run_share`.
        values: the values that they were given.
        inputs: the step's inputs.
        group: the update group whose gradients were computed.
        plan: the run's constants.
    """
    if plan.strategy.num_replicas_in_sync > 1:  # sums are computed where their terms are
        local = tf.nest.map_structure(
            lambda leaf: leaf if leaf is None else tf.identity(leaf), local, expand_composites=True
        )
    reduced = sum_over_replicas(
        local, inputs.share, plan.updates.reduce_dtype, plan.updates.reduce_bucket_bytes
    )
    unscaled = scaling.unscale_gradients(reduced.total.gradients, inputs.scale_state)
    in_rows = adds_in_rows(plan.jit_compile, plan.strategy)
    gradient_norm = global_norm(unscaled, in_rows=in_rows)
    measured = measure(
        unscaled,
        inputs.scale_state,
        group.positions,
        magnitude=plan.rule.needs_magnitude,
        recorded=plan.recorded,
    )
    unread = [position for position in reduced.written if position not in values]
    before = values | read_values(plan.held_back, unread)
    # The maxima that float8 remembers are of scaled gradients too: a smaller scale can help them.
    assigned = {at: value for at, value in reduced.written.items() if at not in local.replaced}
    replaced = {at: value for at, value in reduced.written.items() if at in local.replaced}
    statistics_finite = stay_finite(assigned, before)
    outcome = Outcome(
        loss=reduced.total.loss,
        regularization_loss=reduced.total.regularization_loss,
        gradient_norm=gradient_norm,
        grads_finite=judge(
            losses_finite=reduced.table.losses_finite,
            statistics_finite=statistics_finite & stay_finite(replaced, before),
            gradient_norm=gradient_norm,
        ),
        **no_finding()._asdict(),
        **measured._asdict(),
        **measure_float8(reduced, before, plan.float8)._asdict(),
    )
    batch, rows = real_examples(inputs.share, local.rows)
    return ReplicaResult(
        outcome=outcome,
        evidence=Evidence(reduced.table, statistics_finite, reduced.total.gradients),
        gradients=clip(unscaled, gradient_norm, plan.updates),
        written=with_own_scales(reduced.written, before, plan.float8),
        batch=batch,
        rows=rows,
    )


def pass_inputs(
    inputs: StepInputs, values: Values, replica: int | tf.Tensor, plan: StepPlan
) -> PassInputs:
    """Returns the inputs of a replica's forward and backward passes; see `accumulate`.

    Args:
        inputs: the step's inputs.
        values: values of variables in `plan.held_back` before the step, on this replica.
        replica: index of the replica.
        plan: the run's constants.
    """
    keys = make_keys(
        inputs.random,
        replica,
        plan.strategy.num_replicas_in_sync,
        plan.num_microbatches,
        len(plan.seeds),
    )
    return PassInputs(inputs.share, inputs.global_batch, inputs.scale_state, values, keys)


def positions_by_value(plan: StepPlan) -> list[str]:
    """Returns the positions of variables whose values a forward pass is given, in `held_back`.

    These are the variables that are not trained. Weights are read by the model itself, except where
    XLA compiles a pass on a worker while parameter servers hold the variables: a compiled pass
    cannot read from another process.
    """
    remote = strategies.capabilities(plan.strategy).asynchronous
    first = 0 if remote and plan.jit_compile is True else len(plan.weights)
    return [str(position) for position in range(first, len(plan.held_back))]


def run_model(inputs: PassInputs, in_float32: tf.Tensor | None, group: UpdateGroup) -> Microbatch:
    """Runs the forward and backward passes on a replica's share, as usual or in float32."""
    if in_float32 is None:
        return accumulate(group.differentiate, inputs)

    def run_in_float32() -> Microbatch:
        result = accumulate(group.differentiate_in_float32, inputs)
        # Cast aux to the dtypes that the usual branch returns, which may be half precision: both
        # branches of the condition must return the same dtypes.
        first = microbatch_inputs(inputs, 0)
        usual = group.differentiate.get_concrete_function(first).structured_outputs
        rows = tf.nest.map_structure(
            lambda new, spec: tf.cast(new, spec.dtype), result.rows, usual.rows
        )
        return result._replace(rows=rows)

    # The branches contain no collectives: the all-reduce comes later.
    result: Microbatch = tf.cond(
        in_float32,
        run_in_float32,
        lambda: accumulate(group.differentiate, inputs),
    )
    return result


# 9. Apply or roll back.


def apply_or_skip(
    outcome: Outcome, apply: Callable[[], Outcome], skip: Callable[[], Outcome]
) -> Outcome:
    """Takes one of two branches, as the verdict says; returns the outcome with its finding.

    What a branch returns, XLA copies to memory, and starts a kernel for each number. So the
    branches return what they may change, and that as one tensor.

    Args:
        outcome: the outcome of the last update group, with its verdict.
        apply: applies the group, and returns an outcome that differs in no more than its finding.
        skip: finds out why the step is skipped, and returns the same.
    """

    def finding_of(found: Outcome) -> tf.Tensor:
        return tf.stack([getattr(found, name) for name in Finding._fields])

    # The branch that only reads the weights is the first. XLA treats branches as if they ran in
    # turn. In the other order it copies weights after every step, so that no read comes too late.
    skipped = ~outcome.grads_finite
    found = tf.cond(skipped, lambda: finding_of(skip()), lambda: finding_of(apply()))
    return outcome._replace(**Finding(*tf.unstack(found))._asdict())


def gradients_in_branch(
    result: ReplicaResult, scale_state: ScaleState, plan: StepPlan
) -> list[Gradient]:
    """Returns the gradients to apply, for a branch after the verdict.

    Where one program of XLA holds the whole step, what a branch takes is written to memory. One
    branch would take the gradients as they were summed, the other as they are to be applied, and
    both copies would be written. So there the branches take the sums alone, and unscale and clip
    them where they use them, to the same bits.

    Args:
        result: this replica's result.
        scale_state: the loss-scale rule's state that the step used.
        plan: the run's constants.
    """
    if not plan.one_program:
        return result.gradients
    unscaled = scaling.unscale_gradients(result.evidence.summed, scale_state)
    return clip(unscaled, result.outcome.gradient_norm, plan.updates)


def diagnosed(
    result: ReplicaResult, group: UpdateGroup, scale_state: ScaleState, plan: StepPlan
) -> tuple[Outcome, tf.Tensor]:
    """Returns a skipped step's outcome, with the cause of the skip and its place filled in.

    Returns:
        The outcome; and whether the summed gradients hold no inf: shape (), bool.
    """
    weights = [tf.convert_to_tensor(plan.weights[position]) for position in group.positions]
    finding, no_inf = diagnose(
        result.evidence,
        weights,
        scale_state,
        plan.rule,
        single_pass=plan.single_pass,
        in_xla=plan.one_program,
    )
    known = finding.bad_variable >= 0
    position = tf.gather(group.positions, tf.maximum(finding.bad_variable, 0))
    finding = finding._replace(bad_variable=tf.where(known, position, -1))
    return result.outcome._replace(**finding._asdict()), no_inf


def retest_at_min_scale(
    outcome: Outcome,
    no_inf: tf.Tensor,
    run: Callable[[ScaleState], tuple[Microbatch, Values]],
    scale_state: ScaleState,
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
    scale. With parameter servers and on TPUs nothing is tested, and such steps lower the scale.

    Args:
        outcome: the outcome of the group, from `diagnosed`.
        no_inf: whether the summed gradients hold no inf: shape (), bool.
        run: runs the group's passes again, with the step's random numbers, at a given scale.
        scale_state: the loss-scale rule's state that the step used.
        plan: the run's constants.
    """
    min_scale = getattr(plan.rule, "min_scale", None)
    found = strategies.capabilities(plan.strategy)
    if min_scale is None or not plan.skips.attribute_causes or found.asynchronous:
        return outcome

    def count(local: Microbatch) -> tf.Tensor:
        counts = count_by_variable(local.contribution.gradients, in_xla=plan.one_program)
        number = tf.cast(tf.reduce_sum(counts), tf.float32)
        return strategies.sum_gradients(number) if found.multi_worker else number

    def at_min_scale() -> Outcome:
        local, _ = run(scale_state._replace(loss_scale=tf.constant(min_scale, tf.float32)))
        counts = plan.strategy.run(count, args=(local,))
        nonfinite = tf.add_n(plan.strategy.experimental_local_results(counts))
        cause = tf.where(nonfinite > 0, int(scaling.Cause.MODEL), outcome.cause)
        return outcome._replace(cause=cause)

    overflowed = scaling.Verdict(outcome.grads_finite, outcome.cause).overflowed
    collectives = plan.gathers or found.multi_worker
    test = at_min_scale if collectives else not_inlined(at_min_scale)
    tested: Outcome = tf.cond(overflowed & no_inf, test, lambda: outcome)
    return tested


# 10. What the rule is told, and what the step reports.


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


def combined(first: Outcome, later: Outcome, *, repeated: bool = False) -> Outcome:
    """Returns the outcome of several update groups: their totals, and the verdict of the last.

    Args:
        first: the outcome of a group that was applied.
        later: the outcome of the groups after it, one of which may have been skipped.
        repeated: whether the next group is the same one again. Its last update is then the one
            that is reported; only the largest magnitude is taken over all of them.
    """
    magnitude = tf.maximum(first.max_magnitude, later.max_magnitude)
    if repeated:
        return later._replace(max_magnitude=magnitude)
    return later._replace(
        loss=first.loss + later.loss,
        gradient_norm=tf.sqrt(first.gradient_norm**2 + later.gradient_norm**2),
        max_magnitude=magnitude,
        magnitude_counts=first.magnitude_counts + later.magnitude_counts,
        # 0 for the variables and tensors of other groups.
        **{name: getattr(first, name) + getattr(later, name) for name in BY_PART},
    )


def on_first_replica(structure: Tree, strategy: tf.distribute.Strategy) -> Tree:
    """Returns the first replica's values from a result of `strategy.run`."""
    first: Tree = tf.nest.map_structure(
        lambda value: strategy.experimental_local_results(value)[0], structure
    )
    return first


def not_inlined(function: Callable[[], Tree]) -> Callable[[], Tree]:
    """Returns a function that TensorFlow prepares when it is first called.

    So runs that never call it do not wait for it. Collectives fail in such a function.
    """
    apart: Callable[[], Tree] = tf.function(
        function, autograph=False, experimental_attributes=NOT_INLINED
    )
    return apart
