"""Diagnoses and combines the outcomes of an attempt's update groups."""

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from trainer.step.diagnose import Finding, diagnose
from trainer.step.plan import StepPlan, UpdateGroup
from trainer.step.replica import ReplicaResult, recompute_in_branch
from trainer.step.report import Outcome
from trainer.step.types import ScaleState

Tree = TypeVar("Tree")

# Fields of an outcome about parts of the model, of which a group reaches its own only.
BY_PART = "underflow", "float8_amax", "float8_scale", "float8_saturated", "float8_flushed"


def diagnosed(
    result: ReplicaResult, group: UpdateGroup, scale_state: ScaleState, plan: StepPlan
) -> Outcome:
    """Returns a skipped step's outcome, with the cause of the skip and its place filled in."""
    weights = [tf.convert_to_tensor(plan.weights[position]) for position in group.positions]
    evidence = recompute_in_branch(result, scale_state, plan).evidence
    finding = diagnose(
        evidence,
        weights,
        scale_state,
        plan.rule,
        single_pass=plan.single_pass,
        in_xla=plan.one_program,
    )
    known = finding.bad_variable >= 0
    position = tf.gather(group.positions, tf.maximum(finding.bad_variable, 0))
    finding = finding._replace(bad_variable=tf.where(known, position, -1))
    return result.outcome._replace(**finding._asdict())


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
