"""What a trainer refuses before its first step, each with what to do instead."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

import scaling
from scaling.rules.rule import check_rule
from trainer.base.argument_checks import check_bool, check_count, check_ema_momentum
from trainer.base.keras_private import all_layers
from trainer.step.clip import Clip
from trainer.step.rollback import tensorflow_variable


def check_model(model: Any, precision: scaling.Precision) -> None:
    """Raises TypeError or ValueError unless the step can run this model, built or not."""
    check_is_model(model)
    if isinstance(model, keras.Model):
        check_not_its_own_trainer(model)
        check_input_rounding(model, precision)


def check_is_model(model: Any) -> None:
    """Raises TypeError for anything else."""
    if not isinstance(model, (keras.Model, tf.Module)):
        raise TypeError(
            f"`model` must be a keras.Model or a tf.Module; got {type(model).__name__}. The step "
            "needs to find its variables. Return one from build_model(), or pass model=."
        )


def check_built_model(model: Any, strategy: tf.distribute.Strategy) -> None:
    """Raises TypeError or ValueError unless the step can train what this model has made."""
    check_is_model(model)
    if not model.trainable_variables:
        raise ValueError(
            "`model` must have trainable variables; got none. There is nothing to update. Create "
            "them in build_model() or when the model is first called."
        )
    if isinstance(model, keras.Model):
        check_synchronized(model, strategy)
    check_variables(model, strategy)


def check_not_its_own_trainer(model: keras.Model) -> None:
    """Refuses models that have been told to train themselves."""
    if model.compiled:
        raise ValueError(
            f"`model` must not be compiled; got {model.name!r}, on which compile() was called. Its "
            "own optimizer and loss would be ignored, and under mixed_float16 it wraps the "
            "optimizer in a second loss scaling. Leave compile() out."
        )
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            f"`model` must not have its own train_step; got {type(model).__name__}. It would never "
            "be called. Override Trainer.compute_loss instead."
        )


def check_policies(model: keras.Model, precision: scaling.Precision) -> None:
    """Refuses models built for another precision than the one asked for."""
    owners = {id(variable): owner_of(variable, model) for variable in model.weights}
    layers = list(owners.values())
    strangers = [
        layer for layer in layers if layer.compute_dtype not in ("float32", precision.compute_dtype)
    ]
    if strangers or precision.compute_dtype not in {layer.compute_dtype for layer in layers}:
        layer = (strangers or layers)[0]
        raise ValueError(
            f"`model` must be built under the policy {precision.name!r}; got layer {layer.name!r} "
            f"under {layer.dtype_policy.name!r}. The precision is chosen when layers are made. "
            "Build it in build_model() or pass a function as model=, and leave dtype= out, or give "
            "the trainer the precision the model has."
        )


def owner_of(variable: keras.Variable, model: keras.Model) -> keras.Layer:
    """Returns the innermost layer that holds a variable."""
    # Layers come from the outside in, so the last one to hold a variable is its owner.
    return [
        layer for layer in all_layers(model) if any(held is variable for held in layer.weights)
    ][-1]


def check_not_rounded(model: keras.Model, variable: keras.Variable) -> None:
    """Raises ValueError if a layer that computes in half precision assigns one of its weights."""
    layer = owner_of(variable, model)
    if layer.compute_dtype in ("float16", "bfloat16"):
        raise ValueError(
            f"`model` must not assign its weights in half precision; got {variable.path!r} of "
            f"layer {layer.name!r}, assigned under {layer.dtype_policy.name!r}. The float32 weight "
            "would be rounded in every step. Make that layer with dtype='float32'."
        )


def check_input_rounding(model: keras.Model, precision: scaling.Precision) -> None:
    """Refuses a Sequential, however deep, that would round its inputs, not knowing them yet."""
    if precision.compute_dtype == "float32":
        return
    for layer in all_layers(model):
        if isinstance(layer, keras.Sequential) and not layer.built:
            raise ValueError(
                f"`model` must know its input before it runs under {precision.name!r}; got "
                f"Sequential {layer.name!r} without one. Keras would give it a half-precision "
                "input, which rounds token ids above 256 or 2048. Put keras.Input(shape, "
                "dtype=...) first."
            )


def check_synchronized(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Refuses layers that would talk to other replicas in the middle of the forward pass."""
    for layer in all_layers(model):
        if getattr(layer, "synchronized", False) and strategy.num_replicas_in_sync > 1:
            raise ValueError(
                "`model` must have no synchronized layers on several replicas; got "
                f"{layer.name!r}. The step has one reduction, after the backward pass. Leave "
                "synchronized=True out; the moving statistics become their mean all the same."
            )


