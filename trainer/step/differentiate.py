"""Forward and backward through one microbatch, as a pure function of values.

Nothing is assigned here. A Keras model runs inside `keras.StatelessScope`: it computes with
the values it is handed, and what it would have written (BatchNorm's statistics, counters)
comes back as a result, to be kept or dropped when the verdict is known.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import scaling
import strategies
from trainer.base.autograph import call_user
from trainer.base.keras_private import regularizers_in_float32
from trainer.step.batch_norm import fused_batch_norm
from trainer.step.checks import check_not_rounded
from trainer.step.gradients import count_nonfinite
from trainer.step.held_back import HoldBack
from trainer.step.objective import ONLY, Objective


class Whole(NamedTuple):
    """What a share is a share of: the global batch."""

    weight: tf.Tensor  # shape=(), float32: the sum of its example weights
    examples: tf.Tensor  # shape=(), int32


class Contribution(NamedTuple):
    """What one microbatch adds to a step. They add up: over microbatches, then over replicas."""

    gradients: list[Any]  # of the scaled objectives; at least float32; None where there is none
    loss: tf.Tensor  # shape=(), float32: this part of the global weighted mean, unscaled
    regularization_loss: tf.Tensor  # shape=(), float32: this part of `model.losses`, unscaled


class Trouble(NamedTuple):
    """What was not finite in one microbatch. They add up over a replica's microbatches."""

    forward: tf.Tensor  # shape=(), float32: 1 if the loss was not finite
    losses: tf.Tensor  # shape=(2,), float32: how many examples' losses are inf, and NaN
    gradients: tf.Tensor  # shape=(gradients,), float32: 1 where one is not finite, unless
    # the loss was not, or nothing is added to them: then all 0


class Microbatch(NamedTuple):
    """Everything that comes out of one forward and backward pass."""

    contribution: Contribution
    trouble: Trouble
    written: dict[str, tf.Tensor]  # what the pass would write, by position among those held back
    aux: Any  # what `compute_loss` returned beside the losses; first dimension: the example


class ForwardPass(NamedTuple):
    """What a forward pass has computed."""

    losses: dict[str, tf.Tensor]  # by objective; shape=(examples,), float32
    aux: Any  # what `compute_loss` returned beside them; () if nothing
    added: tf.Tensor  # shape=(), float32: the sum of `model.losses`
    after: list[tf.Tensor]  # the values of those held back when it ended


def differentiate(
    share: strategies.Share,
    whole: Whole,
    state: Any,
    values: list[tf.Tensor],
    keys: tf.Tensor,
    *,
    model: Any,
    held_back: Sequence[keras.Variable],
    seeds: Sequence[keras.Variable],
    compute_loss: Any,
    objectives: Sequence[Objective],
    dense: bool,
    alone: bool,
    fuse: bool,
) -> Microbatch:
    """Runs the model forward and backward on one share of the global batch.

    Args:
        share: the examples and their weights.
        whole: what they are a share of.
        state: the loss-scale rule's state; its scale multiplies the objectives.
        values: of `held_back`.
        keys: of `seeds`: shape (len(seeds), 2), int64.
        model: a `keras.Model`, or a `tf.Module`.
        held_back: what the pass computes with and may write, weights first.
        seeds: the states of seed generators, which count on from their keys.
        compute_loss: the user's: (batch, training) -> losses, or (losses, aux).
        objectives: whose gradients are wanted, each of its own variables.
        dense: whether sparse gradients are to be made dense.
        alone: whether nothing is added to its gradients: `locate` will look at them if it must.
        fuse: whether kernels of several operations pay here: see `batch_norm`.
    """
    weights = values[: len(model.trainable_variables)]
    with tf.GradientTape(persistent=len(objectives) > 1) as tape:
        tape.watch(weights)
        with fused_batch_norm(model, wanted=fuse):
            passed = forward(
                share.batch, values, keys, model, held_back, seeds, compute_loss, objectives
            )
        losses = {
            objective.name: weighted_mean(passed.losses[objective.name], share, whole)
            for objective in objectives
        }
        # By examples and not by their weights: the losses of a model are means over its examples.
        regularization_loss = passed.added * tf.cast(share.examples / whole.examples, tf.float32)
        scaled = {
            name: scaling.scale_loss(loss + regularization_loss, state)
            for name, loss in losses.items()
        }
    # A weight that the forward pass has written counts as what it wrote, as when Keras runs it.
    sources = passed.after[: len(weights)] or model.trainable_variables
    gradients = []
    for objective in objectives:
        wanted = [sources[position] for position in objective.positions]
        found = tape.gradient(scaled[objective.name], wanted)
        check_some_gradient(found)
        gradients += [as_dense(each) if dense else scaling.coalesce(each) for each in found]

    contribution = Contribution(gradients, tf.add_n(list(losses.values())), regularization_loss)
    examples = [passed.losses[objective.name] for objective in objectives]
    losses_seen = [real_losses(losses, share) for losses in examples]
    trouble = find_trouble(contribution, losses_seen, alone=alone)
    return Microbatch(contribution, trouble, written_by(model, values, passed.after), passed.aux)


