"""Builds the parts of a trainer, checks them, and restores a checkpoint."""

import dataclasses
import functools
import pathlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import keras
import numpy as np
import tensorflow as tf
from absl import logging

import strategies
from scaling.base.argument_checks import shown
from strategies.division import cut_rows, tensors_in
from trainer.base.argument_checks import local_path
from trainer.base.tracking import copies_of, read_copies, tracked, tracked_variables, write_copies
from trainer.checkpoint import CheckpointSaver
from trainer.checkpoint.contents import Contents, others_with_variables
from trainer.checkpoint.saver import has_checkpoints
from trainer.checkpoint.warm_start import warm_start, weights_of
from trainer.evaluation.evaluator import Evaluator
from trainer.fingerprint import (
    Fingerprint,
    comparable,
    diff,
    entries,
    fingerprint,
    group_of,
    text_of_rule,
    versions,
)
from trainer.float8.convert import convert_to_float8
from trainer.keras_compat import all_layers, is_metric_built, recompute_constants
from trainer.log.summary import check_metric_names
from trainer.loop.inner import run_batch, run_steps
from trainer.loop.parameter_server import RemoteSteps
from trainer.loop.pending import HOST, Pending
from trainer.losses.metrics import results_of
from trainer.losses.output_mask import check_mask_values
from trainer.losses.value_checks import checked
from trainer.replay.recorder import FlightRecorder
from trainer.replay.rerun import recorded_variables
from trainer.run.declared import declared_by, loss_of
from trainer.run.parts import (
    Metrics,
    Parts,
    PendingSteps,
    RunSteps,
    Slots,
)
from trainer.run.resolve import dtype_policy
from trainer.run.slots import (
    make_slots,
    missed_by_trained,
    optimizers_of,
    slots_from,
    slots_now,
)
from trainer.step import StepPlan, StepReport, TrainState, plan_step
from trainer.step.checks import check_dtype_policies, check_global_loss, check_inputs_declared
from trainer.step.float8 import is_float8
from trainer.step.held_back import held_back_variables
from trainer.step.losses import split_result
from trainer.step.objective import single_optimizers
from trainer.step.randomness import seed_states
from trainer.step.trace import require_single_attempt, written_variables
from trainer.step.types import Batch, MetricsByName, Model
from trainer.step.xla import WITH_PASSES, layers_without_xla, listed_layers, warn_of_plain_step

if TYPE_CHECKING:
    from trainer.trainer import Trainer

# A function of (batch, training) that calls the model, which then creates its variables.
Forward = Callable[..., Any]


# Attributes of a trainer that hold what has another name in a checkpoint, is used only to build it,
# or belongs to its last call: a checkpoint must not depend on which calls were before.
OWN = frozenset(
    [
        "_failed",
        "_given_metrics",
        "_given_model",
        "_given_optimizer",
        "_loop",
        "_online",
        "_parts",
        "_position",
        "_setup",
        "_trained_on",
    ]
)


class PartsOfPlan(TypedDict):
    """The fields of `Parts` that depend on the step's plan."""

    plan: StepPlan
    pending: PendingSteps
    run_steps: RunSteps
    run_batch: Any
    evaluator: Evaluator
    recorder: FlightRecorder | None


def build(trainer: "Trainer", batch: Batch, forward: Forward, *, training: bool = True) -> Parts:
    """Builds the parts of a trainer, checks them, and restores a checkpoint if there is one.

    Args:
        trainer: the trainer.
        batch: the first global batch.
        forward: a function of (batch, training) that calls the model. It is used if the model
            creates its variables when it is first called.
        training: whether to train, and not only to evaluate. If not, files in `model_dir` are only
            read, and neither an optimizer nor trainable variables are needed.

    Raises:
        TypeError, ValueError: if the model, the optimizer or the checkpoint cannot be used.
    """
    model, strategy = trainer.model, trainer.strategy
    check_inputs_declared(model, trainer.precision)
    with strategy.scope():
        build_model(trainer, batch, forward)
        # Before the optimizer is built: some optimizers copy the weights when they are built.
        load_initial_weights(trainer, clean_up=training)
        declared = declared_by(trainer)
        if training or trainer.compile_mode_open:
            leave_out_xla(trainer, batch)
        plan = make_plan(trainer) if training or can_train(trainer) else plan_evaluation(trainer)
        state = TrainState(trainer.rule, trainer.seed)
        metrics = build_metrics(trainer)
        if forward == trainer.compute_loss:  # `predict` has no labels
            create_metric_variables(trainer, metrics, batch)
        checkpoints = make_checkpoints(trainer, state, metrics.train)
        declared |= entries("metrics", metrics.train)
        again = give_saved_slots(trainer, checkpoints)
        if again:
            checkpoints = make_checkpoints(trainer, state, metrics.train)
        if training:
            checkpoints.restore()
        elif checkpoints.follow(clean_up=False) and checkpoints.latest:
            # Another process may be training this run.
            saved = checkpoints.facts.get("fingerprint", {})
            for place, (was, now) in diff(*comparable(saved, declared)).items():
                # An evaluation may have another precision.
                if group_of(place) == "model" and not place.endswith(".dtype"):
                    path = checkpoints.latest
                    logging.warning("%s was %s in %s and is %s now", place, was, path, now)
        slots = slots_now(trainer, slots_from(checkpoints.facts, trainer))
        if again or missed_by_trained(slots):
            plan = make_plan(trainer, slots)
        recompute_constants(model)
    # Created outside the strategy's scope, as a plain variable that other threads can set.
    with tf.device(HOST):
        stop = tf.Variable(initial_value=False, trainable=False, name="stop")
    depending = parts_of_plan(trainer, plan, state, stop, metrics)
    return Parts(
        state=state,
        stop=stop,
        metrics=metrics,
        checkpoints=checkpoints,
        declared=declared,
        slots=slots,
        **depending,
    )