def check_variables(model: Any, strategy: tf.distribute.Strategy) -> None:
    """Refuses weights in half precision, and weights that belong to another strategy."""
    for variable in model.trainable_variables:
        name = getattr(variable, "path", variable.name)
        dtype = tf.as_dtype(variable.dtype)
        if dtype in (tf.float16, tf.bfloat16):
            raise ValueError(
                f"`model` must keep its weights in float32; got {name!r} in {dtype.name}. Half "
                "precision loses every update smaller than 2^-11 of a weight. Use a mixed_ policy, "
                "which computes in half and keeps float32 master weights."
            )
        if not strategy.extended.variable_created_in_scope(tensorflow_variable(variable)):
            raise ValueError(
                f"`model` must be made in the scope of the trainer's strategy; got {name!r}, made "
                "outside it. Each replica needs its own copy. Build it in build_model(), or pass a "
                "function as model=."
            )


def check_optimizers(
    optimizer: Any, clip: Clip, ema_momentum: float | None, strategy: tf.distribute.Strategy
) -> None:
    """Raises TypeError or ValueError unless the step can apply this optimizer, or all of these."""
    optimizers = list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]
    for one in optimizers:
        check_optimizer(one, strategy)
        check_own_settings(one, clip, ema_momentum)
    if len({id(one) for one in optimizers}) < len(optimizers):
        raise ValueError(
            "`optimizer` must be another object for each name; got one twice. Its slots belong to "
            "one part of the model. Make one for each."
        )


