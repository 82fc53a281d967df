"""What a trainer is made of once data has come: built, checked, and restored if it can be."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import strategies
from trainer.checkpoint import Checkpoints
from trainer.checkpoint.contents import Contents, attributes_with_variables
from trainer.checkpoint.warm_start import warm_start, weights_of
from trainer.config.resolve import dtype_policy
from trainer.evaluation.evaluator import Evaluator
from trainer.loop.inner import run_steps
from trainer.loop.parameter_server import RemoteSteps
from trainer.replay.recorder import FlightRecorder
from trainer.replay.rerun import recorded_variables
from trainer.step import StepPlan, TrainState, plan_step
from trainer.step.checks import check_dtype_policies, check_model

# Variables of `TrainState` whose names in a checkpoint are older than the names they have now.
SAVED_AS = {"consecutive_skips": "skips_in_a_row"}


class Parts(NamedTuple):
    """What does the work."""

    plan: StepPlan
    state: TrainState
    run_steps: Any  # a tf.function: see `loop.run_steps`
    stop: tf.Variable  # shape=(), bool: set, from any thread, it ends `run_steps` and evaluations
    metrics: dict[bool, dict[str, keras.metrics.Metric]]  # of training; True: of evaluations
    evaluator: Evaluator
    checkpoints: Checkpoints
    recorder: FlightRecorder | None


def build(trainer: Any, batch: Any, forward: Callable[..., Any]) -> Parts:
    """Builds what is not built yet, checks it, and takes up an earlier run if there is one.

    Args:
        trainer: a `Trainer`.
        batch: the first one.
        forward: (batch, training) -> anything: calls the model, if that is needed to build it.

    Raises:
        TypeError, ValueError: if model, optimizer or checkpoint do not fit.
    """
    model, strategy = trainer.model, trainer.strategy
    check_model(model, trainer.precision)
    trainer.skip_policy.check_model(model)
    with strategy.scope():
        build_model(trainer, batch, forward)
        plan = make_plan(trainer)
        state = TrainState(trainer.rule, trainer.seed)
        metrics = build_metrics(trainer)
        checkpoints = make_checkpoints(trainer, state, metrics[False], trainer.model_dir)
        if not checkpoints.restore() and trainer.saving.init_from:
            warm_start(trainer.saving.init_from, model)
    # Not in the strategy's scope: a plain variable, which another thread can assign.
    stop = tf.Variable(initial_value=False, trainable=False, name="stop")
    decided = parts_of_plan(trainer, plan, state, stop)
    return Parts(state=state, stop=stop, metrics=metrics, checkpoints=checkpoints, **decided)


def parts_of_plan(
    trainer: Any, plan: StepPlan, state: TrainState, stop: tf.Variable
) -> dict[str, Any]:
    """Returns the parts, by name, that are others if the plan is another."""
    return {
        "plan": plan,
        "run_steps": make_loop(trainer, plan, state, stop),
        "evaluator": Evaluator(
            trainer,
            trainer.strategy,
            plan.objectives,
            trainer.eval_step,
            stop,
            jit_compile=plan.jit_compile is True,
        ),
        "recorder": make_recorder(trainer, plan, state) if trainer.max_overflow_records else None,
    }


def make_loop(
    trainer: Any, plan: StepPlan, state: TrainState, stop: tf.Variable
) -> Callable[..., Any]:
    """Returns what takes many steps in one call."""
    strategy = trainer.strategy
    if strategies.is_asynchronous(strategy):
        return RemoteSteps(trainer.train_step, strategy, state.halted, stop, state.outcomes)
    loop = functools.partial(
        run_steps,
        trainer.train_step,
        state.halted,
        lambda: strategies.any_worker(stop.read_value(), strategy),
        recorded=plan.recorded,
        keep_overflows=trainer.max_overflow_records > 0,
    )
    return tf.function(loop, autograph=False)  # see `step.user_code`


def build_metrics(trainer: Any) -> dict[bool, dict[str, keras.metrics.Metric]]:
    """Makes the metrics of the training (False), and those of evaluations (True)."""
    made = {False: trainer.build_metrics(), True: trainer.build_metrics()}
    for metrics in made.values():
        if not isinstance(metrics, dict):
            raise TypeError(
                f"`metrics` must be made by name, in a dict; got {type(metrics).__name__}. The log "
                "calls them by their names. Return for instance "
                '{"accuracy": keras.metrics.Accuracy()}.'
            )
    return made


def make_checkpoints(
    trainer: Any,
    state: TrainState,
    metrics: dict[str, keras.metrics.Metric],
    model_dir: pathlib.Path | None,
) -> Checkpoints:
    """Says what a checkpoint holds: whatever the trainer has that keeps variables."""
    model, optimizers = trainer.model, optimizers_by_item(trainer.optimizer)
    variables_of_state = vars(state).items()
    own = {
        SAVED_AS.get(name, name): each
        for name, each in variables_of_state
        if isinstance(each, tf.Variable)
    }
    items = {"model": model, "state": tf.train.Checkpoint(**own), **optimizers}
    items |= check_items(trainer.checkpoint_items(), items)
    others = attributes_with_variables(trainer, [*items.values(), *metrics.values()])
    contents = Contents(items | {"trainer": others}, state.loss_scaler, metrics, trainer.strategy)
    variables = {"model": weights_of(model)}
    variables |= {name: optimizer.variables for name, optimizer in optimizers.items()}
    return Checkpoints(
        model_dir,
        trainer.saving.max_to_keep,
        contents,
        variables,
        trainer.rule,
        trainer.strategy,
        asynchronous=trainer.saving.async_checkpoint,
    )


def check_items(items: dict[str, Any], taken: dict[str, Any]) -> dict[str, Any]:
    """Returns the items, or raises ValueError if a name is one of ours."""
    for name in items:
        if name in (*taken, "trainer"):
            raise ValueError(
                f"`checkpoint_items` must return names of its own; got {name!r}. A checkpoint has "
                "that already. Call it something else."
            )
    return items


def build_model(trainer: Any, batch: Any, forward: Callable[..., Any]) -> None:
    """Lets a model make the variables that it makes when it is called."""
    model = trainer.model
    if not getattr(model, "built", bool(getattr(model, "trainable_variables", ()))):
        # With one example. In a stateless scope, so that it makes variables and writes none.
        one = tf.nest.map_structure(lambda tensor: tensor[:1], batch)
        with dtype_policy(trainer.precision), keras.StatelessScope():
            forward(one, training=False)
    if isinstance(model, keras.Model) and model.trainable_variables:
        check_dtype_policies(model, trainer.precision)


def make_plan(trainer: Any) -> StepPlan:
    """Hands everything a step needs to know of a trainer to `plan_step`."""
    return plan_step(
        strategy=trainer.strategy,
        model=trainer.model,
        optimizer=trainer.optimizer,
        compute_loss=trainer.compute_loss,
        rule=trainer.rule,
        example_weights=trainer.example_weights,
        update_metrics=trainer.update_metrics,
        alternate=trainer.alternate_optimizers,
        num_microbatches=trainer.num_microbatches,
        clip=trainer.clip,
        ema_momentum=trainer.ema_momentum,
        jit_compile=trainer.jit_compile,
        record_gradients=trainer.record_gradients,
        max_retries=trainer.skip_policy.retries,
        attribute_causes=trainer.skip_policy.attribute_causes,
        halting_causes=trainer.skip_policy.halting_causes,
        max_skips=trainer.skip_policy.max_skips,
        float32_after=trainer.skip_policy.float32_after,
        others=list(vars(trainer).values()),
    )


def optimizers_by_item(optimizer: Any) -> dict[str, Any]:
    """Returns the optimizers by the names that they have in a checkpoint."""
    if isinstance(optimizer, dict):
        return {f"optimizer_{name}": one for name, one in optimizer.items()}
    return {"optimizer": optimizer}


def make_recorder(trainer: Any, plan: StepPlan, state: TrainState) -> FlightRecorder:
    """Returns a flight recorder for a trainer that has a `model_dir`."""
    return FlightRecorder(
        trainer.model_dir / "overflows",
        trainer.max_overflow_records,
        trainer.max_overflow_bytes,
        recorded_variables(plan),
        trainer.strategy,
        state.random_seed,
        setting_of(trainer) | {"jit_compile": plan.jit_compile},
    )


def setting_of(trainer: Any) -> dict[str, Any]:
    """Returns what must be the same for a step to end in the same way."""
    return {
        "precision": trainer.precision.name,
        "jit_compile": trainer.jit_compile,
        "num_microbatches": trainer.num_microbatches,
        "alternate_optimizers": trainer.alternate_optimizers,
        "loss_scale": trainer.loss_scale_argument,
        "rule": repr(trainer.rule),
        "num_replicas": trainer.strategy.num_replicas_in_sync,
        "strategy": trainer.strategy_name,
    }
