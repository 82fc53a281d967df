"""Applies a step: assigns the held-back values and updates the weights.

Where it can, it updates by TensorFlow's fused kernels: one pass over memory for each variable.

A Keras optimizer runs about a dozen operations for each variable, and each of them reads and
writes the whole variable. TensorFlow has kernels that compute the whole update rule of Adam, SGD
and SGD with momentum. Keras still does everything around the rule (schedules, weight decay, moving
averages, constraints, counting).

The kernels of SGD give the bits of Keras's operations. Adam's kernel rounds differently: at
beta_2=0.999 its first update differs from Keras's by up to 6.9e-6 of the learning rate, and is the
closer one to float64 (1.4e-6 against 6.9e-6). Keras computes 1 - beta_2 in float64 for the second
moment but in float32 for the bias correction; the kernel rounds both the same way, so that these
errors cancel.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

import strategies
from trainer.base.autograph import call_user
from trainer.base.tracking import Copies, tensorflow_variable
from trainer.keras_compat import (
    MultiOptimizer,
    atomic_update_count,
    built_for,
    gradients_already_reduced,
    inner_optimizer,
    own_update_counts,
    slot_variables,
)
from trainer.step.averages import updating_averages
from trainer.step.diagnose import ReplicaResult
from trainer.step.objective import optimizers_in
from trainer.step.plan import StepPlan, UpdateGroup
from trainer.step.trace import ByHandle
from trainer.step.types import Gradient, Values, Variable
from trainer.step.xla import compiled_update


class Before(NamedTuple):
    """What forward and backward passes write themselves, with the values from before the step."""

    variables: list[Variable | ByHandle]
    copies: Copies


def apply_on_all(
    result: ReplicaResult,
    written: Values,
    before: Before,
    group: UpdateGroup,
    plan: StepPlan,
    *,
    last: bool,
) -> None:
    """Applies an update group on every replica. Call it in cross-replica context.

    Args:
        result: each replica's result.
        written: what the forward pass would have assigned; the same on all replicas.
        before: what the passes write themselves, and its values before the step.
        group: the update group whose variables to update.
        plan: the run's constants.
        last: whether this is the last group of the step, after which metrics are updated.
    """
    assign_held_back(written, plan)

    def apply_own(own: ReplicaResult) -> None:
        apply_in_replica(own, before, group, plan, last=last)

    with optimizers_prepared(group, plan):
        plan.strategy.run(apply_own, args=(result,))


@contextlib.contextmanager
def optimizers_prepared(group: UpdateGroup, plan: StepPlan) -> Iterator[None]:
    """Context manager: makes a group's optimizers use gradients that are already reduced.

    Under an asynchronous strategy they count updates atomically; otherwise they use fused kernels.
    """
    asynchronous = strategies.capabilities(plan.strategy).asynchronous
    update = atomic_update_count if asynchronous else fused_updates
    with contextlib.ExitStack() as stack:
        for objective in group.objectives:
            trained = [plan.weights[at] for at in objective.positions]
            for optimizer in optimizers_in(objective.optimizer):
                own = {id(variable) for variable in built_for(optimizer)}
                missed = [pair for pair in plan.missed if id(pair[0]) in own]
                stack.enter_context(gradients_already_reduced(optimizer))
                stack.enter_context(updating_averages(optimizer, trained, plan.strategy))
                stack.enter_context(update(optimizer))
                stack.enter_context(own_update_counts(optimizer, missed))
        yield


def assign_held_back(written: Values, plan: StepPlan) -> None:
    """Assigns the values that the model's forward pass would have assigned.

    Call it before the optimizers run: if the forward pass assigned a weight, the gradient of that
    weight was computed at the new value.
    """
    for position, value in written.items():
        plan.held_back[int(position)].assign(value)


def apply_in_replica(
    own: ReplicaResult, before: Before, group: UpdateGroup, plan: StepPlan, *, last: bool
) -> None:
    """Applies an update group on one replica; see `apply_on_all`. Call it in replica context."""

    def apply(gradients: list[Gradient]) -> None:
        apply_gradients(gradients, group, plan)

    compiled_update(apply, plan.jit_compile)(own.gradients)
    if last:
        call_user(plan.update_metrics, own.batch, own.rows.aux)
        average_unsynchronized(before, plan)


def apply_gradients(gradients: list[Gradient], group: UpdateGroup, plan: StepPlan) -> None:
    """Updates each objective's variables with its optimizer. Call it in replica context."""
    remaining = iter(gradients)
    for objective in group.objectives:
        pairs = [(next(remaining), plan.weights[at]) for at in objective.positions]
        reached = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        apply_reached(reached, objective.optimizer)


def apply_reached(
    reached: list[tuple[Gradient, Variable]], optimizer: keras.optimizers.Optimizer
) -> None:
    """Updates variables with an optimizer, given (gradient, variable) pairs.

    The inner optimizers of a `MultiOptimizer` are called here, since its own `apply` refuses to
    update only some of its variables.
    """
    if not isinstance(optimizer, MultiOptimizer):
        optimizer.apply(*zip(*reached, strict=True))
        return
    for inner in optimizer.optimizers:
        own = [pair for pair in reached if inner_optimizer(optimizer, pair[1]) is inner]
        if own:
            inner.apply(*zip(*own, strict=True))
    optimizer.iterations.assign_add(1)


