"""Checks of what a step is planned for: each finds what would train wrong without an error.

The checks use static information only and add no operations to a graph, except for the sizes of
weights, which a trace may not know.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import scaling
import strategies
from scaling.base.argument_checks import shown
from strategies.division import count_examples, known_examples
from trainer.base.argument_checks import as_returned_tensor
from trainer.base.tracking import name_of_variable, tensorflow_variable, tracked
from trainer.keras_compat import all_layers, owners_of
from trainer.step.losses import nan_unless
from trainer.step.objective import optimizers_in, single_optimizers
from trainer.step.types import Batch, Model, Variable
from trainer.step.xla import supports_xla

# The number of significant bits in each half-precision dtype. Weights in such a dtype would lose
# small updates: an update smaller than 2^-bits of the weight is rounded away.
SIGNIFICANT_BITS = {"float16": 11, "bfloat16": 8}


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
                f"{type(model).__name__}"
            )


def check_inputs_declared(model: Model, precision: scaling.Precision) -> None:
    """Raises ValueError if Keras would round the inputs of a Sequential model without an Input.

    It would cast token ids above 2048 (float16) or 256 (bfloat16) to other ids. Sequential models
    inside other models are checked too. Call it before the model is built.
    """
    half = precision.compute_dtype in SIGNIFICANT_BITS and isinstance(model, keras.Layer)
    for layer in all_layers(model) if half else ():
        if isinstance(layer, keras.Sequential) and not layer.built:
            raise ValueError(
                f"`model` must begin with keras.Input(shape, dtype=...) under {precision.name!r}; "
                f"got Sequential {layer.name!r} without it"
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
            f"`model` must be built under the dtype policy {precision.policy!r}, in build_model() "
            f"(load the weights of a file by init_from=); got {layer.name!r} under "
            f"{layer.dtype_policy.name!r}"
        )


def check_not_assigned_in_half(model: keras.Model, variable: keras.Variable) -> None:
    """Raises ValueError if a layer that computes in half precision assigns one of its weights.

    The float32 weight would be rounded in every step.
    """
    layer = owners_of(model)[id(variable)]
    if layer.compute_dtype in SIGNIFICANT_BITS:
        raise ValueError(
            f"`model` must assign {variable.path!r} in float32; got layer {layer.name!r} under "
            f"{layer.dtype_policy.name!r}"
        )


def check_model(model: Model, strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError if a built model's weights could not be trained right.

    It would have none, or they would lose small updates, or replicas would share one copy.
    """
    if not model.trainable_variables:
        raise ValueError("`model` must have trainable variables; got none")
    for variable in model.trainable_variables:
        dtype = tf.as_dtype(variable.dtype)
        if dtype.name in SIGNIFICANT_BITS or dtype.is_complex:
            raise ValueError(
                "`model` must keep its weights in float32, as under a mixed_ policy; got "
                f"{shown(name_of_variable(variable))} in {dtype.name}"
            )
    check_scope("model", model.trainable_variables, strategy)


