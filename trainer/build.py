"""What a trainer is made of once data has come: built, checked, and restored if it can be."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import scaling
from trainer import settings
from trainer.checkpoint import Checkpoints, check_restored_scale
from trainer.evaluation import Evaluator
from trainer.loop import run_steps
from trainer.recorder import FlightRecorder
from trainer.rerun import recorded_variables
from trainer.step import StepPlan, TrainState, plan_step
from trainer.step.checks import check_model, check_policies


class Parts(NamedTuple):
    """What does the work."""

    plan: StepPlan
    state: TrainState
    run_steps: Any  # a tf.function: see `loop.run_steps`
    evaluator: Evaluator
    checkpoints: Checkpoints
    recorder: FlightRecorder | None


def build_metrics(trainer: Any) -> dict[bool, dict[str, keras.metrics.Metric]]:
    """Makes the metrics of the training (False), and those of evaluations (True)."""
    with trainer.strategy.scope():
        return {False: trainer.build_metrics(), True: trainer.build_metrics()}


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
    trainer.policy.check_model(model)
    with strategy.scope():
        build_model(trainer, batch, forward)
        plan = make_plan(trainer)
        state = TrainState(trainer.rule)
        items = {"model": model, "state": state, **optimizers_by_item(trainer.optimizer)}
        checkpoints = Checkpoints(
            trainer.model_dir, trainer.max_to_keep, **items, **trainer.checkpoint_items()
        )
        if path := checkpoints.restore():
            check_restored_scale(trainer.rule, float(state.loss_scaler.loss_scale), path)
    loop = functools.partial(
        run_steps,
        trainer.train_step,
        state.halted,
        counts=scaling.stats.COUNTS if trainer.record_gradients else 0,
        keep_overflows=trainer.max_overflow_records > 0,
    )
    objectives = [objective for phase in plan.phases for objective in phase.objectives]
    return Parts(
        plan=plan,
        state=state,
        run_steps=tf.function(loop),
        evaluator=Evaluator(
            trainer, strategy, objectives, trainer.eval_step, jit_compile=trainer.jit_compile
        ),
        checkpoints=checkpoints,
        recorder=make_recorder(trainer, plan) if trainer.max_overflow_records else None,
    )


def build_model(trainer: Any, batch: Any, forward: Callable[..., Any]) -> None:
    """Lets a model make the variables that it makes when it is called."""
    model = trainer.model
    if not getattr(model, "built", bool(getattr(model, "trainable_variables", ()))):
        # With one example. In a stateless scope, so that it makes variables and writes none.
        one = tf.nest.map_structure(lambda tensor: tensor[:1], batch)
        with settings.dtype_policy(trainer.precision), keras.StatelessScope():
            forward(one, training=False)
    if isinstance(model, keras.Model) and model.trainable_variables:
        check_policies(model, trainer.precision)


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
        max_retries=trainer.policy.retries,
        attribute_causes=trainer.policy.attribute_causes,
        halting_causes=trainer.policy.halting_causes,
        max_skips=trainer.policy.max_skips,
        float32_after=trainer.policy.float32_after,
        others=list(vars(trainer).values()),
    )


def optimizers_by_item(optimizer: Any) -> dict[str, Any]:
    """Returns the optimizers by the names that they have in a checkpoint."""
    if isinstance(optimizer, dict):
        return {f"optimizer_{name}": one for name, one in optimizer.items()}
    return {"optimizer": optimizer}


def make_recorder(trainer: Any, plan: StepPlan) -> FlightRecorder:
    """Returns a flight recorder for a trainer that has a `model_dir`."""
    return FlightRecorder(
        trainer.model_dir / "overflows",
        trainer.max_overflow_records,
        trainer.max_overflow_bytes,
        recorded_variables(plan),
        trainer.strategy,
        setting_of(trainer),
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
