"""Checks of the step's arguments. Each error says what to pass instead.

The checks use static information only and add no operations to a graph.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaling
from scaling.base.argument_checks import check_bool, check_integer, shown
from strategies.division import count_examples, known_examples, tensors_in
from trainer.base.argument_checks import (
    as_returned_tensor,
)
from trainer.base.tracking import name_of_variable, tensorflow_variable, tracked
from trainer.keras_compat import MultiOptimizer, all_layers, built_for, owners_of
from trainer.step.losses import nan_unless
from trainer.step.objective import optimizers_in, single_optimizers
from trainer.step.types import Batch, Model
from trainer.step.updates import Updates
from trainer.step.xla import supports_xla

# The number of significant bits in each half-precision dtype. Weights in such a dtype would lose
# small updates: an update smaller than 2^-bits of the weight is rounded away.
SIGNIFICANT_BITS = {"float16": 11, "bfloat16": 8}


def check_model(model: Model, precision: scaling.Precision) -> None:
    """Raises TypeError or ValueError unless the step can use this model, built or not."""
    check_is_model(model)
    if isinstance(model, keras.Layer):
        check_inputs_declared(model, precision)


def check_is_model(model: Model) -> None:
    """Raises TypeError unless `model` is a `keras.Layer` or a `tf.Module`."""
    if not isinstance(model, (keras.Layer, tf.Module)):
        raise TypeError(
            f"`model` must be a keras.Model, keras.Layer or tf.Module; got {type(model).__name__}."
        )


def check_built_model(model: Model, strategy: tf.distribute.Strategy) -> None:
    """Raises TypeError or ValueError unless the step can train the variables of this model."""
    check_is_model(model)
    if not model.trainable_variables:
        raise ValueError(
            "`model` must have trainable variables; got none. There is nothing to update. Create "
            "them in build_model() or when the model is first called."
        )
    if isinstance(model, keras.Layer):
        check_no_synchronized_layers(model, strategy)
    check_variables(model, strategy)


def check_own_steps(model: Model, names: Sequence[str], instead: str) -> None:
    """Raises ValueError if a model has steps of its own, which a default of the trainer ignores.

    Args:
        model: the model.
        names: methods that Keras's `fit`, `evaluate` or `predict` would call.
        instead: the trainer's method for the same.
    """
    for name in names if isinstance(model, keras.Model) else ():
        if name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name):
            raise ValueError(
                f"`model` must not override {name} unless the trainer overrides {instead}; got "
                f"{type(model).__name__}."
            )


def check_dtype_policies(model: keras.Model, precision: scaling.Precision) -> None:
    """Raises ValueError if a model was built for another precision than the trainer's."""
    owners = owners_of(model)
    layers = [owners[id(variable)] for variable in model.weights]
    others = [
        layer for layer in layers if layer.compute_dtype not in ("float32", precision.compute_dtype)
    ]
    if others or precision.compute_dtype not in {layer.compute_dtype for layer in layers}:
        layer = (others or layers)[0]
        raise ValueError(
            f"`model` must be built under the dtype policy {precision.policy!r}; got layer "
            f"{layer.name!r} under {layer.dtype_policy.name!r}. Create it in build_model(), in "
            "code, without dtype=; load the weights of a .keras file by init_from=."
        )


def check_not_assigned_in_half(model: keras.Model, variable: keras.Variable) -> None:
    """Raises ValueError if a layer that computes in half precision assigns one of its weights."""
    layer = owners_of(model)[id(variable)]
    if layer.compute_dtype in ("float16", "bfloat16"):
        raise ValueError(
            "`model` must not assign its weights in half precision; got an assignment to "
            f"{variable.path!r} by layer {layer.name!r} under {layer.dtype_policy.name!r}. The "
            "float32 weight would be rounded in every step. Create that layer with "
            "dtype='float32'."
        )


