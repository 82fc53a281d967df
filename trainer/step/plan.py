"""What is the same in every step of a run: who computes what, and what happens on an overflow."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaling
from trainer.base.argument_checks import check_nonnegative
from trainer.base.keras_private import computing_in_float32
from trainer.step import checks
from trainer.step.clip import Clip
from trainer.step.differentiate import differentiate
from trainer.step.held_back import held_back_variables
from trainer.step.objective import Objective, objectives_of
from trainer.step.randomness import seed_states
from trainer.step.rollback import variables_in_reach
from trainer.step.xla import check_compile_mode, compiled_differentiation, runs_on_cpu


@dataclasses.dataclass(frozen=True)
class Phase:
    """Objectives whose gradients are taken together, at the same weights."""

    objectives: tuple[Objective, ...]
    differentiate: Any  # a tf.function; see `differentiate.differentiate`
    differentiate_in_float32: Any  # the same in float32, which a `tf.Module` cannot

    @property
    def positions(self) -> list[int]:
        """Of its variables in `model.trainable_variables`, in the order of the gradients."""
        return [position for objective in self.objectives for position in objective.positions]


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step's constants; `plan_step` makes one."""

    strategy: tf.distribute.Strategy
    model: Any  # a keras.Model or a tf.Module
    rule: scaling.LossScaleRule
    phases: tuple[Phase, ...]  # one after the other; one, but for alternating optimizers
    compute_loss: Callable[..., Any]  # the user's: (batch, training) -> losses
    example_weights: Callable[[Any], tf.Tensor]  # of a global batch
    update_metrics: Callable[[Any, Any], None]  # with a replica's (batch, aux)
    num_microbatches: int
    clip: Clip
    jit_compile: bool | str  # what XLA compiles: see `xla.COMPILE_MODES`
    record_gradients: bool  # whether every report counts its gradients' magnitudes
    max_retries: int  # further attempts with the same batch after an overflow
    attribute_causes: bool  # whether the rule is told only of what a scale can cure
    halting_causes: tuple[scaling.Cause, ...]  # after one of these no further step is attempted
    max_skips: int  # nor after this many skips in a row
    float32_after: int | None  # after this many, a step is computed in float32
    seeds: tuple[keras.Variable, ...]  # states of seed generators, given a key in each step
    held_back: tuple[keras.Variable, ...]  # what Keras computes with and may write; weights first
    undo: tuple[Any, ...]  # variables whose values are put back if the step is skipped

    @property
    def alone(self) -> bool:
        """Whether a step has one microbatch, on one replica: nothing is added to its gradients."""
        return self.strategy.num_replicas_in_sync == 1 and self.num_microbatches == 1

    @property
    def has_schedule(self) -> bool:
        """Whether a learning rate changes with the updates."""
        optimizers = [each.optimizer for phase in self.phases for each in phase.objectives]
        return any(isinstance(each.get_config()["learning_rate"], dict) for each in optimizers)

    @property
    def recorded(self) -> int:
        """The variables whose gradients' magnitudes are counted."""
        return len(self.model.trainable_variables) if self.record_gradients else 0

    @property
    def variable_names(self) -> list[str]:
        """Of `model.trainable_variables`, to say where a step went wrong."""
        return [getattr(v, "path", v.name) for v in self.model.trainable_variables]