def find_trouble(contribution: Contribution, losses: list[tf.Tensor], *, alone: bool) -> Trouble:
    """Returns what is not finite in a contribution.

    Args:
        contribution: of one microbatch.
        losses: of its examples, 0 where an example has no weight; for each objective.
        alone: see `differentiate`.
    """
    finite = scaling.all_finite([contribution.loss, contribution.regularization_loss])
    gradients = contribution.gradients
    bad = tf.zeros([len(gradients)], tf.bool)
    if not alone:
        bad = finite & ~tf.stack([scaling.all_finite(gradient) for gradient in gradients])
    return Trouble(
        forward=tf.cast(~finite, tf.float32),
        losses=tf.cast(count_nonfinite(tf.stack(losses)), tf.float32),
        gradients=tf.cast(bad, tf.float32),
    )


def forward(
    batch: Any,
    values: list[tf.Tensor],
    keys: tf.Tensor,
    model: Any,
    held_back: Sequence[keras.Variable],
    seeds: Sequence[keras.Variable],
    compute_loss: Any,
    objectives: Sequence[Objective],
) -> ForwardPass:
    """Runs the user's `compute_loss` without letting a Keras model write anything."""
    keys = tf.unstack(keys, num=len(seeds))
    if not isinstance(model, keras.Model):
        for seed, key in zip(seeds, keys, strict=True):
            seed.assign(key)
        losses, aux = losses_and_aux(
            call_user(compute_loss, batch, training=True), batch, objectives
        )
        return ForwardPass(losses, aux, tf.constant(0.0), [])
    with regularizers_in_float32(model), HoldBack([*held_back, *seeds], [*values, *keys]) as scope:
        losses, aux = losses_and_aux(
            call_user(compute_loss, batch, training=True), batch, objectives
        )
        added = sum(tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in model.losses)
    scope.check_all_known()
    after = [scope.get_current_value(variable) for variable in held_back]
    return ForwardPass(losses, aux, tf.convert_to_tensor(added, tf.float32), after)