def check_scope(name: str, variables: Sequence[Variable], strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError, naming the argument, if replicas would share a variable."""
    for variable in variables:
        if not strategy.extended.variable_created_in_scope(tensorflow_variable(variable)):
            raise ValueError(
                f"`{name}` must be created under strategy.scope(), as in build_{name}(); got "
                f"variable {name_of_variable(variable)!r}, created outside it"
            )


def check_recurrent_layers(roots: Sequence[Any], *, divided: bool) -> None:
    """Raises ValueError for recurrent layers that would be trained wrong.

    A layer with `stateful=True` continues the rows of the last batch; if batches are divided, the
    last part has other rows. In bfloat16, the gradients of cuDNN's LSTM and GRU were zeros or
    arbitrary numbers with TensorFlow 2.21 on an H100, for `fit` too: as if nothing was written to
    them. Outputs are right, and so are gradients in other precisions, or without cuDNN.

    Args:
        roots: the model, and what else the loss may use.
        divided: whether a batch is divided over replicas or microbatches.
    """
    for layer in tracked(*roots):
        if not isinstance(layer, keras.layers.RNN):
            continue
        if layer.stateful and divided:
            raise ValueError(
                f"`model` must not have layers with stateful=True, such as {shown(layer.name)}, if "
                "batches are divided; use one replica and num_microbatches=1"
            )
        # Keras's own marks: no XLA where it uses cuDNN, which has no recurrent dropout.
        fused = isinstance(layer, (keras.layers.LSTM, keras.layers.GRU))
        in_cudnn = fused and not supports_xla(layer) and not layer.recurrent_dropout
        if in_cudnn and layer.compute_dtype == "bfloat16":
            raise ValueError(
                "`model` must not have layers that cuDNN computes in bfloat16, with wrong "
                f"gradients; got {shown(layer.name)}: create it with use_cudnn=False"
            )


def check_optimizer(
    optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy
) -> None:
    """Raises ValueError if the step could not apply an optimizer, and those in it, right.

    Some scale the loss or accumulate gradients themselves, or override what the step does not call.
    Some were created under another strategy: each replica would count its updates.
    """
    if not single_optimizers(optimizer):  # their settings could not be checked, or set
        raise ValueError("`optimizer` must be a MultiOptimizer of an OptimizerMap; got a function")
    for each in optimizers_in(optimizer):
        if isinstance(each, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "`optimizer` must not scale the loss; got a LossScaleOptimizer: pass its "
                ".inner_optimizer"
            )
        if type(each).apply_gradients is not keras.optimizers.Optimizer.apply_gradients:
            raise ValueError(
                "`optimizer` must override apply, and not apply_gradients; got "
                f"{type(each).__name__}"
            )
        instead = {"loss_scale_factor": "loss_scale", "gradient_accumulation_steps": "microbatches"}
        for name, ours in instead.items():
            if getattr(each, name) is not None:
                raise ValueError(
                    f"`optimizer` must not set {name}; got {shown(getattr(each, name))}: see "
                    f"{ours} of the trainer"
                )
        # An optimizer creates some variables, such as `iterations`, in its constructor.
        check_scope("optimizer", each.variables, strategy)


def check_global_loss(
    strategy: tf.distribute.Strategy,
    *,
    num_microbatches: int,
    example_weights: object,
    jit_compile: bool | str,
    float32_after: int | None,
) -> None:
    """Raises ValueError if a step cannot compute a loss with `reduction="global"`.

    Microbatches are computed one after the other, so none of them sees the whole batch; weights of
    examples would be ignored. Replicas exchange rows in the middle of the step, which was tried
    neither on TPUs nor with parameter servers, and cannot be in a program of XLA or a condition.

    Args:
        strategy: where the step runs.
        num_microbatches: see `plan_step`.
        example_weights: what the user has given; None if nothing.
        jit_compile: the compile mode.
        float32_after: see `Skips`.
    """
    only = 'with reduction="global"'
    if num_microbatches > 1:
        raise ValueError(f"`num_microbatches` must be 1 {only}; got {num_microbatches}")
    if example_weights is not None:
        raise ValueError(f"`example_weights` must not be given {only}; got a function")
    if strategy.num_replicas_in_sync == 1:
        return
    found = strategies.capabilities(strategy)
    if found.decides_in_replica or found.asynchronous:
        raise ValueError(
            f"`strategy` must be mirrored or multi_worker_mirrored {only}; got "
            f"{type(strategy).__name__}"
        )
    if jit_compile is not False:
        raise ValueError(
            f"`jit_compile` must be False {only} on several replicas; got {shown(jit_compile)}"
        )
    if float32_after is not None:
        raise ValueError(
            f'`on_stuck` must be "raise" or "hold" {only} on several replicas; got "float32"'
        )


def check_weights(weights: Any, batch: Batch) -> tf.Tensor:
    """Returns example weights as float32: shape (global_batch, ...).

    Raises:
        ValueError: if the first dimension is not the example.
    """
    weights = as_returned_tensor("example_weights", weights, "one weight per example")
    rows, found = known_examples(batch), weights.shape[:1].num_elements()
    wanted = "`example_weights` must return one weight per example, shape"
    if weights.shape.rank == 0 or (rows and found not in (None, rows)):
        raise ValueError(f"{wanted} ({rows or 'examples'},); got shape {weights.shape}")
    weights = tf.cast(weights, tf.float32)
    if None not in (rows, found):
        return weights
    count = count_examples(batch)
    same = tf.reduce_all(tf.shape(weights)[:1] == count)
    return nan_unless(same, weights, [wanted, count[None], "; got shape", tf.shape(weights)])