def attributes_of(trainer: "Trainer") -> dict[str, Any]:
    """Returns the attributes of a trainer and of its class that may hold variables of the run."""
    found = {name: value for name, value in vars(trainer).items() if name not in OWN}
    for cls in type(trainer).__mro__:
        for name, value in vars(cls).items():
            found.setdefault(f"{cls.__name__}.{name}", value)
    return found


def give_saved_slots(trainer: "Trainer", checkpoints: CheckpointSaver) -> bool:
    """Gives the optimizers slots for all variables for which the newest checkpoint has some.

    A run whose layers were unfrozen between two calls begins frozen when its program is started
    again, and finds a checkpoint from after the change.

    Returns:
        Whether an optimizer was built again.
    """
    wanted = slots_from(checkpoints.facts_of_newest(), trainer)
    return wanted is not None and make_slots(trainer, wanted)


def can_train(trainer: "Trainer") -> bool:
    """Returns whether a trainer, whose model is built, has an optimizer and anything to train."""
    return trainer.has_optimizer and bool(trainer.model.trainable_variables)


def load_initial_weights(trainer: "Trainer", *, clean_up: bool) -> None:
    """Loads the weights at `init_from` into the model, unless the run has a checkpoint of its own.

    Args:
        trainer: the trainer.
        clean_up: as for `CheckpointSaver.restore`.

    Raises:
        ValueError: if there are no weights there, if they do not fit the model, or if an optimizer
            already holds copies of other weights.
    """
    init_from = trainer.checkpoints.init_from
    if not init_from or has_checkpoints(
        checkpoint_folder(trainer), trainer.strategy, clean_up=clean_up
    ):
        return
    for optimizer in optimizers_of(trainer).values():
        if getattr(optimizer, "built", False) and holds_copies(optimizer, trainer.model):
            raise ValueError(
                f"`init_from` must be None if the optimizer has been built: {optimizer.name!r} "
                "holds copies of other weights"
            )
    skip = trainer.checkpoints.init_from_skip
    warm_start(local_path(init_from), trainer.model, skip)


def holds_copies(optimizer: keras.optimizers.Optimizer, model: Model) -> bool:
    """Returns whether a variable of an optimizer equals a trainable variable that is not all 0."""
    weights = [variable.numpy() for variable in model.trainable_variables]
    kept = [variable.numpy() for variable in optimizer.variables]
    return any(np.any(one) and np.array_equal(one, other) for one in weights for other in kept)


def parts_of_plan(
    trainer: "Trainer",
    plan: StepPlan,
    state: TrainState,
    stop: tf.Variable,
    metrics: Metrics,
) -> PartsOfPlan:
    """Returns the parts that depend on the plan, keyed by their names in `Parts`."""
    step: Callable[[Any], StepReport] = require_single_attempt(trainer.train_step)
    if trainer.monitoring.check_data:
        step = checked(step, trainer.example_weights, trainer.label_rules)
    loop, pending = make_loop(trainer, step, plan, state, stop)
    roots = [trainer.model, *attributes_of(trainer).values()]
    generators = [one for one in tracked(*roots) if isinstance(one, tf.random.Generator)]
    return {
        "plan": plan,
        "run_steps": loop,
        "pending": pending,
        "run_batch": tf.function(
            functools.partial(
                run_batch,
                step,
                lambda: (results_of(metrics.train), plan.kept.take() if plan.kept else None),
            ),
            autograph=False,
            # Batches of many sizes share a trace; but XLA keeps rows of a known number only.
            reduce_retracing=not (plan.kept and plan.jit_compile == "step"),
        ),
        "evaluator": Evaluator(trainer, plan, trainer.eval_step, state, stop, generators),
        "recorder": make_recorder(trainer, plan, state)
        if trainer.skips.max_records and plan.groups
        else None,
    }


