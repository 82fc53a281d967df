"""The constants of a run's steps: what is computed, and what happens after an overflow."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaling
import strategies
from scaling.base.argument_checks import check_integer
from strategies.division import count_examples
from trainer.base.argument_checks import check_choice
from trainer.base.tracking import name_of_variable, tracked_variables
from trainer.keras_compat import (
    computing_in_float32,
    learning_rate_setting,
    make_saveable,
)
from trainer.step import checks
from trainer.step.float8 import Float8Tensor, check_float8_layers, float8_tensors
from trainer.step.gather import LOSS_REDUCTIONS, Inlined
from trainer.step.held_back import held_back_variables
from trainer.step.objective import (
    Objective,
    objectives_of,
    optimizers_in,
    single_optimizers,
)
from trainer.step.passes import differentiate
from trainer.step.randomness import seed_states
from trainer.step.report import Kept
from trainer.step.settings import Skips, Updates
from trainer.step.types import (
    Aux,
    Batch,
    ComputeLoss,
    Differentiate,
    Microbatch,
    MicrobatchPlan,
    Model,
    PassInputs,
    Variable,
)
from trainer.step.xla import (
    ONE_REPLICA,
    WITH_PASSES,
    check_compile_mode,
    compiled_differentiation,
)


@dataclasses.dataclass(frozen=True)
class UpdateGroup:
    """Objectives whose gradients are computed together, at the same weights."""

    objectives: tuple[Objective, ...]
    differentiate: Differentiate
    differentiate_in_float32: Differentiate  # for a Keras model only

    @property
    def updates(self) -> int:
        """Number of updates in a step; the objectives of one group have the same number."""
        return self.objectives[0].updates

    @property
    def positions(self) -> list[int]:
        """Positions of the group's variables in `model.trainable_variables`, in gradient order."""
        return [position for objective in self.objectives for position in objective.positions]


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The constants of a step. Create them with `plan_step`."""

    strategy: tf.distribute.Strategy
    model: Model
    rule: scaling.LossScaleRule
    groups: tuple[UpdateGroup, ...]  # applied in this order; one group unless optimizers alternate
    compute_loss: ComputeLoss
    example_weights: Callable[[Batch], tf.Tensor]  # returns a global batch's weights
    update_metrics: Callable[[Batch, Aux], None]  # called with a replica's real examples
    num_microbatches: int
    updates: Updates
    skips: Skips
    jit_compile: bool | str  # what XLA compiles: see `xla.COMPILE_MODES`
    record_gradients: bool  # whether every report counts its gradients' magnitudes
    seeds: tuple[keras.Variable, ...]  # states of seed generators, given new keys in each step
    held_back: tuple[keras.Variable, ...]  # variables a Keras model reads or assigns; weights first
    declared: tuple[Variable, ...]  # what else the model and the given objects hold: see `others`
    updated: tuple[Variable, ...]  # what the step's updates but the last write
    weights: tuple[Variable, ...]  # `model.trainable_variables` when the step was planned
    # Variables that were frozen for a while, and the number of updates that each one missed.
    missed: tuple[tuple[Variable, int], ...] = ()
    reduction: str = "mean"  # one of `gather.LOSS_REDUCTIONS`
    float8: tuple[Float8Tensor, ...] = ()  # float8 tensors of layers that are trained
    kept: Kept | None = None  # what keeps losses and aux of each example; None keeps nothing

    @property
    def single_pass(self) -> bool:
        """Whether a step is one microbatch on one replica, so that no gradients are summed."""
        return self.strategy.num_replicas_in_sync == 1 and self.num_microbatches == 1

    @property
    def one_program(self) -> bool:
        """Whether one program of XLA holds the whole step: in mode "step", and on a TPU."""
        in_replica = strategies.capabilities(self.strategy).decides_in_replica
        return self.jit_compile == "step" or in_replica

    @property
    def global_loss(self) -> bool:
        """Whether a loss is one number, a function of the whole global batch."""
        return self.reduction == "global"

    @property
    def gathers(self) -> bool:
        """Whether replicas exchange rows in the forward and backward pass."""
        return self.global_loss and self.strategy.num_replicas_in_sync > 1

    @property
    def turns(self) -> tuple[UpdateGroup, ...]:
        """The groups in the order of a step's updates: each one as often as it is updated."""
        return tuple(group for group in self.groups for _ in range(group.updates))

    @property
    def objectives(self) -> list[Objective]:
        """The objectives of all groups."""
        return [objective for group in self.groups for objective in group.objectives]

    @property
    def has_schedule(self) -> bool:
        """Whether any optimizer has a learning-rate schedule."""
        updating = [one for objective in self.objectives for one in objective.updating]
        schedule = keras.optimizers.schedules.LearningRateSchedule
        return any(isinstance(learning_rate_setting(one), schedule) for one in updating)

    @property
    def recorded(self) -> int:
        """Number of variables whose gradients' magnitudes are counted; 0 if they are not."""
        return len(self.weights) if self.record_gradients else 0

    @property
    def variable_names(self) -> list[str]:
        """Names of `model.trainable_variables`, for messages about skipped steps."""
        return [name_of_variable(v) for v in self.weights]


