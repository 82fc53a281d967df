"""Forward and backward through one microbatch, as a pure function of values.

Nothing is assigned here. A Keras model runs inside `keras.StatelessScope`: it computes with
the values it is handed, and what it would have written (BatchNorm's statistics, counters)
comes back as a result, to be kept or dropped when the verdict is known.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

import scaling
import strategies
from trainer.keras_private import penalties_in_float32


class Values(NamedTuple):
    """The numbers a Keras model computes with; none for a `tf.Module`, which reads its own."""

    trainable: list[tf.Tensor]
    held_back: list[tf.Tensor]  # of the variables that the forward pass may write


class Whole(NamedTuple):
    """What a share is a share of: the global batch."""

    weight: tf.Tensor  # shape=(), float32: the sum of its example weights
    examples: tf.Tensor  # shape=(), int32


class Contribution(NamedTuple):
    """What one microbatch adds to a step. They add up: over microbatches, then over replicas."""

    gradients: list[Any]  # of the scaled objective; at least float32; None where there is none
    loss: tf.Tensor  # shape=(), float32: this part of the global weighted mean, unscaled
    regularization_loss: tf.Tensor  # shape=(), float32: this part of `model.losses`, unscaled
    bad_forward: tf.Tensor  # shape=(), float32: 1 if one of these losses was not finite
    bad_backward: tf.Tensor  # shape=(), float32: 1 if the losses were, but a gradient was not


class Microbatch(NamedTuple):
    """Everything that comes out of one forward and backward pass."""

    contribution: Contribution
    written: dict[str, tf.Tensor]  # what the pass would write, by position in `Values.held_back`
    aux: Any  # what `compute_loss` returned beside the losses; first dimension: the example


def differentiate(
    share: strategies.Share,
    whole: Whole,
    state: Any,
    values: Values,
    *,
    model: Any,
    compute_loss: Any,
    dense: bool,
) -> Microbatch:
    """Runs the model forward and backward on one share of the global batch.

    Args:
        share: the examples and their weights.
        whole: what they are a share of.
        state: the loss-scale rule's state; its scale multiplies the objective.
        values: the variables' values.
        model: a `keras.Model`, or a `tf.Module`.
        compute_loss: the user's: (batch, training) -> losses, or (losses, aux).
        dense: whether sparse gradients are to be made dense.
    """
    with tf.GradientTape() as tape:
        tape.watch(values.trainable)
        losses, aux, added, written = forward(share.batch, values, model, compute_loss)
        loss = weighted_mean(losses, share, whole)
        # By examples and not by their weights: the losses of a model are means over its examples.
        regularization_loss = added * tf.cast(share.examples / whole.examples, tf.float32)
        scaled = scaling.scale_loss(loss + regularization_loss, state)
    sources = values.trainable if isinstance(model, keras.Model) else model.trainable_variables
    gradients = [
        as_dense(gradient) if dense else scaling.coalesce(gradient)
        for gradient in tape.gradient(scaled, sources)
    ]
    check_some_gradient(gradients)

    forward_finite = scaling.all_finite([loss, regularization_loss])
    backward_finite = scaling.all_finite(gradients)
    contribution = Contribution(
        gradients=gradients,
        loss=loss,
        regularization_loss=regularization_loss,
        bad_forward=tf.cast(~forward_finite, tf.float32),
        bad_backward=tf.cast(forward_finite & ~backward_finite, tf.float32),
    )
    return Microbatch(contribution, written, aux)


def forward(
    batch: Any, values: Values, model: Any, compute_loss: Any
) -> tuple[tf.Tensor, Any, tf.Tensor, dict[str, tf.Tensor]]:
    """Runs the user's `compute_loss` without letting a Keras model write anything.

    Returns:
        losses: shape (examples,), float32.
        aux: what `compute_loss` returned beside them; () if nothing.
        added: shape (), float32: the sum of `model.losses`.
        written: what the model would have written, by position in `Values.held_back`.
    """
    if not isinstance(model, keras.Model):
        losses, aux = losses_and_aux(compute_loss(batch, training=True), batch)
        return losses, aux, tf.constant(0.0), {}
    pairs = list(zip(model.trainable_variables, values.trainable, strict=True))
    pairs += zip(model.non_trainable_variables, values.held_back, strict=True)
    with penalties_in_float32(model), keras.StatelessScope(pairs, collect_losses=True) as scope:
        losses, aux = losses_and_aux(compute_loss(batch, training=True), batch)
        added = sum(tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in model.losses)
    check_weights_unwritten(scope, model, values)
    after = [scope.get_current_value(variable) for variable in model.non_trainable_variables]
    written = {
        str(position): new
        for position, (new, old) in enumerate(zip(after, values.held_back, strict=True))
        if new is not old
    }
    return losses, aux, added, written


def check_weights_unwritten(scope: keras.StatelessScope, model: Any, values: Values) -> None:
    """Raises ValueError if the forward pass has assigned a trainable variable."""
    for variable, value in zip(model.trainable_variables, values.trainable, strict=True):
        if scope.get_current_value(variable) is not value:
            raise ValueError(
                f"`model` must not assign its trainable variables in the forward pass; got "
                f"{variable.path!r}, assigned. Its gradient would be of another value than the "
                "update's, and under half precision the weight would be rounded. Take out the "
                "layer that does so, such as SpectralNormalization."
            )


def weighted_mean(losses: tf.Tensor, share: strategies.Share, whole: Whole) -> tf.Tensor:
    """Returns a share's part of the weighted mean over the global batch: shape (), float32."""
    return tf.math.divide_no_nan(weighted_sum(losses, share), whole.weight)


def weighted_sum(losses: tf.Tensor, share: strategies.Share) -> tf.Tensor:
    """Returns the sum of a share's losses times their weights: shape (), float32.

    An example of weight 0 has no part in it, even if its loss is inf or NaN.
    """
    return tf.reduce_sum(tf.math.multiply_no_nan(losses, share.weights))


def losses_and_aux(result: Any, batch: Any) -> tuple[tf.Tensor, Any]:
    """Returns what `compute_loss` returned as a pair, after a look at shapes and dtype.

    Returns:
        losses: shape (examples,), float32.
        aux: what came beside them; () if nothing did.

    Raises:
        TypeError: if the losses are not float32.
        ValueError: if they are not one number per example, or aux has no rows to match.
    """
    losses, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, ())
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
    if rows is None:
        count = tf.shape(tf.nest.flatten(batch)[0])[:1]
        same = tf.reduce_all(tf.shape(losses) == count)
        told = [wanted, tf.shape(losses), "for", count, "examples.", remedy]
        with tf.control_dependencies([tf.debugging.Assert(same, told)]):
            losses = tf.identity(losses)
    for leaf in tf.nest.flatten(aux):
        if not tf.is_tensor(leaf) or leaf.shape.rank == 0:
            raise ValueError(
                "`compute_loss` must return aux of tensors whose first dimension is the example; "
                f"got {leaf!r}. It is cut to each replica's real examples before the metrics see "
                "it. Return one value per example."
            )
    return losses, aux


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