def make_loop(
    trainer: "Trainer",
    step: Callable[[Any], StepReport],
    plan: StepPlan,
    state: TrainState,
    stop: tf.Variable,
) -> tuple[RunSteps, PendingSteps]:
    """Returns the function that takes many steps in one call, and what is known while it runs."""
    strategy = trainer.strategy
    found = strategies.capabilities(strategy)
    if found.asynchronous:
        remote = RemoteSteps(step, plan, state, stop)
        return remote, remote  # type: ignore[return-value]  # lacks the tracing methods of RunSteps
    device = state.halted.device if found.on_gpu else HOST  # where steps compute their reports
    pending = Pending(plan.recorded, len(plan.float8), device=device)
    loop = functools.partial(
        run_steps,
        step,
        state.halted,
        lambda: strategies.any_worker(stop.read_value(), strategy),
        pending,
        keep_overflows=trainer.skips.max_records > 0,
    )
    traced: RunSteps = tf.function(loop, autograph=False)  # see `base.autograph`
    return traced, pending


def build_metrics(trainer: "Trainer") -> Metrics:
    """Creates one set of metrics for training and another for evaluation."""
    made = Metrics(trainer.build_metrics(), trainer.build_metrics())
    for metrics in made:
        if not isinstance(metrics, dict):
            raise TypeError(f"`metrics` must return a dict by name; got {type(metrics).__name__}")
        check_metric_names(metrics)
    return made


def create_metric_variables(trainer: "Trainer", metrics: Metrics, batch: Batch) -> bool:
    """Updates metrics that create their variables in their first update, without any effect.

    Within a step it would be too late: replicas cannot create variables there, and a checkpoint
    could not be restored into them. Call it in the strategy's scope.

    Returns:
        Whether one of them has its variables now. `update_metrics` may leave some out.
    """
    unbuilt = [one for own in metrics for one in own.values() if not is_metric_built(one)]
    if not unbuilt:
        return False

    def update(examples: Batch) -> None:
        _, aux = split_result(trainer.compute_loss(examples, training=False))
        trainer.update_metrics(examples, aux)

    for own in metrics:
        with trainer.using_metrics(own):
            call_without_effect(update, batch, trainer)
    return any(map(is_metric_built, unbuilt))


def call_without_effect(call: Callable[[Batch], object], batch: Batch, trainer: "Trainer") -> None:
    """Calls a function that creates variables; those that exist are as they were afterwards.

    Args:
        call: a function of examples.
        batch: the first batch. One example is enough to create the variables, as a rule; a loss
            that looks at groups of examples needs all.
        trainer: the trainer that reaches the variables.
    """
    found = tracked_variables([trainer.model, *attributes_of(trainer).values()])
    plain = [variable for variable in found if isinstance(variable, tf.Variable)]
    before = read_copies(plain, trainer.strategy)
    try:
        with dtype_policy(trainer.precision):  # Keras variables cannot be assigned in this scope
            enough = True
            try:
                with keras.StatelessScope():
                    call(cut_rows(batch, 0, 1))
            except Exception:  # noqa: BLE001  # the user's code, and all libraries below it
                enough = False
            if not enough:
                with keras.StatelessScope():
                    call(batch)
    finally:
        write_copies(plain, before, trainer.strategy)


def checkpoint_folder(trainer: "Trainer") -> pathlib.Path | None:
    """Returns the folder of a trainer's checkpoints; None if it writes none."""
    return trainer.checkpoints.folder_in(trainer.model_dir)