def check_inputs_declared(model: keras.Model, precision: scaling.Precision) -> None:
    """Raises ValueError if Keras would round the inputs of a Sequential model without an Input.

    Sequential models inside other models are checked too.
    """
    if precision.compute_dtype not in SIGNIFICANT_BITS:
        return
    for layer in all_layers(model):
        if isinstance(layer, keras.Sequential) and not layer.built:
            raise ValueError(
                f"`model` must declare its inputs to run under {precision.name!r}; got Sequential "
                f"{layer.name!r} without an input. Keras would cast its inputs to half precision, "
                "which rounds token ids above 2048 (float16) or 256 (bfloat16). Make "
                "keras.Input(shape, dtype=...) its first layer."
            )


def check_no_synchronized_layers(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError for layers that communicate with other replicas in the forward pass."""
    for layer in all_layers(model):
        if getattr(layer, "synchronized", False) and strategy.num_replicas_in_sync > 1:
            raise ValueError(
                "`model` must not have synchronized layers with several replicas; got "
                f"{shown(layer.name)}. Replicas communicate only after the backward pass. Leave "
                "out synchronized=True; moving statistics are averaged over replicas without it."
            )


def check_no_stateful_layers(model: Model) -> None:
    """Raises ValueError for recurrent layers whose state continues the rows of the last batch."""
    for layer in all_layers(model) if isinstance(model, keras.Layer) else []:
        if getattr(layer, "stateful", False) is True:
            raise ValueError(
                f"`model` must not have layers with stateful=True, such as {shown(layer.name)}, if "
                "batches are divided; use one replica and num_microbatches=1"
            )


def check_no_bfloat16_in_cudnn(*roots: Any) -> None:
    """Raises ValueError for recurrent layers whose gradients TensorFlow computes wrongly on a GPU.

    In bfloat16, the gradients of cuDNN's LSTM and GRU were zeros or arbitrary numbers with
    TensorFlow 2.21 on an H100, for `fit` too: as if nothing was written to them. Outputs are right,
    and so are gradients in other precisions, or without cuDNN.

    Args:
        roots: the model, and what else the loss may use.
    """
    for layer in tracked(*roots):
        if not isinstance(layer, (keras.layers.LSTM, keras.layers.GRU)):
            continue
        # Keras's own marks: no XLA where it uses cuDNN, which has no recurrent dropout.
        in_cudnn = not supports_xla(layer) and not layer.recurrent_dropout
        if in_cudnn and layer.compute_dtype == "bfloat16":
            raise ValueError(
                "`model` must not have layers that cuDNN computes in bfloat16; got "
                f"{shown(layer.name)} ({type(layer).__name__}). On a GPU, TensorFlow returns wrong "
                "gradients for them, without an error. Create the layer with use_cudnn=False, or "
                "train in mixed_float16 or float32."
            )


def check_variables(model: Model, strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError for weights that are complex, half, or of another strategy."""
    for variable in model.trainable_variables:
        name = name_of_variable(variable)
        dtype = tf.as_dtype(variable.dtype).name
        if dtype in SIGNIFICANT_BITS:
            raise ValueError(
                f"`model` must keep its weights in float32; got {shown(name)} in {dtype}. Updates "
                f"smaller than 2^-{SIGNIFICANT_BITS[dtype]} of a weight would be lost. Use a "
                "mixed_ dtype policy, which computes in half precision and keeps float32 weights."
            )
        if tf.as_dtype(variable.dtype).is_complex:
            raise ValueError(
                f"`model` must have real weights; got {shown(name)} in {dtype}: keep its real and "
                "imaginary parts as two weights."
            )
        if not strategy.extended.variable_created_in_scope(tensorflow_variable(variable)):
            raise ValueError(
                f"`model` must be created in the strategy's scope; got variable {name!r}, created "
                "outside it. Each replica needs its own copy. Create the model in build_model(), "
                "in a function passed as model=, or under strategy.scope(); call enable_lora "
                "there, too."
            )


def check_optimizers(
    optimizer: keras.optimizers.Optimizer | Mapping[str, keras.optimizers.Optimizer],
    updates: Updates,
    strategy: tf.distribute.Strategy,
) -> None:
    """Raises TypeError or ValueError unless the step can apply each of the optimizers."""
    optimizers = list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]
    if not optimizers:
        raise ValueError(
            "`optimizer` must hold at least one optimizer; got an empty dict. Each optimizer "
            "updates a part of the model. Pass {'critic': optimizer}, for example."
        )
    for one in optimizers:
        check_optimizer(one, strategy)
        for inner in optimizers_in(one)[1:]:
            check_optimizer(inner, strategy)
        for single in single_optimizers(one):
            check_not_set_twice(single, updates)
    if len({id(one) for one in optimizers}) < len(optimizers):
        raise ValueError(
            "`optimizer` must have a separate optimizer for each name; got the same one twice. An "
            "optimizer's slot variables belong to one part of the model. Create one optimizer for "
            "each name."
        )