def average_unsynchronized(before: Before, plan: StepPlan) -> None:
    """Combines the replicas' copies of variables that the passes write themselves.

    A float becomes the mean of the copies; integers and bools take the first replica's value.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return
    given = {id(tensorflow_variable(seed)) for seed in plan.seeds}  # new keys in each pass
    in_replica = strategies.capabilities(plan.strategy).decides_in_replica
    for variable, copies in zip(*before, strict=True):
        apart = is_read_apart(variable) or (not in_replica and is_assigned_apart(variable))
        if not apart or id(variable) in given:
            continue
        value = variable.read_value()
        if variable.dtype.is_floating:
            # Average the changes: a variable that did not change keeps its exact bits. What is
            # infinite has no change.
            mean = tf.distribute.ReduceOp.MEAN
            change, plain = context.all_reduce(mean, [value - copies[0], value])
            changed = copies[0] + change
            variable.assign(tf.where(tf.math.is_finite(changed), changed, plain))
        elif variable.dtype.is_integer or variable.dtype.is_bool:
            number = tf.cast(value, tf.int64)
            own = tf.where(context.replica_id_in_sync_group == 0, number, 0)
            first = context.all_reduce(tf.distribute.ReduceOp.SUM, own)
            variable.assign(tf.cast(first, variable.dtype))


def is_read_apart(variable: Variable | ByHandle) -> bool:
    """Returns whether a variable was created to have another value on each replica."""
    on_read = tf.VariableSynchronization.ON_READ
    return getattr(variable, "synchronization", None) is on_read and variable.dtype.is_floating


def is_assigned_apart(variable: Variable | ByHandle) -> bool:
    """Returns whether each replica assigns its own copy of a variable that a pass writes.

    That is so if TensorFlow was not told how to combine what the replicas assign. A variable that
    was created outside of the strategy's scope has a single copy.
    """
    if not isinstance(variable, tf.distribute.DistributedValues):
        return False
    # Equal, and not the same object: TensorFlow has two classes of these constants.
    return bool(variable.aggregation == tf.VariableAggregation.NONE)


# (gradient, variable, learning_rate) -> None, as `keras.optimizers.Optimizer.update_step`.
UpdateRule: TypeAlias = Callable[[tf.Tensor, tf.Variable, tf.Tensor], None]


PLAIN = keras.optimizers.Optimizer  # the class whose ways to assign the kernels replace


@contextlib.contextmanager
def fused_updates(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes `optimizer.apply` use fused kernels where possible, inside the `with` block.

    Sparse gradients, dtypes other than float32, other rules and `amsgrad` still use Keras's
    operations.
    """
    fused = fused_rule(optimizer)
    if fused is None:
        yield
        return
    keras_rule = optimizer.update_step

    def update_step(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        dense = isinstance(gradient, tf.Tensor) and gradient.dtype == tf.float32
        rule = fused if dense and variable.dtype == tf.float32 else keras_rule
        rule(gradient, variable, learning_rate)

    optimizer.update_step = update_step
    try:
        yield
    finally:
        del optimizer.update_step


def fused_rule(optimizer: keras.optimizers.Optimizer) -> UpdateRule | None:
    """Returns a function that updates one variable with one kernel, or None if there is no kernel.

    Subclasses, such as AdamW, are included as long as they inherit the rule unchanged, and the
    methods by which it assigns.
    """
    kind = type(optimizer)
    assigns = ("assign", "assign_add", "assign_sub")
    changed = [name for name in assigns if getattr(kind, name) is not getattr(PLAIN, name)]
    if changed or not {"update_step", *assigns}.isdisjoint(vars(optimizer)):
        return None
    rule = kind.update_step
    if rule is keras.optimizers.Adam.update_step and not optimizer.amsgrad:
        constants = (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon)
        return adam(optimizer) if all(isinstance(each, float) for each in constants) else None
    if rule is keras.optimizers.SGD.update_step:
        return momentum(optimizer) if optimizer.momentum else sgd
    return None


def adam(optimizer: keras.optimizers.Adam) -> UpdateRule:
    """Returns Adam's update rule.

    Source:
        Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, in the order of
        operations given in the last paragraph of section 2.
    """
    # beta_1^step and beta_2^step, keyed by the count of updates that they were computed from. It is
    # the same for all variables but those that `own_update_counts` was given.
    known: dict[int, tuple[tf.Tensor, ...]] = {}

    def rule(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        count = optimizer.iterations
        if id(count) not in known:
            step = tf.cast(count + 1, tf.float32)
            known[id(count)] = tuple(
                tf.pow(float(beta), step) for beta in (optimizer.beta_1, optimizer.beta_2)
            )
        powers = known[id(count)]
        first_moment, second_moment = slot_variables(optimizer, variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=first_moment.handle,
            v=second_moment.handle,
            beta1_power=powers[0],
            beta2_power=powers[1],
            lr=tf.cast(learning_rate, tf.float32),
            beta1=optimizer.beta_1,
            beta2=optimizer.beta_2,
            epsilon=optimizer.epsilon,
            grad=gradient,
        )

    return rule


def momentum(optimizer: keras.optimizers.SGD) -> UpdateRule:
    """Returns the update rule of SGD with momentum, with or without Nesterov's variant."""

    def rule(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        [velocity] = slot_variables(optimizer, variable)
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=velocity.handle,
            lr=tf.cast(learning_rate, tf.float32),
            grad=gradient,
            momentum=optimizer.momentum,
            use_nesterov=optimizer.nesterov,
        )

    return rule


def sgd(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
    """Updates a variable by SGD without momentum."""
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=tf.cast(learning_rate, tf.float32), delta=gradient
    )