def plan_step(
    *,
    strategy: tf.distribute.Strategy,
    model: Model,
    optimizer: keras.optimizers.Optimizer | Mapping[str, keras.optimizers.Optimizer],
    compute_loss: ComputeLoss,
    rule: scaling.LossScaleRule,
    example_weights: Callable[[Batch], tf.Tensor] | None = None,
    update_metrics: Callable[[Batch, Aux], None] | None = None,
    num_microbatches: int = 1,
    updates: Updates = Updates(),
    skips: Skips = Skips(),
    jit_compile: bool | str = False,
    record_gradients: bool = False,
    others: Sequence[Any] = (),
    missed: Sequence[tuple[Variable, int]] = (),
    reduction: str = "mean",
) -> StepPlan:
    """Checks the arguments, builds the optimizers, and returns the step's constants.

    Call it once, in the strategy's scope, after the model is built.

    Args:
        strategy: the strategy under which the replicas run.
        model: a `keras.Model` or a `tf.Module` whose variables have all been created.
        optimizer: one optimizer, or a dict of optimizers, keyed by the model's attribute that
            each one updates.
        compute_loss: (batch, training) -> losses, or (losses, aux); see `Task.compute_loss`.
            With several optimizers, the losses are a dict, keyed by the optimizers' names.
        rule: the loss-scale rule.
        example_weights: global batch -> weights, shape (global_batch,); None gives each weight 1.
        update_metrics: called with a replica's (batch, aux) on applied steps; None does nothing.
        num_microbatches: number of parts that each replica's share is cut into.
        updates: clipping, a moving average of the weights, optimizers that take turns, and the sum
            of gradients over replicas.
        skips: what happens after a step that cannot be applied. `TrainState.halted` says when the
            run must stop.
        jit_compile: what XLA compiles. True: each replica's forward and backward pass.
            "elementwise": only the element-wise operations in them. "update": the optimizer's
            update, on a single replica. "step": the whole step, as one program, on a single
            replica. False: nothing.
        record_gradients: whether reports count gradient magnitudes.
        others: objects other than the model whose layers, random generators or variables the loss
            uses. Variables that the loss writes are restored after a skip whether listed or not,
            but on TPUs and with parameter servers.
        missed: pairs of a trained variable and the number of its optimizer's updates that it was
            not part of, for variables that were frozen at first. Adam's bias correction needs it.
        reduction: "mean": `compute_loss` returns one loss per example. "global": it returns
            one number, a function of the whole global batch, which it gets from `all_gather`;
            `example_weights` must then be None.

    Raises:
        TypeError, ValueError: if the step cannot use an argument.

    Example:
        >>> from trainer.step import TrainState, attempt_step
        >>> strategy, rule = tf.distribute.get_strategy(), scaling.DynamicLossScale()
        >>> model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        >>> plan = plan_step(
        ...     strategy=strategy, model=model, optimizer=keras.optimizers.SGD(0.1), rule=rule,
        ...     compute_loss=lambda batch, training: model(batch, training=training)[:, 0] ** 2)
        >>> run = TrainState(rule)
        >>> step = tf.function(lambda batch: attempt_step(batch, plan, run))
        >>> bool(step(tf.ones([4, 1])).grads_finite)
        True
        >>> report = step(tf.constant([[1.0], [float("inf")]]))
        >>> scaling.Cause(int(report.cause)).name, int(report.bad_replica), int(run.step)
        ('FORWARD', 0, 2)
    """
    check_choice("reduction", reduction, LOSS_REDUCTIONS)
    check_integer("num_microbatches", num_microbatches, 1)
    check_compile_mode(jit_compile, strategy)
    if reduction == "global":
        checks.check_global_loss(
            strategy,
            num_microbatches=num_microbatches,
            example_weights=example_weights,
            jit_compile=jit_compile,
            float32_after=skips.float32_after,
        )
    if updates.reduce_dtype == "float16" and isinstance(rule, scaling.NoLossScale):
        raise ValueError(
            "`reduce_dtype` must not be 'float16' without a loss scale; pass loss_scale=\"dynamic\""
        )
    if updates.alternate_optimizers and strategies.capabilities(strategy).asynchronous:
        # Undoing an update would undo what other workers have written in the meantime.
        raise ValueError("`alternate_optimizers` must be False with parameter servers; got True")
    if skips.float32_after is not None and not isinstance(model, keras.Layer):
        raise ValueError(
            f'`on_stuck` must not be "float32" for a {type(model).__name__}, which casts by itself'
        )
    checks.check_model(model, strategy)
    divided = strategy.num_replicas_in_sync * num_microbatches > 1
    checks.check_recurrent_layers([model, *others], divided=divided)
    check_float8_layers(model, strategy)
    for each in optimizer.values() if isinstance(optimizer, Mapping) else [optimizer]:
        checks.check_optimizer(each, strategy)
    objectives = objectives_of(model, optimizer, updates.updates_per_step)
    build_optimizers(model, objectives, updates.ema_momentum)
    partition = [objectives]
    if updates.alternate_optimizers:
        partition = [[objective] for objective in objectives]
    held_back, seeds = held_back_variables(model, others), seed_states(model, others)
    optimizers = [each for one in objectives for each in optimizers_in(one.optimizer)]
    slots = {id(variable): variable for one in optimizers for variable in one.variables}.values()
    declared = tracked_variables([model, *others], but=[*held_back, *seeds, *slots])
    if not held_back:  # a `tf.Module`, whose generators are assigned in each pass
        declared += seeds
    # Earlier updates of a step are applied before a later one is skipped.
    alternating = sum(group[0].updates for group in partition) > 1
    plan = StepPlan(
        strategy=strategy,
        model=model,
        rule=rule,
        groups=(),
        compute_loss=compute_loss,
        example_weights=ones if example_weights is None else example_weights,
        update_metrics=no_metrics if update_metrics is None else update_metrics,
        num_microbatches=num_microbatches,
        updates=updates,
        skips=skips,
        jit_compile=jit_compile,
        record_gradients=record_gradients,
        seeds=tuple(seeds),
        held_back=tuple(held_back),
        declared=tuple(declared),
        updated=(*held_back, *slots) if alternating else (),
        weights=tuple(model.trainable_variables),
        missed=tuple(missed),
        reduction=reduction,
        float8=float8_tensors(model),
    )
    return with_groups(plan, partition, jit_compile)


