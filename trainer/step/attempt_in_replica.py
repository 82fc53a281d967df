"""An attempt as a single program on each replica, for TPUs.

`attempt.py` decides outside the replicas whether to apply. On a TPU that would split the step into
two programs, with every gradient copied to the host in between. Here the decision is made inside
the replica program. It is computed from sums over all replicas, so all replicas take the
same branch, and collectives are safe inside it.
"""

import contextlib

import tensorflow as tf

from trainer.step.apply import apply_in_replica, assign_held_back, optimizers_prepared
from trainer.step.outcomes import apply_or_skip, combined, diagnosed, on_first_replica
from trainer.step.plan import StepPlan, UpdateGroup
from trainer.step.randomness import key_source
from trainer.step.replica import recompute_in_branch, replica_step
from trainer.step.report import Outcome
from trainer.step.rollback import Before
from trainer.step.types import StepInputs


def attempt_in_replica(inputs: StepInputs, before: Before, plan: StepPlan) -> Outcome:
    """Attempts all update groups; see `attempt.attempt_groups`. Call it in cross-replica context.

    Args:
        inputs: the step's inputs.
        before: what to restore after a skip, and its values before the step.
        plan: the run's constants.
    """
    turns = len(plan.turns)
    sources = [key_source(inputs.random, index, turns) for index in range(turns)]

    def replica(inputs: StepInputs, sources: list[tf.Tensor]) -> Outcome:
        return attempt_from(0, inputs, sources, before, plan)

    with contextlib.ExitStack() as stack:
        for group in plan.groups:
            stack.enter_context(optimizers_prepared(group, plan))
        # `sources` replaces the step's `random`, which is therefore left out.
        outcome: Outcome = plan.strategy.run(replica, args=(inputs._replace(random=()), sources))
    return on_first_replica(outcome, plan.strategy)


def attempt_from(
    first: int, inputs: StepInputs, sources: list[tf.Tensor], before: Before, plan: StepPlan
) -> Outcome:
    """Attempts the update groups in order. Call it in replica context.

    Args:
        first: index in `plan.turns` of the first group to attempt.
        inputs: the step's inputs.
        sources: the result of `key_source` for each of `plan.turns`.
        before: what to restore after a skip, and its values before the step.
        plan: the run's constants.
    """
    group: UpdateGroup = plan.turns[first]
    following = plan.turns[first + 1 :]
    result = replica_step(inputs._replace(random=sources[first]), group=group, plan=plan)

    def apply() -> Outcome:
        assign_held_back(result.written, plan)
        own = recompute_in_branch(result, inputs.scale_state, plan)
        apply_in_replica(own, before, group, plan, last=not following)
        if not following:
            return result.outcome
        later = attempt_from(first + 1, inputs, sources, before, plan)
        return combined(result.outcome, later, repeated=following[0] is group)

    def skip() -> Outcome:
        return diagnosed(result, group, inputs.scale_state, plan)

    if not following:
        return apply_or_skip(result.outcome, apply, skip)
    outcome: Outcome = tf.cond(~result.outcome.grads_finite, skip, apply)
    return outcome
