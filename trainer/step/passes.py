"""Forward and backward through one microbatch.

No variable of a Keras model is assigned here. The model runs inside `keras.StatelessScope`: what it
would have assigned (BatchNorm's statistics, counters) is returned as a result, to be kept or
dropped once the verdict is known. It reads its weights as variables, as in a loop without such a
scope. So every gradient tape and custom gradient inside the model finds the variables that it looks
for.

The forward pass refuses token ids that Keras has rounded to half precision on their way to an
`Embedding`. Layers cast floats, not integers. But a functional model casts all of its inputs to
their declared dtypes. Keras declares floats where no `keras.Input` declares integers. float16 holds
integers up to 2048 and bfloat16 up to 256; larger ones become other ids, without an error.

BatchNormalization of images is computed by TensorFlow's fused kernel.

Keras 3 computes it in about nine operations, each of which reads or writes every activation.
TensorFlow has one kernel for the forward pass in training and one for its gradient (Ioffe and
Szegedy, arXiv:1502.03167, section 3); docs/performance.md has measurements. Where XLA compiles the
pass, there is nothing to gain: XLA fuses Keras's operations itself, and would expand the
kernel into the same operations.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import scaling
import strategies
from scaling.base.argument_checks import shown
from trainer.base.autograph import call_user
from trainer.base.tracking import name_of_variable, tensorflow_variable
from trainer.base.warn_once import listed, warn_once
from trainer.keras_compat import (
    all_layers,
    differentiable_moments,
    means_of_compute_loss,
    regularizers_in_float32,
    replaced_calls,
)
from trainer.step.checks import SIGNIFICANT_BITS, check_not_assigned_in_half
from trainer.step.float8 import (
    Counts,
    called_once,
    counted_product,
    counting,
    gathered_counts,
    own_probes,
    probes_of,
)
from trainer.step.gather import gathering, part_of_mean
from trainer.step.held_back import HoldBack, frozen_or_unfrozen, is_seed_state
from trainer.step.losses import (
    Recorded,
    added_entries,
    added_loss,
    check_added_losses,
    distinct,
    losses_and_aux,
    mask_weightless,
    recorded_losses,
    shared_with,
    warn_of_added_losses,
    weighted_mean,
)
from trainer.step.trace import any_depends, functions_of_one_precision
from trainer.step.types import (
    Aux,
    Batch,
    Contribution,
    Gradient,
    Microbatch,
    MicrobatchPlan,
    Model,
    NonfiniteFlags,
    PassInputs,
    Rows,
    Values,
)
from trainer.step.verdict import count_nonfinite


@differentiable_moments()  # rematerialized layers run again in the backward pass
def differentiate(inputs: PassInputs, plan: MicrobatchPlan) -> Microbatch:
    """Runs the model forward and backward on one share of the global batch.

    Args:
        inputs: the inputs of the pass.
        plan: the constants of the pass.
    """
    share, size = inputs.share, inputs.global_batch
    weights = [tensorflow_variable(variable) for variable in plan.weights]
    probes = probes_of(plan.float8)
    outside = values_outside(inputs.values, plan)
    with tf.GradientTape(persistent=len(plan.objectives) > 1) as tape:
        # A layer may have been created frozen, so watch its weights explicitly.
        given = [value for at, value in inputs.values.items() if int(at) < len(weights)]
        tape.watch([*weights, *given, *probes, *outside.values()])
        with layers_prepared(plan, probes), gathers(inputs, plan):
            passed = forward(share.batch, inputs.values, inputs.keys, plan)
        warn_of_added_losses(passed.added, passed.recorded, share.weights, plan)
        means = {
            id(loss): part_of_loss(loss, inputs, plan) for loss in distinct(passed.losses.values())
        }
        losses = {name: means[id(loss)] for name, loss in passed.losses.items()}
        regularization_loss = added_loss(passed.added, share, size)
        scaled = {
            name: scaling.scale_loss(loss + regularization_loss, inputs.scale_state)
            for name, loss in losses.items()
        }
    sources = [inputs.values.get(str(at), variable) for at, variable in enumerate(weights)]
    found: dict[int, Gradient] = {}
    untrained: set[str] = set()
    counts: Counts = {}
    outside |= watched_outside(tape, plan)
    for objective in plan.objectives:
        wanted = [sources[position] for position in objective.positions]
        watched = own_probes(objective.positions, plan.float8, probes)
        with recomputing(passed, inputs.values, inputs.keys, plan):
            asked = (wanted, watched, outside)
            each, counted, others = tape.gradient(scaled[objective.name], asked)
        if all(gradient is None for gradient in each):
            raise ValueError("`compute_loss` must depend on a trainable variable; got no gradient")
        untrained |= {name for name, gradient in others.items() if gradient is not None}
        found |= dict(zip(objective.positions, each, strict=True))
        counts |= counted
    warn_of_gradients(found, sorted(untrained), plan)
    gradients, replaced = split_replaced(found, plan)
    loss, casts = tf.add_n(distinct(losses.values())), gathered_counts(counts, share, plan.float8)
    contribution = Contribution(gradients, loss, regularization_loss, casts)
    seen = weighted_losses(passed.losses, share, plan)
    nonfinite = find_nonfinite(contribution, seen, single_pass=plan.single_pass)
    if passed.reported:  # another group of this step reports these losses
        own = [loss for name, loss in losses.items() if name not in passed.reported]
        contribution = contribution._replace(loss=tf.add_n([*distinct(own), tf.constant(0.0)]))
    written = parts_of_mean(written_by(inputs.values, passed.after), size.fraction(share))
    rows = Rows(passed.aux, passed.losses if plan.keep_losses else {})
    return Microbatch(contribution, nonfinite, written, replaced, rows)


def weighted_losses(
    losses: Mapping[str, tf.Tensor], share: strategies.Share, plan: MicrobatchPlan
) -> list[tf.Tensor]:
    """Returns the losses, with 0 where an example's weight is 0."""
    seen = list(losses.values())
    return seen if plan.global_loss else [mask_weightless(loss, share) for loss in seen]