def check_optimizer(
    optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy
) -> None:
    """Raises TypeError or ValueError unless the step can apply an optimizer.

    The step cannot apply objects that are not Keras optimizers, optimizers created under another
    strategy, or optimizers that scale the loss or accumulate gradients themselves.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`optimizer` must not scale the loss itself; got a LossScaleOptimizer. The step "
            "already scales the loss, and scaling twice would overflow. Pass its .inner_optimizer."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"`optimizer` must be a keras.optimizers.Optimizer; got {type(optimizer).__name__}. "
            "The step calls the optimizer's apply(). Return one from build_optimizer(), or pass "
            "optimizer=."
        )
    if not single_optimizers(optimizer):
        raise ValueError(
            "`optimizer` must know its inner optimizers before it is built; got a MultiOptimizer "
            "of a function. The inner optimizers are checked, and get their settings, before they "
            "create their slots. Pass a keras.optimizers.OptimizerMap to MultiOptimizer()."
        )
    # An optimizer creates some variables, such as `iterations`, in its constructor.
    for variable in optimizer.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise ValueError(
                "`optimizer` must be created in the strategy's scope; got variable "
                f"{variable.path!r}, created outside it. Every replica would add its updates to "
                "the same counter. Create the optimizer in build_optimizer(), in a function "
                "passed as optimizer=, or under strategy.scope()."
            )
    check_nothing_is_left_out(optimizer)


def check_nothing_is_left_out(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError for what `Model.fit` would do and the step would not, or would do twice."""
    if type(optimizer).apply_gradients is not keras.optimizers.Optimizer.apply_gradients:
        raise ValueError(
            f"`optimizer` must not override apply_gradients; got {type(optimizer).__name__}. The "
            "step calls the optimizer's apply(), so the override would be left out. Override "
            "apply(grads, trainable_variables) instead."
        )
    several = isinstance(optimizer, MultiOptimizer)
    if several and type(optimizer).apply is not MultiOptimizer.apply:
        raise ValueError(
            "`optimizer` must not override apply of MultiOptimizer; got "
            f"{type(optimizer).__name__}. The step calls apply() of the optimizers in it, so the "
            "override would be left out. Override apply of those."
        )
    if optimizer.loss_scale_factor is not None:
        raise ValueError(
            "`optimizer` must not set loss_scale_factor; got "
            f"{shown(optimizer.loss_scale_factor)}. The optimizer would divide gradients that are "
            "already unscaled. Leave out loss_scale_factor=, and pass loss_scale= to the trainer."
        )
    if optimizer.gradient_accumulation_steps is not None:
        raise ValueError(
            "`optimizer` must not set gradient_accumulation_steps; got "
            f"{shown(optimizer.gradient_accumulation_steps)}. The optimizer would accumulate over "
            "several steps, and its schedule would advance in each of them. Leave out "
            "gradient_accumulation_steps=, and pass num_microbatches= to the trainer."
        )