def build_optimizers(
    model: Model, objectives: Sequence[Objective], ema_momentum: float | None
) -> None:
    """Creates every optimizer's slots, for the variables that it updates.

    Raises:
        ValueError: if an optimizer that has slots already, or averages of its own, is to keep a
            moving average.
    """
    for objective in objectives:
        if ema_momentum is not None:
            for optimizer in single_optimizers(objective.optimizer):
                if optimizer.built or optimizer.use_ema:
                    raise ValueError(
                        "`ema_momentum` must be None if the optimizer has been built, or has "
                        f"use_ema=True; got {ema_momentum!r}"
                    )
                optimizer.use_ema = True
                optimizer.ema_momentum = ema_momentum
        if objective.optimizer.built:
            continue
        for optimizer in single_optimizers(objective.optimizer):
            make_saveable(optimizer)  # its rate may have been set since it was created
        objective.optimizer.build([model.trainable_variables[at] for at in objective.positions])


def compiled_as(plan: StepPlan, jit_compile: bool | str) -> StepPlan:
    """Returns a plan of the same step in another compile mode."""
    return with_groups(plan, [group.objectives for group in plan.groups], jit_compile)


def keeping_rows(plan: StepPlan) -> StepPlan:
    """Returns a plan of the same step that also keeps the losses and the aux of each example."""
    if strategies.capabilities(plan.strategy).decides_in_replica:
        raise ValueError("`return_aux` must be False on a TPU, whose steps keep no rows; got True.")
    return compiled_as(dataclasses.replace(plan, kept=Kept()), plan.jit_compile)