def gathers(inputs: PassInputs, plan: MicrobatchPlan) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which `all_gather` gathers the rows of all replicas."""
    return gathering(
        inputs.share,
        inputs.global_batch,
        plan.model,
        global_loss=plan.global_loss,
        num_microbatches=plan.num_microbatches,
    )


@contextlib.contextmanager
def layers_prepared(plan: MicrobatchPlan, probes: Sequence[tf.Tensor]) -> Iterator[None]:
    """Context manager for a forward pass: fuses BatchNormalization; float8 layers run once.

    Args:
        plan: the constants of the pass.
        probes: a probe for each of `plan.float8`, with which its layer counts.
    """
    scales = [id(plan.held_back[int(each.scale)]) for each in plan.float8]
    with (
        fused_batch_norm(plan.model, wanted=plan.fuse_batch_norm),
        counting(dict(zip(scales, probes, strict=True))),
        called_once(plan.model, counted_product),
    ):
        yield


def part_of_loss(losses: tf.Tensor, inputs: PassInputs, plan: MicrobatchPlan) -> tf.Tensor:
    """Returns what a share contributes to a loss of the global batch: shape (), float32."""
    if plan.global_loss:
        return part_of_mean(losses, inputs.share, inputs.global_batch)
    return weighted_mean(losses, inputs.share, inputs.global_batch.weight)


def parts_of_mean(written: Values, fraction: tf.Tensor) -> Values:
    """Returns a share's parts of the mean, over examples, of what forward passes would assign.

    Integers, such as counters, have no mean, and stay as they are.

    Args:
        written: what the forward pass would have assigned.
        fraction: the share's fraction of the global batch's examples; 0 for an empty share, whose
            values do not count, even if they are inf or NaN: shape (), float32.
    """
    return {
        position: tf.math.multiply_no_nan(value, tf.cast(fraction, value.dtype))
        if value.dtype.is_floating
        else value
        for position, value in written.items()
    }


def split_replaced(
    found: dict[int, Gradient], plan: MicrobatchPlan
) -> tuple[list[Gradient], Values]:
    """Separates gradients from new values that stand in place of a gradient.

    A Keras variable with `overwrite_with_gradient` is replaced by its "gradient". Keras's float8
    layers compute new scales and amax histories in this way. Such values are not scaled, summed
    or clipped: see `accumulate` and `reduce` for how they are combined.

    Args:
        found: what the tape returned, keyed by position in `model.trainable_variables`.
        plan: the constants of the pass.

    Returns:
        The gradients, with None for replaced variables; and the new values of those.
    """
    gradients: list[Gradient] = []
    replaced: Values = {}
    for position, gradient in found.items():
        variable = plan.weights[position]
        if getattr(variable, "overwrite_with_gradient", False):
            gradients.append(None)
            if gradient is not None:
                replaced[str(position)] = tf.ensure_shape(gradient, variable.shape)
            continue
        if isinstance(gradient, tf.Tensor):
            gradient.set_shape(variable.shape)  # unknown after a reshape of the model's input
        dense = plan.dense and gradient is not None
        gradients.append(tf.convert_to_tensor(gradient) if dense else scaling.coalesce(gradient))
    return gradients, replaced


def find_nonfinite(
    contribution: Contribution, losses: list[tf.Tensor], *, single_pass: bool
) -> NonfiniteFlags:
    """Returns flags that say what is not finite in a contribution.

    Args:
        contribution: the contribution of one microbatch.
        losses: one tensor of example losses per objective, 0 where an example's weight is 0.
        single_pass: see `MicrobatchPlan`.
    """
    finite = scaling.all_finite([contribution.loss, contribution.regularization_loss])
    gradients = contribution.gradients
    bad = tf.zeros([len(gradients)], tf.bool)
    if not single_pass:
        bad = finite & ~tf.stack([scaling.all_finite(gradient) for gradient in gradients])
    return NonfiniteFlags(
        loss=tf.cast(~finite, tf.float32),
        losses=tf.cast(count_nonfinite(tf.stack(losses)), tf.float32),
        gradients=tf.cast(bad, tf.float32),
    )


def values_outside(values: Values, plan: MicrobatchPlan) -> Values:
    """Returns given values of trainable Keras variables that are not the model's, by name."""
    known = {id(variable) for variable in plan.model.variables}
    given = ((plan.held_back[int(position)], value) for position, value in values.items())
    return {
        name_of_variable(variable): value
        for variable, value in given
        if variable.trainable and value.dtype.is_floating and id(variable) not in known
    }