def plan_step(
    *,
    strategy: tf.distribute.Strategy,
    model: Any,
    optimizer: keras.optimizers.Optimizer | Mapping[str, keras.optimizers.Optimizer],
    compute_loss: Callable[..., Any],
    rule: scaling.LossScaleRule,
    example_weights: Callable[[Any], tf.Tensor] | None = None,
    update_metrics: Callable[[Any, Any], None] | None = None,
    alternate: bool = False,
    num_microbatches: int = 1,
    clip: Clip = Clip(),  # noqa: B008  # frozen
    ema_momentum: float | None = None,
    jit_compile: bool | str = False,
    record_gradients: bool = False,
    max_retries: int = 0,
    attribute_causes: bool = True,
    halting_causes: Sequence[scaling.Cause] = (scaling.Cause.WEIGHTS,),
    max_skips: int = 100,
    float32_after: int | None = None,
    others: Sequence[Any] = (),
) -> StepPlan:
    """Checks what a step shall work with, builds the optimizers, and says how it goes.

    Call it in the strategy's scope, once, when the model is built.

    Args:
        strategy: where the replicas run.
        model: a `keras.Model` or a `tf.Module`, with all its variables.
        optimizer: one; or several by the name of an attribute of the model, whose variables
            they move.
        compute_loss: (batch, training) -> losses, or (losses, aux); see `Task.compute_loss`.
            With several optimizers, losses by their names.
        rule: the loss-scale rule.
        example_weights: global batch -> weights, shape (global_batch,); None is 1 each.
        update_metrics: (batch, aux) of a replica, on applied steps; None does nothing.
        alternate: whether several optimizers move one after the other, each seeing what those
            before it have done, and all are put back if one cannot; else all gradients are
            taken at the old weights.
        num_microbatches: into how many parts each replica's share is cut.
        clip: the bound on the gradients.
        ema_momentum: of a moving average of the weights, kept by the optimizer; None keeps none.
        jit_compile: what XLA compiles: True, each replica's forward and backward pass;
            "elementwise", of these all but products, convolutions and sums; "update", the
            optimizer's update of a single replica; False, nothing.
        record_gradients: whether reports count gradient magnitudes.
        max_retries: how often a step whose gradients overflowed is attempted again with the
            same batch, each time at another scale; 0 skips it.
        attribute_causes: False tells the rule of every skip alike, as other systems do.
        halting_causes: skips after which a run must not go on.
        max_skips: how many skips in a row end it, too.
        float32_after: after how many skips in a row a step is computed in float32.
        others: objects whose variables the loss may write, beside the model.

    Raises:
        TypeError, ValueError: for what the step cannot work with.

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
    example_weights = ones if example_weights is None else example_weights
    update_metrics = no_metrics if update_metrics is None else update_metrics
    checks.check_kinds(strategy, rule, clip)
    checks.check_lists(halting_causes, others)
    checks.check_functions(
        compute_loss=compute_loss, example_weights=example_weights, update_metrics=update_metrics
    )
    checks.check_bools(
        alternate=alternate,
        record_gradients=record_gradients,
        attribute_causes=attribute_causes,
    )
    check_compile_mode(jit_compile, strategy)
    checks.check_counts(
        num_microbatches=num_microbatches,
        max_skips=max_skips,
        float32_after=1 if float32_after is None else float32_after,
    )
    check_nonnegative("max_retries", max_retries)
    checks.check_built_model(model, strategy)
    checks.check_optimizers(optimizer, clip, ema_momentum, strategy)
    objectives = objectives_of(model, optimizer)
    build_optimizers(model, objectives, ema_momentum)
    groups = [[objective] for objective in objectives] if alternate else [objectives]
    held_back, seeds = held_back_variables(model, others), seed_states(model, others)
    slots = [variable for one in objectives for variable in one.optimizer.variables]
    undo = variables_in_reach([model, *others], held_back=[*held_back, *seeds, *slots])
    if not held_back:  # a `tf.Module`, in which they are written and not only handed in
        undo += seeds
    if len(groups) > 1:  # then some have moved when a later one cannot
        undo += [*held_back, *slots]
    plan = StepPlan(
        strategy=strategy,
        model=model,
        rule=rule,
        phases=(),
        compute_loss=compute_loss,
        example_weights=example_weights,
        update_metrics=update_metrics,
        num_microbatches=num_microbatches,
        clip=clip,
        jit_compile=jit_compile,
        record_gradients=record_gradients,
        max_retries=max_retries,
        attribute_causes=attribute_causes,
        halting_causes=tuple(halting_causes),
        max_skips=max_skips,
        float32_after=float32_after,
        seeds=tuple(seeds),
        held_back=tuple(held_back),
        undo=tuple(undo),
    )
    return with_phases(plan, groups, jit_compile)


def build_optimizers(
    model: Any, objectives: Sequence[Objective], ema_momentum: float | None
) -> None:
    """Lets every optimizer make its variables, for those of the model that it moves."""
    for objective in objectives:
        if ema_momentum is not None:
            objective.optimizer.use_ema = True
            objective.optimizer.ema_momentum = ema_momentum
        objective.optimizer.build([model.trainable_variables[at] for at in objective.positions])


def compiled_as(plan: StepPlan, jit_compile: bool | str) -> StepPlan:
    """Returns a plan of the same step, of which XLA compiles something else."""
    return with_phases(plan, [phase.objectives for phase in plan.phases], jit_compile)


def with_phases(
    plan: StepPlan, groups: Sequence[Sequence[Objective]], jit_compile: bool | str
) -> StepPlan:
    """Returns a plan with a phase for each group of objectives, compiled in a way."""
    # XLA would compile an update anew for every other number of rows.
    dense = jit_compile in (True, "update") or plan.num_microbatches > 1
    dense = dense or plan.float32_after is not None
    fuse = jit_compile is not True and runs_on_cpu(plan.strategy)  # where it has been measured

    def phase(group: Sequence[Objective]) -> Phase:
        def run(*args: Any) -> Any:
            return differentiate(
                *args,
                model=plan.model,
                held_back=plan.held_back,
                seeds=plan.seeds,
                compute_loss=plan.compute_loss,
                objectives=group,
                dense=dense,
                alone=plan.alone,
                fuse=fuse,
            )

        def run_in_float32(*args: Any) -> Any:
            with computing_in_float32(plan.model):
                return run(*args)

        ways = (compiled_differentiation(way, jit_compile) for way in (run, run_in_float32))
        return Phase(tuple(group), *ways)

    phases = tuple(phase(group) for group in groups)
    return dataclasses.replace(plan, phases=phases, jit_compile=jit_compile)


def ones(batch: Any) -> tf.Tensor:
    """Returns a weight of 1 for each example of a batch."""
    return tf.ones(tf.shape(checks.first_tensor(batch))[:1])


def no_metrics(batch: Any, aux: Any) -> None:
    """Updates nothing."""