def make_checkpoints(
    trainer: "Trainer",
    state: TrainState,
    metrics: MetricsByName,
    folder: pathlib.Path | None = None,
) -> CheckpointSaver:
    """Returns the checkpoints of a run, which hold all variables of its trainer.

    Args:
        trainer: the trainer.
        state: the run's state.
        metrics: the metrics of training.
        folder: where to write; None for the trainer's own folder, if it writes checkpoints.
    """
    model, known = trainer.model, optimizers_of(trainer)
    optimizers = known if can_train(trainer) else {}
    own = {name: each for name, each in vars(state).items() if isinstance(each, tf.Variable)}
    items = {"model": model, "state": tf.train.Checkpoint(**own), **optimizers}
    for name, item in trainer.checkpoint_items().items():
        if name in (*items, "trainer"):
            raise ValueError(
                f"`checkpoint_items` must return names that are not taken; got {shown(name)}"
            )
        items[name] = item
    for name, optimizer in optimizers.items():
        # TensorFlow does not find the inner optimizers of a `MultiOptimizer` by itself.
        inner = [one for one in single_optimizers(optimizer) if one is not optimizer]
        items |= {f"{name}.{place}": one for place, one in enumerate(inner)}
    others = others_with_variables(attributes_of(trainer), known | items, metrics)
    contents = Contents(items | {"trainer": others}, state.loss_scaler, metrics, trainer.strategy)
    variables = {"model": weights_of(model)}
    variables |= {name: optimizer.variables for name, optimizer in optimizers.items()}
    return CheckpointSaver(
        folder or checkpoint_folder(trainer),
        trainer.checkpoints.max_to_keep,
        contents,
        variables,
        trainer.rule,
        trainer.strategy,
        asynchronous=trainer.checkpoints.background,
    )


# Traced steps whose variables are known to be saved.
SAVED: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


def check_all_saved(
    traced: tf.types.experimental.ConcreteFunction, trainer: "Trainer", parts: Parts
) -> None:
    """Raises ValueError if a traced step writes a variable that the run's checkpoints do not hold.

    Args:
        traced: the function that takes steps.
        trainer: the trainer.
        parts: its parts.
    """
    in_replica = strategies.capabilities(trainer.strategy).decides_in_replica
    if checkpoint_folder(trainer) is None or in_replica or traced.graph in SAVED:
        return
    # Each step sets the states of seed generators; reports and rows are of a single loop.
    transient = tracked_variables([*parts.plan.seeds, *vars(parts.pending).values()])
    if parts.plan.kept:
        transient += parts.plan.kept.variables
    held = [*parts.checkpoints.variables, *transient]
    copies = [copy for variable in held for copy in copies_of(variable, trainer.strategy)]
    known = {id(copy.handle) for copy in copies}
    for variable in written_variables(traced, trainer.strategy)[0]:
        if any(id(copy.handle) not in known for copy in copies_of(variable, trainer.strategy)):
            name = getattr(variable, "name", "a variable without a name")
            raise ValueError(
                f"`model_dir` must hold every variable that a step writes; got {name!r}, which is "
                "no attribute of the model or trainer, and not in checkpoint_items()"
            )
    SAVED.add(traced.graph)


def leave_out_xla(trainer: "Trainer", batch: Batch) -> None:
    """Chooses a step without XLA for batches of strings or ragged tensors, if "auto" may choose."""
    if not trainer.compile_mode_open or trainer.jit_compile not in WITH_PASSES:
        return
    for part in tensors_in(batch):
        ragged = isinstance(part, tf.RaggedTensor)
        if ragged or part.dtype == tf.string:
            what = f"batches with {'ragged tensors' if ragged else 'strings'}"
            where = where_xla_is_needed(trainer)
            warn_of_plain_step(what, where, "turn them into dense numbers")
            trainer.jit_compile = False
            return


def layers_of_trainer_without_xla(trainer: "Trainer") -> list[keras.Layer]:
    """Returns the layers of a trainer's model and attributes that XLA cannot compile."""
    return layers_without_xla(trainer.model, *attributes_of(trainer).values())


def where_xla_is_needed(trainer: "Trainer") -> str:
    """Returns where a trainer's step is slow without XLA, for `warn_of_plain_step`."""
    on_gpu = strategies.capabilities(trainer.strategy).on_gpu
    return "on a GPU" if on_gpu else f"in {trainer.precision.compute_dtype} on a CPU"


def build_model(trainer: "Trainer", batch: Batch, forward: Forward) -> None:
    """Calls the model once if it creates its variables when it is first called."""
    model = trainer.model
    if not getattr(model, "built", bool(getattr(model, "trainable_variables", ()))):
        call_without_effect(lambda examples: forward(examples, training=False), batch, trainer)
    if isinstance(model, keras.Layer):
        check_mask_values(model)
        if model.trainable_variables:
            check_dtype_policies(model, trainer.precision)
    if trainer.precision.name == "mixed_float8" and not any(map(is_float8, all_layers(model))):
        convert_to_float8(model)