def watched_outside(tape: tf.GradientTape, plan: MicrobatchPlan) -> dict[str, tf.Variable]:
    """Returns other trainable variables that the pass has read and that are not the model's."""
    copies_of = tf.distribute.get_strategy().experimental_local_results
    own = map(tensorflow_variable, plan.model.variables)
    known = {id(copy) for variable in own for copy in (variable, *copies_of(variable))}
    return {each.name: each for each in tape.watched_variables() if id(each) not in known}


def warn_of_gradients(
    found: dict[int, Gradient], untrained: Sequence[str], plan: MicrobatchPlan
) -> None:
    """Names what the loss depends on and nobody trains, and what it trains and does not depend on.

    Args:
        found: the gradients of trainable variables, keyed by position.
        untrained: names of variables that are not the model's and have a gradient.
        plan: the constants of the pass.
    """
    if untrained:
        warn_once(
            f"The loss depends on {listed(untrained)}, which no optimizer updates: only variables "
            "of the model are trained. Make them attributes of the model, or set trainable=False."
        )
    weights = [plan.weights[position] for position in found if found[position] is None]
    if names := [name_of_variable(variable) for variable in weights]:
        warn_once(
            f"No gradient reaches {listed(names)}, so training does not change it. Set "
            "trainable=False if that is intended."
        )


class ForwardPass(NamedTuple):
    """The results of a forward pass."""

    # Keyed by objective name; each float32, in the shape of the weights; shape=() if it is global.
    losses: dict[str, tf.Tensor]
    aux: Aux  # what `compute_loss` returned along with the losses; () if nothing
    added: list[tf.Tensor]  # `model.losses`: regularizers, and what the layers added
    recorded: Sequence[Recorded]  # which layer added what
    after: Values  # values of the given and the assigned variables when the pass ended; empty for a
    # `tf.Module`, which assigns its variables itself
    # What each variable in `plan.held_back`, and each generator in `plan.seeds`, was assigned in
    # turn; [] for a `tf.Module`.
    assigned: Sequence[Sequence[tf.Tensor]]
    reported: set[str]  # names of objectives whose loss an earlier update group has reported


