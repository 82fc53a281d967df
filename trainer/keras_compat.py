"""Every private name of Keras and TensorFlow that `trainer` uses, with the reason for each.

Optimizers:

- `_all_reduce_sum_gradients`: `apply` sums over replicas, and no argument turns that off.
- `_trainable_variables`: which variables it was built for, in the order of its slots.
- `_learning_rate`: a schedule itself; the public `learning_rate` is its value.
- `_get_variable_index`, `_momentums`, `_velocities`: Adam's slots of a variable, for its kernel.
- `_iterations`: a rule sees the updates that one variable had.

Layers, losses and metrics:

- `_flatten_layers`: all layers; `model.layers` has the outermost.
- `_dtype_policy`: the public setter quantizes, and writes into a map that layers share.
- `_dtype`: to what an input is cast before the first layer.
- `keras_globals`, `autocast_scope`: whether the layer that is being called casts its variables.
- `_value`: a variable that the layer would read cast; the public `value` is.
- `_keras_mask`: the mask of a tensor, which losses and metrics read.
- `_loss_ids`: which entries of `model.losses` a layer has added, while replicas pause.
- `_compile_loss`: the means that a compiled model's own `compute_loss` updates.
- `_fn_kwargs`: arguments of a loss; before Keras 3.16, `get_config()` leaves out some.
- `_built`: whether a metric has made its variables.
- `keras_nn`, `_compute_moments`: its second derivatives are wrong. Keras 3.16 has moved the module.

TensorFlow:

- `_get_function`: the graph of the function that an operation calls.
- `_noinline`: a function that is called as one operation.
- `AutoTrackable`, `_self_`: what tracks its attributes, and where it keeps what it tracks.
- `tf_context`, `_seed`, `_rng`: the seed on which every shuffled dataset depends that is made
  later. To set it by `tf.random.set_seed` would begin its numbers anew.

All were seen in Keras 3.10.0, 3.12.4, 3.14.1, 3.15.1 and 3.16.0.dev2026102704, with TensorFlow
2.21. The tests of this file fail if one changes. Everything else in this project uses public APIs.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state as keras_globals
from tensorflow.python.eager import context as tf_context

try:
    from keras.src.backend.tensorflow.ops import nn as keras_nn  # since Keras 3.16
except ImportError:
    from keras.src.backend.tensorflow import nn as keras_nn


AutoTrackable = tf.__internal__.tracking.AutoTrackable
RECORDS = "_self_"  # the beginning of the names of attributes
NOT_INLINED = {"_noinline": True}  # for `experimental_attributes` of `tf.function`


@contextlib.contextmanager
def gradients_already_reduced(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes `optimizer.apply` use gradients as they are, without summing them over replicas.

    In replica context `apply` always all-reduces, and no argument turns that off. Our gradients
    are summed before they are checked and clipped, so a second sum would make them num_replicas
    times too large. Overriding the public `update_step` instead would mean reimplementing the
    rest of `apply`: iterations, schedules, weight decay, EMA, constraints.
    """
    optimizer._all_reduce_sum_gradients = list
    try:
        yield
    finally:
        del optimizer._all_reduce_sum_gradients