def check_optimizer(optimizer: Any, strategy: tf.distribute.Strategy) -> None:
    """Refuses what is no optimizer, is another strategy's, or does the step's work itself."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`optimizer` must not scale the loss itself; got a LossScaleOptimizer. The step scales "
            "and unscales, and two scalings would overflow. Pass its .inner_optimizer."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"`optimizer` must be a keras.optimizers.Optimizer; got {type(optimizer).__name__}. "
            "The step calls its apply(). Return one from build_optimizer(), or pass optimizer=."
        )
    # Its first variables, `iterations` among them, are as old as itself.
    for variable in optimizer.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise ValueError(
                "`optimizer` must be made in the scope of the trainer's strategy; got "
                f"{variable.path!r}, made outside it. Replicas would count their updates one by "
                "one. Make it in build_optimizer(), or pass a function as optimizer=."
            )
    if optimizer.loss_scale_factor is not None:
        raise ValueError(
            f"`optimizer` must have no loss_scale_factor; got {optimizer.loss_scale_factor!r}. It "
            "would divide gradients that are unscaled already. Leave it out, and give the trainer "
            "loss_scale=."
        )
    if optimizer.gradient_accumulation_steps is not None:
        raise ValueError(
            "`optimizer` must have no gradient_accumulation_steps; got "
            f"{optimizer.gradient_accumulation_steps!r}. It accumulates over batches, so that the "
            "schedule runs on parts of a step. Leave it out, and give the trainer "
            "num_microbatches=."
        )


def check_own_settings(
    optimizer: keras.optimizers.Optimizer, clip: Clip, ema_momentum: float | None
) -> None:
    """Refuses clipping and averages that are set in the step and in the optimizer too."""
    own = {name: getattr(optimizer, name) for name in ("clipnorm", "clipvalue", "global_clipnorm")}
    for name, value in own.items():
        if value is not None and clip.bounds():
            [(ours, bound)] = clip.bounds().items()
            raise ValueError(
                f"`{ours}` must be None if the optimizer clips too; got {bound!r} beside the "
                f"optimizer's {name}={value!r}. Clipping twice is never meant. Set one of the two."
            )
    if ema_momentum is None:
        return
    check_ema_momentum(ema_momentum)
    if optimizer.use_ema:
        raise ValueError(
            "`ema_momentum` must be None if the optimizer keeps an average; got "
            f"{ema_momentum!r} beside the optimizer's ema_momentum={optimizer.ema_momentum!r}. One "
            "average is enough. Set one of the two."
        )


def check_kinds(strategy: Any, rule: Any, clip: Any) -> None:
    """Raises TypeError unless these are what their names say."""
    if not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            f"`strategy` must be a tf.distribute.Strategy; got {strategy!r}. The replicas are its. "
            'Pass for instance strategies.create("mirrored").'
        )
    check_rule(rule)
    if not isinstance(clip, Clip):
        raise TypeError(
            f"`clip` must be a Clip; got {clip!r}. It names what it bounds. Pass for instance "
            "Clip(global_clipnorm=1.0), or Clip() for no bound."
        )


def check_lists(halting_causes: Any, others: Any) -> None:
    """Raises TypeError unless the one is a list of causes, and the other a list."""
    is_list = isinstance(halting_causes, (tuple, list))
    if not is_list or not all(cause in list(scaling.Cause) for cause in halting_causes):
        raise TypeError(
            f"`halting_causes` must be a list of scaling.Cause; got {halting_causes!r}. After a "
            "skip for one of them the run ends. Pass for instance [scaling.Cause.WEIGHTS]."
        )
    if not isinstance(others, (tuple, list)):
        raise TypeError(
            f"`others` must be a list; got {type(others).__name__}. The loss may write to each of "
            "its items. Pass [it]."
        )


def check_functions(**functions: Any) -> None:
    """Raises TypeError, naming the argument, for what cannot be called."""
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(
                f"`{name}` must be a function; got {type(function).__name__}. Every step calls it. "
                "Pass one that takes what plan_step says."
            )


def check_bools(**flags: Any) -> None:
    """Raises TypeError, naming the argument, for what is neither True nor False."""
    for name, flag in flags.items():
        check_bool(name, flag)


def check_counts(**counts: Any) -> None:
    """Raises ValueError, naming the argument, for what is no int of at least 1."""
    for name, count in counts.items():
        check_count(name, count)


def check_weights(weights: Any, batch: Any) -> tf.Tensor:
    """Returns example weights as float32, shape (global_batch,), or raises ValueError."""
    weights = tf.convert_to_tensor(weights)
    rows = first_tensor(batch).shape[0]
    if weights.shape.rank != 1 or (rows and weights.shape[0] not in (None, rows)):
        raise ValueError(
            f"`example_weights` must return one weight per example, shape ({rows or 'examples'},); "
            f"got shape {weights.shape}. Each multiplies one loss. Sum or average over any other "
            "dimension."
        )
    return tf.cast(weights, tf.float32)


def first_tensor(batch: Any) -> Any:
    """Returns a batch's first tensor; raises ValueError if no example can be told from it."""
    shapes = [tf.TensorShape(getattr(leaf, "shape", ())) for leaf in tf.nest.flatten(batch)]
    if not shapes or shapes[0].rank == 0:
        raise ValueError(
            "`batch` must hold tensors whose first dimension is the example; got "
            f"{'one of shape ()' if shapes else 'none'}. Each replica takes its share of it. Batch "
            "what you have, tensor[None] if it is one example."
        )
    return tf.nest.flatten(batch)[0]


def check_same_rule(plan: Any, run: Any) -> None:
    """Raises TypeError or ValueError unless there is a plan, and a run's state of the same rule."""
    if not hasattr(plan, "groups"):
        raise TypeError(
            f"`plan` must be a StepPlan; got {type(plan).__name__}. It says how a step goes. Pass "
            "what plan_step() returned."
        )
    if not hasattr(run, "loss_scaler"):
        raise TypeError(
            f"`run` must be a TrainState; got {type(run).__name__}. It counts the steps beside "
            "keeping the loss scale. Make it TrainState(plan.rule)."
        )
    ours, theirs = plan.rule, run.loss_scaler.rule
    if ours is not theirs and ours != theirs:
        raise ValueError(
            f"`run` must be made with the rule of the plan; got {theirs!r} for a plan with "
            f"{ours!r}. The one rule would move the other's state. Make it TrainState(plan.rule)."
        )