def forward(batch: Batch, values: Values, keys: tf.Tensor, plan: MicrobatchPlan) -> ForwardPass:
    """Runs the user's `compute_loss` without letting a Keras model assign anything.

    Args:
        batch: the examples.
        values: values of variables in `plan.held_back`. The model reads every other variable
            itself, so that gradient tapes and custom gradients inside the model see variables and
            not plain tensors.
        keys: keys for `plan.seeds`: shape (generators, 2), int64. Each generator counts up
            from its key.
        plan: the constants of the pass.
    """
    keys = tf.unstack(keys, num=len(plan.seeds))
    if not isinstance(plan.model, keras.Layer):
        for seed, key in zip(plan.seeds, keys, strict=True):
            seed.assign(key)
        result = call_loss(batch, plan)
        losses, aux = losses_and_aux(result, batch, plan.objectives, global_loss=plan.global_loss)
        reported = shared_with(result, plan.earlier, plan.objectives)
        return ForwardPass(losses, aux, [], [], {}, [], reported)
    with (
        functions_of_one_precision(plan.model),
        ids_unrounded(plan.model),
        regularizers_in_float32(plan.model),
        recorded_losses(plan.model) as recorded,
        scope_of(values, keys, plan) as scope,
    ):
        result = call_loss(batch, plan)
        losses, aux = losses_and_aux(result, batch, plan.objectives, global_loss=plan.global_loss)
        listed = plan.model.losses
        added = added_entries(listed, recorded, scope.losses)
    check_added_losses(recorded, listed)
    for variable in filter(scope.is_cast, plan.weights):
        check_not_assigned_in_half(plan.model, variable)
    found = [scope.held_value(variable) for variable in plan.held_back]
    after = {str(position): value for position, value in enumerate(found) if value is not None}
    assigned = [scope.assigned(each) for each in (*plan.held_back, *plan.seeds)]
    reported = shared_with(result, plan.earlier, plan.objectives)
    return ForwardPass(losses, aux, added, recorded, after, assigned, reported)


def call_loss(batch: Batch, plan: MicrobatchPlan) -> Any:
    """Returns what `compute_loss` returns.

    Raises:
        ValueError: if it freezes or unfreezes layers: a gradient would go to another variable.
    """
    result = call_user(plan.compute_loss, batch, training=True)
    if (names := frozen_or_unfrozen(plan.weights, plan.model)) is not None:
        raise ValueError(
            f"`compute_loss` must not freeze or unfreeze layers; got {shown(names)}: return a dict "
            "of losses, and build a dict of optimizers"
        )
    return result


def scope_of(values: Values, keys: Sequence[tf.Tensor], plan: MicrobatchPlan) -> HoldBack:
    """Returns a scope that holds back assignments, with given values and keys; see `forward`."""
    given = [(plan.held_back[int(position)], value) for position, value in values.items()]
    given += zip(plan.seeds, keys, strict=True)
    means = functools.partial(means_of_compute_loss, plan.model)  # some are made in the call
    return HoldBack([*plan.held_back, *plan.seeds], given, dropped=means)


@contextlib.contextmanager
def recomputing(
    passed: ForwardPass, values: Values, keys: tf.Tensor, plan: MicrobatchPlan
) -> Iterator[None]:
    """Context manager for a backward pass, in which rematerialized layers run forward again.

    What they assign is dropped, since the forward pass has already assigned it, and their
    generators start again from the same keys, so Dropout has the same mask in both passes. In a
    loop without this scope it has another one, and the gradients are wrong.

    Args:
        passed: the results of the forward pass.
        values: as for `forward`.
        keys: as for `forward`.
        plan: the constants of the pass.

    Raises:
        ValueError: if a layer would not see, or draw, the numbers of the forward pass again.
    """
    if not isinstance(plan.model, keras.Layer):
        yield
        return
    with scope_of(values, tf.unstack(keys, num=len(plan.seeds)), plan) as scope:
        yield
    for variable, before in zip((*plan.held_back, *plan.seeds), passed.assigned, strict=True):
        again = scope.assigned(variable)
        if (len(before), len(again)) == (1, 1) or not scope.uses(variable):
            continue
        if is_seed_state(variable) and again:
            raise ValueError(
                "`model` must draw once from a random generator of a rematerialized layer; got "
                f"{len(before)} draws from {variable.path!r}"
            )
        if any_depends([*passed.losses.values(), *passed.added], before):
            raise ValueError(
                "`model` must assign a variable of a rematerialized layer at most once; got "
                f"{len(before)} assignments of {variable.path!r}"
            )


def written_by(before: Values, after: Values) -> Values:
    """Returns the values that a forward pass would have assigned."""
    return {position: new for position, new in after.items() if new is not before.get(position)}


EXACT = {dtype: 2**bits for dtype, bits in SIGNIFICANT_BITS.items()}  # the largest exact integers