def make_plan(trainer: "Trainer", slots: Slots | None = None) -> StepPlan:
    """Returns the step's plan for a trainer's settings.

    Args:
        trainer: the trainer.
        slots: the slots of its optimizers, which were built, and told of the moving average, by
            another plan; None if this is the first one.
    """
    # An optimizer is told of the moving average once.
    updates = trainer.updates
    updates = updates if slots is None else dataclasses.replace(updates, ema_momentum=None)
    without_xla = layers_of_trainer_without_xla(trainer) if trainer.compile_mode_open else []
    if without_xla and trainer.jit_compile in WITH_PASSES:
        warn_of_plain_step(listed_layers(without_xla), where_xla_is_needed(trainer))
    if without_xla or (trainer.compile_mode_open and gathers(trainer)):
        trainer.jit_compile = False
    return plan_step(
        strategy=trainer.strategy,
        model=trainer.model,
        optimizer=trainer.optimizer,
        compute_loss=trainer.compute_loss,
        rule=trainer.rule,
        example_weights=weights_function(trainer),
        update_metrics=trainer.update_metrics,
        num_microbatches=trainer.num_microbatches,
        updates=updates,
        skips=trainer.skips,
        jit_compile=trainer.jit_compile,
        record_gradients=trainer.monitoring.record_gradients,
        others=list(attributes_of(trainer).values()),
        missed=missed_by_trained(slots or {}),
        reduction=trainer.losses.reduction,
    )


def gathers(trainer: "Trainer") -> bool:
    """Returns whether replicas exchange rows in a trainer's loss."""
    return trainer.losses.reduction == "global" and trainer.strategy.num_replicas_in_sync > 1


def weights_function(trainer: "Trainer") -> Callable[[Batch], tf.Tensor] | None:
    """Returns a trainer's `example_weights`; None if it is the default one, for a global loss."""
    unused = trainer.losses.reduction == "global" and not trainer.weights_overridden
    return None if unused else trainer.example_weights


def plan_evaluation(trainer: "Trainer") -> StepPlan:
    """Returns the plan of a trainer that only evaluates: one without objectives."""
    others = list(attributes_of(trainer).values())
    jit_compile = trainer.jit_compile
    if layers_of_trainer_without_xla(trainer) or (trainer.compile_mode_open and gathers(trainer)):
        jit_compile = False
    if trainer.losses.reduction == "global":
        check_global_loss(
            trainer.strategy,
            num_microbatches=1,
            example_weights=weights_function(trainer),
            jit_compile=jit_compile,
            float32_after=None,
        )
    return StepPlan(
        strategy=trainer.strategy,
        model=trainer.model,
        rule=trainer.rule,
        groups=(),
        weights=tuple(trainer.model.trainable_variables),
        compute_loss=trainer.compute_loss,
        example_weights=trainer.example_weights,
        update_metrics=trainer.update_metrics,
        num_microbatches=1,
        updates=trainer.updates,
        skips=trainer.skips,
        jit_compile=jit_compile,
        record_gradients=False,
        seeds=tuple(seed_states(trainer.model, others)),
        held_back=tuple(held_back_variables(trainer.model, others)),
        declared=(),
        updated=(),
        reduction=trainer.losses.reduction,
    )


def make_recorder(trainer: "Trainer", plan: StepPlan, state: TrainState) -> FlightRecorder:
    """Returns a flight recorder for a trainer that has a `model_dir`."""
    return FlightRecorder(
        pathlib.Path(trainer.model_dir or "") / "overflows",
        trainer.skips.max_records,
        trainer.skips.max_record_bytes,
        recorded_variables(plan),
        trainer.strategy,
        state.random_seed,
        recorded_settings(trainer)
        | {"jit_compile": plan.jit_compile, "computation": recorded_computation(trainer)},
    )


def recorded_computation(trainer: "Trainer") -> Fingerprint:
    """Returns what a recorded step has computed, as far as is known. The model must be built."""
    policy = trainer.precision.policy
    return fingerprint(trainer.model, {}, policy, loss=loss_of(trainer), versions=versions())


def recorded_settings(trainer: "Trainer") -> dict[str, Any]:
    """Returns the settings that must be the same when a recorded step is run again."""
    return {
        "precision": trainer.precision.name,
        "jit_compile": trainer.jit_compile,
        "num_microbatches": trainer.num_microbatches,
        "alternate_optimizers": trainer.updates.alternate_optimizers,
        "updates_per_step": trainer.updates.updates_per_step,
        "reduce_dtype": trainer.updates.reduce_dtype,
        "reduce_bucket_bytes": trainer.updates.reduce_bucket_bytes,
        "rule": text_of_rule(trainer.rule),
        "num_replicas": trainer.strategy.num_replicas_in_sync,
    }
