"""Forward and backward through one microbatch, as a pure function of values.

Nothing is assigned here. A Keras model runs inside `keras.StatelessScope`: what it would have
assigned (BatchNorm's statistics, counters) is returned as a result, to be kept or dropped once the
verdict is known. It reads its weights as variables, as in a loop without such a scope. So every
gradient tape and custom gradient inside the model finds the variables that it looks for.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

import scaling
import strategies
from trainer.base.tracking import name_of_variable, tensorflow_variable
from trainer.base.warn_once import listed, warn_once
from trainer.keras_compat import differentiable_moments
from trainer.step.added_losses import added_loss, warn_of_losses_per_example
from trainer.step.batch_norm import fused_batch_norm
from trainer.step.float8 import called_once
from trainer.step.float8_counts import (
    Counts,
    counted_product,
    counting,
    gathered_counts,
    own_probes,
    probes_of,
)
from trainer.step.forward import forward, recomputing, written_by
from trainer.step.gather import gathering, part_of_mean
from trainer.step.gradients import count_nonfinite
from trainer.step.losses import distinct, mask_weightless, weighted_mean
from trainer.step.microbatch import (
    Contribution,
    Microbatch,
    MicrobatchPlan,
    NonfiniteFlags,
    PassInputs,
    Rows,
)
from trainer.step.types import Gradient, Values


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
        given = weights_among(inputs.values, len(weights))
        tape.watch([*weights, *given, *probes, *outside.values()])
        with layers_prepared(plan, probes), gathers(inputs, plan):
            passed = forward(share.batch, inputs.values, inputs.keys, plan)
        warn_of_losses_per_example(plan.model, passed.added, share.weights)
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
    counts: Counts = {}
    outside |= watched_outside(tape, plan)
    for objective in plan.objectives:
        wanted = [sources[position] for position in objective.positions]
        watched = own_probes(objective.positions, plan.float8, probes)
        with recomputing(passed, inputs.values, inputs.keys, plan):
            asked = (wanted, watched, outside)
            each, counted, others = tape.gradient(scaled[objective.name], asked)
        check_some_gradient(each)
        warn_of_untrained(others)
        check_given_weights(objective.positions, each, inputs.values, plan)
        found |= dict(zip(objective.positions, each, strict=True))
        counts |= counted
    warn_without_gradient(found, plan)
    gradients, replaced = split_replaced(found, plan)
    loss, casts = tf.add_n(distinct(losses.values())), gathered_counts(counts, share, plan.float8)
    contribution = Contribution(gradients, loss, regularization_loss, casts)
    seen = weighted_losses(passed.losses, share, plan)
    nonfinite = find_nonfinite(contribution, seen, single_pass=plan.single_pass)
    if passed.reported:  # another group of this step reports these losses
        own = [loss for name, loss in losses.items() if name not in passed.reported]
        contribution = contribution._replace(loss=tf.add_n([*distinct(own), tf.constant(0.0)]))
    fraction = tf.cast(share.examples / size.examples, tf.float32)
    written = parts_of_mean(written_by(inputs.values, passed.after), fraction)
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


def weights_among(values: Values, num_weights: int) -> list[tf.Tensor]:
    """Returns the weights among the values of held-back variables."""
    return [value for position, value in values.items() if int(position) < num_weights]


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
        gradients.append(as_dense(gradient) if plan.dense else scaling.coalesce(gradient))
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


def check_some_gradient(gradients: list[Gradient]) -> None:
    """Raises ValueError if a loss does not depend on any variable that it trains."""
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            "`compute_loss` must depend on a trainable variable; got None for every gradient. "
            "There is nothing to update. Compute the losses from the model's output, without "
            "tf.stop_gradient or NumPy in between."
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


def warn_of_untrained(gradients: dict[str, Gradient]) -> None:
    """Names variables that are not the model's and that the loss depends on."""
    names = [name for name, gradient in gradients.items() if gradient is not None]
    if names:
        warn_once(
            f"The loss depends on {listed(names)}, which no optimizer updates: only variables of "
            "the model are trained. Make them attributes of the model, or set trainable=False."
        )


def warn_without_gradient(found: dict[int, Gradient], plan: MicrobatchPlan) -> None:
    """Names trainable variables on which the loss does not depend."""
    weights = [plan.weights[position] for position in found if found[position] is None]
    names = [name_of_variable(variable) for variable in weights]
    if names:
        warn_once(
            f"No gradient reaches {listed(names)}, so training does not change it. Set "
            "trainable=False if that is intended."
        )


def check_given_weights(
    positions: Sequence[int], gradients: list[Gradient], values: Values, plan: MicrobatchPlan
) -> None:
    """Raises ValueError if a weight whose value the pass was given has no gradient.

    A rematerialized layer, and a custom gradient, have gradients for variables and arguments only.

    Args:
        positions: positions of the weights in `model.trainable_variables`.
        gradients: their gradients.
        values: the values that the pass was given.
        plan: the constants of the pass.
    """
    for position, gradient in zip(positions, gradients, strict=True):
        if gradient is None and str(position) in values:
            variable = plan.weights[position]
            name = name_of_variable(variable)
            raise ValueError(
                "`jit_compile` must not be True under parameter servers if a trainable variable "
                f"has no gradient; got {name!r}. A compiled pass is given the weights as values, "
                "and for those a rematerialized layer or a custom gradient has none. Leave out "
                "jit_compile=True; or, if the loss does not need the variable, freeze its layer."
            )


def as_dense(gradient: Gradient) -> tf.Tensor | None:
    """Returns a gradient as a dense tensor, with repeated rows summed; None stays None."""
    return None if gradient is None else tf.convert_to_tensor(gradient)