@contextlib.contextmanager
def ids_unrounded(model: keras.Model) -> Iterator[None]:
    """Context manager: a pass in which an `Embedding` gets rounded ids ends in a ValueError."""
    # Raised at the end: Keras wraps what is raised in a call, and prints its arguments.
    faults: list[str] = []

    def looking_up(layer: keras.layers.Embedding) -> Callable[..., Any]:
        call = layer.call

        def looked_up(*arguments: Any, **named: Any) -> Any:  # a subclass may take others
            ids = next(iter((*arguments, *named.values())), None)
            dtype = tf.as_dtype(getattr(ids, "dtype", tf.int32)).name
            # True sends a `ReversibleEmbedding` backwards. A tensor cannot be compared with it.
            backwards = any(flag is True for flag in (*arguments, named.get("reverse")))
            if dtype in EXACT and layer.input_dim - 1 > EXACT[dtype] and not backwards:
                faults.append(
                    f"`model` must pass integers to the Embedding {layer.name!r}; got {dtype}: "
                    'begin it with keras.Input(shape, dtype="int32").'
                )
            return call(*arguments, **named)

        return looked_up

    layers = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.Embedding)]
    with replaced_calls(layers, looking_up):
        yield
    if faults:
        raise ValueError(faults[0])


MIN_EPSILON = 1.001e-5  # the smallest epsilon that the kernel accepts on every device


def fused_batch_norm(model: Model, *, wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which BatchNormalization layers use the fused kernel in training.

    Layers that the kernel cannot compute keep Keras's operations. Results differ by rounding only.
    Trace a function inside the context; the layers are restored when the context ends.

    Args:
        model: the model whose layers to change; a `tf.Module` has none.
        wanted: whether to use the fused kernel; False makes the context do nothing.
    """
    wanted &= isinstance(model, keras.Layer)
    layers = [layer for layer in all_layers(model) if can_be_fused(layer)] if wanted else []
    return replaced_calls(layers, lambda layer: functools.partial(fused_call, layer, layer.call))


def can_be_fused(layer: keras.Layer) -> bool:
    """Returns whether a layer is Keras's own BatchNormalization, with supported settings."""
    return (
        type(layer) is keras.layers.BatchNormalization
        and layer.trainable
        and not getattr(layer, "renorm", False)  # Keras 3.12 has none
        and not layer.synchronized
        and layer.epsilon >= MIN_EPSILON
        and "call" not in vars(layer)  # not replaced already, for example by a layer probe
    )


def fused_call(
    layer: keras.layers.BatchNormalization,
    keras_call: Callable[..., tf.Tensor],
    inputs: tf.Tensor,
    training: bool | None = None,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    """Calls a layer, with the fused kernel if the inputs are images with channels last.

    Args:
        layer: the layer whose variables are read and written.
        keras_call: the layer's own `call`, for everything that the kernel cannot compute.
        inputs: for the kernel, shape (examples, height, width, channels).
        training: as in Keras.
        mask: as in Keras; the kernel does not support masks.
    """
    images = isinstance(inputs, tf.Tensor) and inputs.shape.rank == 4 and layer.axis in (-1, 3)
    supported = images and inputs.dtype in (tf.float32, tf.float16, tf.bfloat16)
    if not (training and mask is None and supported):
        return keras_call(inputs, training=training, mask=mask)
    channels = inputs.shape[-1]
    result = tf.raw_ops.FusedBatchNormV3(
        x=inputs,
        scale=as_float32(layer.gamma) if layer.scale else tf.ones([channels]),
        offset=as_float32(layer.beta) if layer.center else tf.zeros([channels]),
        mean=[],
        variance=[],
        epsilon=layer.epsilon,
    )
    # The kernel returns the unbiased variance; Keras tracks the biased one.
    count = tf.cast(tf.size(inputs) // channels, tf.float32)
    variance = result.batch_variance * (count - 1) / count
    for statistic, in_batch in (
        (layer.moving_mean, result.batch_mean),
        (layer.moving_variance, variance),
    ):
        kept = as_float32(statistic) * layer.momentum
        statistic.assign(kept + in_batch * (1.0 - layer.momentum))
    return tf.cast(result.y, layer.compute_dtype)


def as_float32(variable: keras.Variable) -> tf.Tensor:
    """Returns the value that a variable's layer sees under autocast, converted to float32."""
    return keras.ops.cast(variable, "float32")