def written_by(model: Any, before: list[tf.Tensor], after: list[tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns what a forward pass would have written, by position among those held back.

    Raises:
        ValueError: if a layer that computes in half precision has written a weight.
    """
    written = {
        position: new
        for position, (old, new) in enumerate(zip(before, after, strict=True))
        if new is not old
    }
    for position in written:
        if position < len(model.trainable_variables):
            check_not_rounded(model, model.trainable_variables[position])
    return {str(position): value for position, value in written.items()}


def weighted_mean(losses: tf.Tensor, share: strategies.Share, whole: Whole) -> tf.Tensor:
    """Returns a share's part of the weighted mean over the global batch: shape (), float32."""
    return tf.math.divide_no_nan(weighted_sum(losses, share), whole.weight)


def weighted_sum(losses: tf.Tensor, share: strategies.Share) -> tf.Tensor:
    """Returns the sum of a share's losses times their weights: shape (), float32.

    An example of weight 0 has no part in it, even if its loss is inf or NaN.
    """
    return tf.reduce_sum(tf.math.multiply_no_nan(losses, share.weights))


def real_losses(losses: tf.Tensor, share: strategies.Share) -> tf.Tensor:
    """Returns the losses, but 0 where the weight is."""
    return tf.where(share.weights == 0, 0.0, losses)


def losses_and_aux(
    result: Any, batch: Any, objectives: Sequence[Objective]
) -> tuple[dict[str, tf.Tensor], Any]:
    """Returns what `compute_loss` returned as a pair, after a look at names, shapes and dtypes.

    Returns:
        losses: by objective; shape (examples,), float32.
        aux: what came beside them; () if nothing did.

    Raises:
        TypeError: if the losses are not float32, or not by objective.
        ValueError: if they are not one number per example, or aux has no rows to match.
    """
    losses, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, ())
    losses = by_objective(losses, objectives)
    for leaf in tf.nest.flatten(aux):
        if not tf.is_tensor(leaf) or leaf.shape.rank == 0:
            raise ValueError(
                "`compute_loss` must return aux of tensors whose first dimension is the example; "
                f"got {leaf!r}. It is cut to each replica's real examples before the metrics see "
                "it. Return one value per example."
            )
    return {name: check_losses(loss, batch) for name, loss in losses.items()}, aux


def by_objective(losses: Any, objectives: Sequence[Objective]) -> dict[str, Any]:
    """Returns losses by the objective's name; a single objective's stand for themselves."""
    names = [objective.name for objective in objectives]
    if names == [ONLY]:
        return {ONLY: losses}
    if not isinstance(losses, dict) or not set(names) <= set(losses):
        found = sorted(losses) if isinstance(losses, dict) else type(losses).__name__
        raise TypeError(
            f"`compute_loss` must return a dict of losses with {', '.join(map(repr, names))}; got "
            f"{found}. Each optimizer of build_optimizer() has a loss of its own. Return "
            "{name: losses}."
        )
    return {name: losses[name] for name in names}


def check_losses(losses: Any, batch: Any) -> tf.Tensor:
    """Returns the losses of a batch, or raises TypeError or ValueError; see `losses_and_aux`."""
    losses = tf.convert_to_tensor(losses)
    if losses.dtype != tf.float32:
        raise TypeError(
            f"`compute_loss` must return float32 losses; got {losses.dtype.name}. In half "
            "precision a sum over the batch overflows or rounds. Cast the model's output to "
            "float32 before the loss."
        )
    rows = tf.nest.flatten(batch)[0].shape[0]
    wanted = (
        f"`compute_loss` must return one loss per example, shape ({rows or 'examples'},); got shape"
    )
    remedy = (
        "The trainer weighs and averages them over the global batch itself. Leave out the mean "
        "over examples, and average over any other dimension."
    )
    if losses.shape.rank != 1 or losses.shape[0] not in (None, rows):
        raise ValueError(f"{wanted} {losses.shape}. {remedy}")
    if rows is not None:
        return losses
    count = tf.shape(tf.nest.flatten(batch)[0])[:1]
    same = tf.reduce_all(tf.shape(losses) == count)
    told = [wanted, tf.shape(losses), "for", count, "examples.", remedy]
    with tf.control_dependencies([tf.debugging.Assert(same, told)]):
        return tf.identity(losses)


def check_some_gradient(gradients: list[Any]) -> None:
    """Raises ValueError if the loss reaches no variable at all."""
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            f"`compute_loss` must depend on a trainable variable; got {len(gradients)} gradients "
            "that are all None. There is nothing to update. Compute the losses from self.model's "
            "output, without tf.stop_gradient or numpy on the way."
        )


def as_dense(gradient: Any) -> Any:
    """Returns a gradient as a tensor, duplicates of a sparse one summed; None stays None."""
    return None if gradient is None else tf.convert_to_tensor(gradient)
