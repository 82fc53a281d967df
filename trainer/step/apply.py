"""The end of a step that is applied: what was held back is written, and the weights move."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import strategies
from trainer.base.autograph import call_user
from trainer.base.keras_private import atomic_update_count, gradients_already_reduced
from trainer.step.fused import fused_updates
from trainer.step.plan import Phase, StepPlan
from trainer.step.replica import ReplicaResult
from trainer.step.rollback import Copies
from trainer.step.xla import compiled_update


def commit(
    result: ReplicaResult,
    written: dict[str, tf.Tensor],
    before: Copies,
    phase: Phase,
    plan: StepPlan,
    *,
    last: bool,
) -> None:
    """Applies a phase on every replica. Call it in cross-replica context.

    Args:
        result: of each replica.
        written: what the model's forward pass would have written: the same on all replicas.
        before: of `plan.undo`, at the beginning of the step.
        phase: whose variables move.
        plan: the run's constants.
        last: whether the step ends with this phase, so that metrics count it.
    """
    write_held_back(written, plan)

    def replica_commit(gradients: list[Any], batch: Any, aux: Any) -> None:
        commit_here(gradients, batch, aux, before, phase, plan, last=last)

    with applied_as_they_are(phase, plan):
        plan.strategy.run(replica_commit, args=(result.gradients, result.batch, result.aux))


@contextlib.contextmanager
def applied_as_they_are(phase: Phase, plan: StepPlan) -> Iterator[None]:
    """Within, a phase's optimizers take gradients that are summed already, and count exactly."""
    own = atomic_update_count if strategies.is_asynchronous(plan.strategy) else fused_updates
    with contextlib.ExitStack() as stack:
        for objective in phase.objectives:
            stack.enter_context(gradients_already_reduced(objective.optimizer))
            stack.enter_context(own(objective.optimizer))
        yield


def write_held_back(written: dict[str, tf.Tensor], plan: StepPlan) -> None:
    """Gives the model's variables what its forward pass would have written.

    First of all: a weight among them has been differentiated at what it is about to be.
    """
    for position, value in written.items():
        plan.held_back[int(position)].assign(value)


def commit_here(
    gradients: list[Any],
    batch: Any,
    aux: Any,
    before: Copies,
    phase: Phase,
    plan: StepPlan,
    *,
    last: bool,
) -> None:
    """Applies a phase on one replica; see `commit`. Call it in replica context."""

    def apply(gradients: list[Any]) -> None:
        apply_gradients(gradients, phase, plan)

    compiled_update(apply, plan.jit_compile)(gradients)
    if last:
        call_user(plan.update_metrics, batch, aux)
        average_own_writes(before, plan)


def apply_gradients(gradients: list[Any], phase: Phase, plan: StepPlan) -> None:
    """Lets each objective's optimizer move its variables. Call it in replica context."""
    left = iter(gradients)
    for objective in phase.objectives:
        pairs = [(next(left), plan.model.trainable_variables[at]) for at in objective.positions]
        reached = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        objective.optimizer.apply(*zip(*reached, strict=True))


def average_own_writes(before: Copies, plan: StepPlan) -> None:
    """Replaces statistics that a model has written by itself by their mean over replicas.

    Only variables whose copies may differ (`tf.VariableSynchronization.ON_READ`) need it, and
    only a `tf.Module` or a layer with variables of TensorFlow's own has any.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return
    for variable, copies in zip(plan.undo, before, strict=True):
        differs = getattr(variable, "synchronization", None) is tf.VariableSynchronization.ON_READ
        if differs and variable.dtype.is_floating:
            # The mean of how far they have come, so that one nobody has written keeps its bits.
            moved = variable.read_value() - copies[0]
            variable.assign(copies[0] + context.all_reduce(tf.distribute.ReduceOp.MEAN, moved))