def check_built_for(optimizer: keras.optimizers.Optimizer, variables: list[Any]) -> None:
    """Raises ValueError if an optimizer has slots, but none for a variable that it is to update."""
    known = {id(each) for one in single_optimizers(optimizer) for each in built_for(one)}
    if missing := [each for each in variables if id(each) not in known]:
        name = getattr(missing[0], "path", missing[0].name)
        raise ValueError(
            "`optimizer` must be new, or built for the variables that it is to update; got "
            f"{type(optimizer).__name__}, built for {len(known)} variables without "
            f"{name!r}. An optimizer gets its slots once. Pass a new one for each "
            "model, or a function that returns one."
        )


def check_not_set_twice(optimizer: keras.optimizers.Optimizer, updates: Updates) -> None:
    """Raises ValueError if the step and the optimizer both clip, or both average weights."""
    names = ("clipnorm", "clipvalue", "global_clipnorm")
    for name, value in ((name, getattr(optimizer, name)) for name in names):
        if value is not None and updates.bounds:
            [(ours, bound)] = updates.bounds.items()
            raise ValueError(
                f"`{ours}` must be None if the optimizer clips; got {bound!r} and {name}={value!r}"
            )
    if updates.ema_momentum is None:
        return
    if optimizer.built and not optimizer.use_ema:
        raise ValueError(
            "`ema_momentum` must be None if the optimizer has been built, without averages of the "
            f"weights; got {updates.ema_momentum!r}"
        )
    if optimizer.use_ema:
        raise ValueError(
            "`ema_momentum` must be None if the optimizer has use_ema=True; got "
            f"{updates.ema_momentum!r}"
        )


def check_reduction(updates: Updates, rule: scaling.LossScaleRule) -> None:
    """Raises ValueError if gradients below 2^-25 would become 0 in their sum, without a word."""
    if updates.reduce_dtype == "float16" and isinstance(rule, scaling.NoLossScale):
        raise ValueError(
            "`reduce_dtype` must not be 'float16' without a loss scale; pass loss_scale=\"dynamic\""
        )


def check_others(others: object) -> None:
    """Raises TypeError unless `others` is a list: a model in it would be taken for its layers."""
    if not isinstance(others, (tuple, list)):
        raise TypeError(f"`others` must be a list of objects; got {type(others).__name__}")


def check_functions(**functions: object) -> None:
    """Raises TypeError, naming the argument, unless every argument is callable."""
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(
                f"`{name}` must be a function; got {type(function).__name__}. Every step calls "
                "this argument. Pass a function with the arguments that plan_step() describes."
            )


def check_bools(**flags: object) -> None:
    """Raises TypeError, naming the argument, unless every argument is True or False."""
    for name, flag in flags.items():
        check_bool(name, flag)


def check_counts(**counts: object) -> None:
    """Raises ValueError, naming the argument, unless every argument is an int of at least 1."""
    for name, count in counts.items():
        check_integer(name, count, 1)


WRONG_WEIGHTS = "`example_weights` must return one weight per example; got"


def check_weights(weights: Any, batch: Batch) -> tf.Tensor:
    """Returns example weights as float32: shape (global_batch, ...).

    Raises:
        ValueError: if the first dimension is not the example.
    """
    weights = as_returned_tensor("example_weights", weights, "one weight per example")
    check_has_examples(batch)
    rows = known_examples(batch)
    if weights.shape.rank == 0 or (rows and weights.shape[0] not in (None, rows)):
        raise ValueError(
            f"`example_weights` must return one weight per example, shape ({rows or 'examples'},); "
            f"got shape {weights.shape}. Each weight multiplies the loss of one example, or of one "
            "element of it. Let the first dimension be the example."
        )
    if None not in (rows, weights.shape[:1].num_elements()):
        return tf.cast(weights, tf.float32)
    count = count_examples(batch)
    message = [WRONG_WEIGHTS, tf.shape(weights)[:1], "for", count, "examples."]
    same = tf.reduce_all(tf.shape(weights)[:1] == count)
    return nan_unless(same, tf.cast(weights, tf.float32), message)


def check_has_examples(batch: Batch) -> None:
    """Raises ValueError if a batch has no tensors."""
    if not tensors_in(batch):
        raise ValueError("`batch` must hold a tensor; got no tensors")