@contextlib.contextmanager
def atomic_update_count(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes `optimizer.apply` increment `iterations` in one atomic operation.

    Keras reads the count and then writes back the count plus 1, so simultaneous updates by several
    workers would be counted only once. `assign_add` is public; that `apply` counts by calling it
    is an implementation detail.
    """
    counter = optimizer.iterations
    counter.assign_add = counter.value.assign_add
    try:
        yield
    finally:
        del counter.assign_add


# `keras.optimizers.MultiOptimizer`. Keras before 3.15 has none: nothing is an instance of ().
MultiOptimizer: Any = getattr(keras.optimizers, "MultiOptimizer", ())


def inner_optimizer(
    optimizer: Any, variable: keras.Variable | tf.Variable
) -> keras.optimizers.Optimizer:
    """Returns the inner optimizer of a `MultiOptimizer` that updates a variable, after `build`."""
    return next(
        each for each in optimizer.optimizers if any(variable is own for own in built_for(each))
    )


def learning_rate_setting(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns what an optimizer's learning rate was set to: a variable, a schedule or a function.

    The public `learning_rate` is a new tensor at each call if there is a schedule.
    """
    return optimizer._learning_rate


def built_for(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the variables that an optimizer has slots for, in the order of the slots."""
    return list(optimizer._trainable_variables) if optimizer.built else []


def unbuilt_copy(
    optimizer: keras.optimizers.Optimizer, number: keras.Variable | None = None
) -> keras.optimizers.Optimizer:
    """Returns an optimizer with the same settings, without slots. Call it in the strategy's scope.

    `get_config()` and `from_config()` are public; that they leave out a schedule itself, is not
    settled.

    Args:
        optimizer: the optimizer.
        number: what its learning rate was before it was set to a schedule or a function. It keeps
            its place among the variables, so that earlier checkpoints hold the same ones.
    """
    setting = learning_rate_setting(optimizer)
    kept = [one for one in optimizer.variables[1:2] if one.name == "learning_rate"]
    config = optimizer.get_config()
    if "learning_rate" in config and not isinstance(setting, keras.Variable):
        numbers = kept if number is None else [number]
        config["learning_rate"] = float(numbers[0].numpy()) if numbers else setting
    return type(optimizer).from_config(config)


def carry_over(optimizer: keras.optimizers.Optimizer, fresh: keras.optimizers.Optimizer) -> None:
    """Gives a copy of an optimizer what `get_config()` leaves out, before the copy is built.

    That is a schedule or a function itself; exclusions from weight decay; and attributes that a
    user has set, or a subclass does not name in its configuration. What holds variables or
    optimizers is the copy's own.
    """
    setting = learning_rate_setting(optimizer)
    if not isinstance(setting, keras.Variable):
        vars(fresh)["_learning_rate"] = setting
    of_keras = vars(keras.optimizers.Optimizer(learning_rate=1.0))
    variables = (keras.Variable, tf.Variable, keras.optimizers.Optimizer)
    for name, value in vars(optimizer).items():
        held = [] if name in of_keras else tf.nest.flatten(value)
        if held and not any(isinstance(each, variables) for each in held):
            vars(fresh)[name] = value


def make_saveable(optimizer: keras.optimizers.Optimizer) -> None:
    """Lets TensorFlow save an optimizer whose rate was set to a schedule before it was built.

    Keras then removes the number from the list of the optimizer's variables, and TensorFlow refuses
    to save a list that has lost an item.
    """
    try:
        tf.train.TrackableView(optimizer).descendants()
    except ValueError:
        fresh = unbuilt_copy(optimizer)
        carry_over(optimizer, fresh)
        vars(optimizer).clear()
        vars(optimizer).update(vars(fresh))


@contextlib.contextmanager
def own_update_counts(
    optimizer: keras.optimizers.Optimizer, missed: Sequence[tuple[Any, int]]
) -> Iterator[None]:
    """Makes an optimizer's rule see, for some variables, only the updates that they had.

    Adam and others divide by 1 - beta^count, which corrects for slots that began at 0. A variable
    that was frozen for some updates has slots that began later. With the optimizer's own count, its
    first updates would be up to 6 times too large.

    Args:
        optimizer: an optimizer, but no `MultiOptimizer`.
        missed: pairs of a variable and the number of updates that it missed.
    """
    counts = {optimizer._get_variable_index(variable): count for variable, count in missed}
    if not counts:
        yield
        return
    rule = optimizer.update_step
    counter = optimizer._iterations
    own: dict[int, tf.Tensor] = {}  # the counts, keyed by the number of missed updates

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        late = counts.get(optimizer._get_variable_index(variable), 0)
        if late and late not in own:
            own[late] = tf.convert_to_tensor(counter) - late
        # Not through setattr, which would make TensorFlow save the tensor.
        vars(optimizer)["_iterations"] = own[late] if late else counter
        try:
            rule(gradient, variable, learning_rate)
        finally:
            vars(optimizer)["_iterations"] = counter

    own_rule = vars(optimizer).get("update_step")
    optimizer.update_step = update_step
    try:
        yield
    finally:
        del optimizer.update_step
        if own_rule is not None:
            optimizer.update_step = own_rule


def casts_variables() -> bool:
    """Returns whether the layer that is being called casts the variables that it reads.

    Where it does not, `variable.dtype` is Keras's default dtype, whatever the variable's own.
    """
    scope = keras_globals.get_global_attribute("autocast_scope")
    return scope is not None and scope.dtype is not None


def uncast_variable(variable: keras.Variable) -> tf.Variable:
    """Returns the `tf.Variable` of a Keras variable, also in a layer that would read it cast."""
    return variable._value


def all_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the model and its layers at any depth; `model.layers` has only the outermost."""
    return list(model._flatten_layers())


def owners_of(model: keras.Model) -> dict[int, keras.Layer]:
    """Returns the innermost layer that holds each variable of a model, by the variable's id."""
    # Outer layers come before inner ones, so the last layer that holds a variable is its owner.
    return {id(variable): layer for layer in all_layers(model) for variable in layer.variables}


def means_of_compute_loss(model: Any) -> list[keras.Variable]:
    """Returns the variables in which a compiled model's `compute_loss` counts what `fit` logs."""
    compiled = getattr(model, "_compile_loss", None)
    return [v for metric in getattr(compiled, "metrics", ()) for v in metric.variables]


def is_metric_built(metric: keras.metrics.Metric) -> bool:
    """Returns whether a metric has its variables. A few classes make them in their first update.

    Some of Keras's own note it in `_built`. A user's class without variables may create them there,
    too.
    """
    return bool(getattr(metric, "_built", metric.variables))


def arguments_of_loss(loss: Any) -> dict[str, Any]:
    """Returns what a Keras loss passes to its function, such as `axis`; {} for any other object.

    Some of Keras's losses keep their arguments in a public attribute or in `get_config()`, others
    (CosineSimilarity) in neither.
    """
    return getattr(loss, "_fn_kwargs", {})


def keras_mask(tensor: Any) -> tf.Tensor | None:
    """Returns the mask that a layer or a loss has put on its result, or None.

    Layers that support masking pass the mask of their inputs on, to the model's outputs, and
    `keras.losses.Loss` reads it there. Nothing public returns it.
    """
    return getattr(tensor, "_keras_mask", None)


def with_keras_mask(tensor: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Returns a tensor with a mask, which Keras metrics and losses read; see `keras_mask`.

    `keras.ops` and TensorFlow's operations drop the mask, and nothing public puts it on.
    """
    if mask is None:
        return tensor
    masked = tf.identity(tensor)
    masked._keras_mask = mask
    return masked


@contextlib.contextmanager
def added_losses_kept(model: Any) -> Iterator[None]:
    """Context manager: other replicas may call the model in the block, and trace their own graphs.

    Replicas of one process share the layers. Each call of a model makes it forget which losses its
    layers have added, which would lose those of the replica that waits. `model.losses` is public;
    where it remembers them is not.
    """
    layers = all_layers(model) if isinstance(model, keras.Layer) else []
    before = [set(layer._loss_ids) for layer in layers]
    yield
    for layer, ids in zip(layers, before, strict=True):
        layer._loss_ids = ids


# What `replaced_calls` has replaced, by (id of the layer, name): the number of replicas that use
# it, and what was there before, or None if it was its class's.
_USES: collections.Counter[tuple[int, str]] = collections.Counter()
_BEFORE: dict[tuple[int, str], Any] = {}
_REPLACING = threading.Lock()


@contextlib.contextmanager
def replaced_calls(
    layers: Sequence[Any], make: Callable[[Any], Any], name: str = "call"
) -> Iterator[None]:
    """Replaces each layer's `call` with `make(layer)` inside the `with` block.

    Replicas of one process share the layers, and one of them may wait in its block while others
    enter and leave theirs. So the first one to enter replaces, and the last one to leave restores.

    `call` is public; that Keras looks it up on the instance, and not on the class, is an
    implementation detail. So is `quantized_call`, the method that a quantized layer runs instead.
    """
    keys = [(id(layer), name) for layer in layers]
    with _REPLACING:
        for key, layer in zip(keys, layers, strict=True):
            if not _USES[key]:
                _BEFORE[key] = vars(layer).get(name)
                setattr(layer, name, make(layer))
            _USES[key] += 1
    try:
        yield
    finally:
        with _REPLACING:
            for key, layer in zip(keys, layers, strict=True):
                _USES[key] -= 1
                if _USES[key]:
                    continue
                if (before := _BEFORE.pop(key)) is None:
                    delattr(layer, name)
                else:
                    setattr(layer, name, before)


def regularizers_in_float32(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which activity regularizers get float32 from half-precision layers, too.

    A sum of squares overflows float16 at 65504; a hundred activations of 30 are enough. Setting a
    layer's `activity_regularizer` is public; finding all layers is not.
    """

    def in_float32(layer: keras.Layer) -> Callable[[Any], Any]:
        regularizer = layer.activity_regularizer

        def regularize(activation: Any) -> Any:
            dtype = tf.convert_to_tensor(activation).dtype
            kept = dtype.is_complex or dtype == tf.float64
            return regularizer(activation if kept else tf.cast(activation, tf.float32))

        return regularize

    layers = [layer for layer in all_layers(model) if layer.activity_regularizer is not None]
    return replaced_calls(layers, in_float32, "activity_regularizer")


def computing_in_float32(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which half-precision layers compute in float32 on the same variables.

    Quantized layers stay quantized. A function that is traced inside the context keeps computing
    in float32 afterwards.
    """
    half = [
        layer for layer in all_layers(model) if layer.compute_dtype in HALF or inputs_in_half(layer)
    ]
    return layers_under_policy("float32", half)


@contextlib.contextmanager
def layers_under_policy(policy: str, layers: Sequence[keras.Layer]) -> Iterator[None]:
    """Changes the dtype policy of layers, but not their variables, inside the `with` block.

    A quantized layer keeps its quantization: its weights are integers or float8 values with scales,
    which mean nothing without it. `Normalization` gets its constants in the new dtype. Inputs that
    a functional model casts to half precision are cast to the policy's compute dtype.

    `layer.dtype_policy` is public, but its setter is not used: it may quantize the layer, and
    writes into a `DTypePolicyMap` that several layers share.
    """
    changed: list[tuple[object, dict[str, Any], dict[str, Any]]] = []
    for tensor in {id(each): each for layer in layers for each in half_declared(layer)}.values():
        dtype = keras.DTypePolicy(policy).compute_dtype
        changed.append((tensor, {"_dtype": dtype}, {"_dtype": tensor._dtype}))
    for layer in layers:
        new: dict[str, Any] = {"_dtype_policy": policy_with_dtype(layer._dtype_policy, policy)}
        if isinstance(layer, keras.layers.Normalization) and layer.built:
            new |= normalization_constants(layer, policy)
        changed.append((layer, new, {name: getattr(layer, name) for name in new}))
    for layer, new, _ in changed:
        set_attributes(layer, new)
    try:
        yield
    finally:
        for layer, _, before in changed:
            set_attributes(layer, before)


HALF = ("float16", "bfloat16")


def inputs_in_half(layer: keras.Layer) -> list[Any]:
    """Returns the inputs that a functional model casts to half precision, as `KerasTensor`s.

    Keras declares them in the compute dtype of the first layer for a `Sequential` that begins
    without an `Input`, and in that of the layer before for a model that begins at a hidden layer.
    Other layers have none.
    """
    inputs = getattr(layer, "inputs", None) if isinstance(layer, keras.Model) else None
    declared = [each for each in inputs or [] if isinstance(each, keras.KerasTensor)]
    return [tensor for tensor in declared if tensor.dtype in HALF]


def half_declared(layer: keras.Layer) -> list[Any]:
    """Returns what declares half inputs of a model: an `InputLayer` itself, or `KerasTensor`s."""
    if isinstance(layer, keras.layers.InputLayer):
        return [layer] if layer.dtype in HALF else []
    return inputs_in_half(layer)


def policy_with_dtype(policy: keras.DTypePolicy, name: str) -> keras.DTypePolicy:
    """Returns a policy with the dtypes of the policy `name`, and the quantization of `policy`."""
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        by_path = {path: policy_with_dtype(each, name) for path, each in policy.items()}
        default = policy_with_dtype(policy.default_policy, name)
        return keras.dtype_policies.DTypePolicyMap(default, by_path)
    if isinstance(policy, keras.dtype_policies.QuantizedDTypePolicy):
        # The config also holds what some modes add: block sizes, and lengths of histories.
        return type(policy).from_config(policy.get_config() | {"source_name": name})
    return keras.DTypePolicy(name)


def normalization_constants(layer: keras.layers.Normalization, policy: str) -> dict[str, tf.Tensor]:
    """Returns a `Normalization` layer's mean and variance, computed under another policy.

    The layer keeps both as tensors in its compute dtype: in half precision they are rounded, and
    casting them back would not undo that.
    """
    mean, variance = layer.input_mean, layer.input_variance
    with tf.init_scope():  # eager, so that the tensors may be used in any graph
        if mean is None:
            mean, variance = layer.adapt_mean.numpy(), layer.adapt_variance.numpy()
        twin = keras.layers.Normalization(layer.axis, mean, variance, dtype=policy)
        twin.build_from_config(layer.get_build_config())
    return {"mean": twin.mean, "variance": twin.variance}


def recompute_constants(model: Any) -> bool:
    """Makes `Normalization` layers use the statistics in their variables, after a restore.

    Keras does this in `load_weights`, but a `tf.train.Checkpoint` writes the variables alone, and
    the layer computes with tensors made from them.

    Args:
        model: a Keras model, or another one, which has no such layers.

    Returns:
        Whether a tensor has changed. A graph that was traced before holds the old one.
    """
    layers = all_layers(model) if isinstance(model, keras.Layer) else []
    normalizations = [each for each in layers if isinstance(each, keras.layers.Normalization)]
    found = [layer for layer in normalizations if layer.built]  # others have no statistics yet
    before = [(layer.mean, layer.variance) for layer in found]
    for layer in found:
        layer.finalize_state()
    after = [(layer.mean, layer.variance) for layer in found]
    return any(
        not np.array_equal(old, new)
        for olds, news in zip(before, after, strict=True)
        for old, new in zip(olds, news, strict=True)
    )


def set_attributes(owner: object, values: Mapping[str, object]) -> None:
    """Sets an object's attributes, keyed by name."""
    for name, value in values.items():
        setattr(owner, name, value)


def slot_variables(
    optimizer: keras.optimizers.Optimizer, variable: tf.Variable
) -> list[tf.Variable]:
    """Returns the slots that Adam or SGD keeps for a variable, in the order of its update rule.

    SGD has one slot, the momentum; Adam has the first and the second moment. `optimizer.variables`
    is public; which of them belong to which model variable is not.
    """
    position = optimizer._get_variable_index(variable)
    if isinstance(optimizer, keras.optimizers.SGD):
        return [optimizer.momentums[position].value]
    return [slots[position].value for slots in (optimizer._momentums, optimizer._velocities)]


KERAS_MOMENTS: Callable[..., tuple[tf.Tensor, tf.Tensor]] = keras_nn._compute_moments


@contextlib.contextmanager
def differentiable_moments() -> Iterator[None]:
    """Makes the variance that Keras's normalization layers compute differentiable more than once.

    `keras.ops.moments` calls `tf.nn.moments`, which treats the mean as a constant in the variance.
    First derivatives are right, because to first order the variance does not depend on its center.
    Second derivatives are not: docs/keras_faults.md has measurements. For any constant c, the
    variance is the mean of (x - c)^2 minus (mean - c)^2. So subtracting the second term, whose
    value is 0, makes all derivatives right. Values and first derivatives keep their bits.

    No public setting changes the formula, and layers differ in how they call it, so the function
    that they all reach is replaced.
    """
    with replaced_calls([keras_nn], lambda _: centered_moments, "_compute_moments"):
        yield


def centered_moments(
    x: tf.Tensor, axes: Sequence[int], keepdims: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns Keras's mean and variance over `axes`, with the variance's higher derivatives."""
    mean, variance = KERAS_MOMENTS(x, axes, keepdims)
    return mean, variance - tf.square(mean - tf.stop_gradient(mean))


def outputs_of_called(call: tf.Operation) -> Sequence[tf.Tensor]:
    """Returns the outputs of the function that an operation calls, in the function's own graph.

    TensorFlow has no public way from a call to the graph of the function.

    Args:
        call: a "PartitionedCall" or "StatefulPartitionedCall".

    Returns:
        The outputs; () if the function has no graph, as after it was loaded from a file.
    """
    called = call.graph._get_function(call.get_attr("f").name)
    return getattr(getattr(called, "graph", None), "outputs", ())


def tensorflow_random_state() -> tuple[Any, Any]:
    """Returns TensorFlow's global seed, and the generator that gives operations without one theirs.

    `tf.random.set_seed` is public; that the state can be read, and restored later, is not.
    """
    context = tf_context.context()
    return context._seed, vars(context).get("_rng")


def set_tensorflow_random_state(state: tuple[Any, Any]) -> None:
    """Puts TensorFlow's global generator into a state.

    Unlike `tf.random.set_seed`, this keeps the counters of eager operations with their own seed.
    """
    context = tf_context.context()
    context._seed, context._rng = state