def with_groups(
    plan: StepPlan, partition: Sequence[Sequence[Objective]], jit_compile: bool | str
) -> StepPlan:
    """Returns the plan with a group for each part of the partition, in the given compile mode."""
    # Make sparse gradients dense for XLA, which would recompile for every new number of rows.
    dense = jit_compile in (*WITH_PASSES, *ONE_REPLICA) or plan.num_microbatches > 1
    dense = dense or plan.skips.float32_after is not None
    # Use TensorFlow's BatchNorm kernel on CPUs, where it was measured to be faster, unless XLA
    # compiles the pass, or replicas pause in it: they share the layers in which it is put.
    fuse = jit_compile not in WITH_PASSES and not plan.gathers
    fuse = fuse and strategies.capabilities(plan.strategy).on_cpu

    def group_of(objectives: Sequence[Objective], earlier: Sequence[str]) -> UpdateGroup:
        microbatch = microbatch_plan(plan, objectives, earlier, dense=dense, fuse=fuse)

        def run(inputs: PassInputs) -> Microbatch:
            return differentiate(inputs, microbatch)

        def run_in_float32(inputs: PassInputs) -> Microbatch:
            with computing_in_float32(plan.model):
                return run(inputs)

        passes = (
            Inlined(each) if plan.gathers else compiled_differentiation(each, jit_compile)
            for each in (run, run_in_float32)
        )
        return UpdateGroup(tuple(objectives), *passes)

    names = [[objective.name for objective in objectives] for objectives in partition]
    groups = tuple(
        group_of(objectives, [name for before in names[:at] for name in before])
        for at, objectives in enumerate(partition)
    )
    return dataclasses.replace(plan, groups=groups, jit_compile=jit_compile)


def microbatch_plan(
    plan: StepPlan,
    objectives: Sequence[Objective],
    earlier: Sequence[str] = (),
    *,
    dense: bool,
    fuse: bool,
) -> MicrobatchPlan:
    """Returns the constants of the passes that compute the gradients of some objectives.

    Args:
        plan: the run's constants.
        objectives: the objectives.
        earlier: names of the objectives that are updated before them in a step.
        dense: whether sparse gradients are made dense.
        fuse: whether BatchNormalization uses TensorFlow's fused kernel.
    """
    return MicrobatchPlan(
        model=plan.model,
        weights=plan.weights,
        held_back=plan.held_back,
        seeds=plan.seeds,
        compute_loss=plan.compute_loss,
        objectives=objectives,
        earlier=tuple(earlier),
        dense=dense,
        single_pass=plan.single_pass,
        fuse_batch_norm=fuse,
        global_loss=plan.global_loss,
        num_microbatches=plan.num_microbatches,
        float8=plan.float8 if plan.record_gradients else (),
        keep_losses=plan.kept is not None and not plan.global_loss,
    )


def ones(batch: Batch) -> tf.Tensor:
    """Returns a weight of 1 for each example of a batch."""
    return tf.ones([count_examples(batch)])


def no_metrics(batch: Batch, aux: Aux) -> None:
    """Does nothing: the default of `update_metrics` in `plan_step`."""
    del batch, aux  # AutoGraph warns about a function that has only a docstring
