"""Checks, names and weights the losses that `compute_loss` returned."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

import strategies
from strategies.division import count_examples, known_examples
from trainer.base.argument_checks import as_returned_loss
from trainer.keras_compat import outputs_of_called
from trainer.step.gather import scalar_loss
from trainer.step.objective import ONLY, Objective
from trainer.step.types import Aux, Batch

REMEDY = (
    "The trainer itself takes the weighted mean over the global batch. Leave out the mean over "
    "examples, and average over any other dimension."
)
REMEDY_OF_SCALAR = (
    "The trainer itself takes the weighted mean over the global batch. Leave out the mean over "
    'examples, or pass reduction="global" if the loss compares the examples with each other.'
)


def weighted_mean(losses: tf.Tensor, share: strategies.Share, weight: tf.Tensor) -> tf.Tensor:
    """Returns a share's contribution to the global batch's weighted mean: shape (), float32.

    Args:
        losses: losses of the share's examples: float32, in the shape of the share's weights.
        share: the examples and their weights.
        weight: sum of the magnitudes of the global batch's weights: shape (), float32.
    """
    return tf.math.divide_no_nan(weighted_sum(losses, share), weight)


def weighted_sum(losses: tf.Tensor, share: strategies.Share) -> tf.Tensor:
    """Returns the sum of a share's losses times their weights: shape (), float32.

    An example whose weight is 0 adds nothing to the sum, even if its loss is inf or NaN.

    Raises:
        ValueError: if the losses and the weights have different shapes.
    """
    losses = of_same_shape(losses, share.weights)
    return tf.reduce_sum(tf.math.multiply_no_nan(losses, share.weights))


def mask_weightless(losses: tf.Tensor, share: strategies.Share) -> tf.Tensor:
    """Returns the losses, with 0 for every example, or element, whose weight is 0."""
    return tf.where(share.weights == 0, 0.0, losses)


def of_same_shape(losses: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Returns the losses; raises ValueError unless they have the shape of the weights."""
    inner, wanted = losses.shape[1:], weights.shape[1:]
    message = (
        f"`compute_loss` must return losses of the shape of the weights; got shape {losses.shape}, "
        f"and example_weights returned shape {weights.shape}. Each weight multiplies one loss. "
        "Leave out the mean over examples and elements, or sum the weights over the elements."
    )
    if inner.rank == wanted.rank and inner.is_compatible_with(wanted):
        if inner.is_fully_defined() and wanted.is_fully_defined():
            return losses
        # Broadcasting would count one weight for several losses.
        same = tf.reduce_all(tf.shape(losses)[1:] == tf.shape(weights)[1:])
        with tf.control_dependencies(assert_shapes(same, [message])):
            return tf.identity(losses)
    if weights.shape.rank == 1:
        raise ValueError(
            "`compute_loss` must return one loss per example, shape "
            f"({weights.shape[0] or 'examples'},); got shape {losses.shape}. {REMEDY} Or return "
            "weights of that shape from example_weights, one for each element."
        )
    raise ValueError(message)


def losses_and_aux(
    result: Any, batch: Batch, objectives: Sequence[Objective], *, global_loss: bool = False
) -> tuple[dict[str, tf.Tensor], Aux]:
    """Splits and checks what `compute_loss` returned.

    Args:
        result: losses, or (losses, aux); see `Task.compute_loss`.
        batch: the examples that the losses were computed from.
        objectives: the objectives, each of which needs a loss.
        global_loss: whether a loss is one number, a function of the whole global batch.

    Returns:
        losses: a dict of losses, keyed by objective name: float32, shape (examples, ...) each;
            shape () if it is global.
        aux: what was returned along with the losses; () if nothing was.

    Raises:
        TypeError: if the losses are not float32, or an objective's losses are missing.
        ValueError: if there is not one loss per example.
    """
    losses, aux = split_result(result)
    losses = by_objective(losses, objectives)
    # Objectives that share a loss share the checked one, by which `distinct` recognizes it.
    keys = {name: identity_of(loss) for name, loss in losses.items()}
    checked: dict[tuple[int, ...], tf.Tensor] = {}
    for name, loss in losses.items():
        if keys[name] not in checked:
            checked[keys[name]] = scalar_loss(loss) if global_loss else check_losses(loss, batch)
    return {name: checked[keys[name]] for name in losses}, aux


def split_result(result: Any) -> tuple[Any, Any]:
    """Returns (losses, aux) of what `compute_loss` returned; aux is () if there is none."""
    return result if isinstance(result, tuple) and len(result) == 2 else (result, ())


def identity_of(loss: Any) -> tuple[int, ...]:
    """Returns a key that is the same for a tensor and for what a `tf.function` makes of it.

    A `tf.function` that returns one tensor twice has two outputs. They are followed into its graph,
    so that a loss under two names is also recognized if it comes out of such a function.
    """
    calls: list[int] = []  # a function that is called twice computes two losses
    while tf.is_tensor(loss) and hasattr(loss, "graph"):
        if loss.op.type == "Identity":
            loss = loss.op.inputs[0]
            continue
        if loss.op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
            break
        outputs = outputs_of_called(loss.op)
        if loss.value_index >= len(outputs):
            break
        calls.append(id(loss.op))
        loss = outputs[loss.value_index]
    return (*calls, id(loss))


def distinct(losses: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the losses of several objectives, each once, to report their sum."""
    return list({id(loss): loss for loss in losses}.values())


def shared_with(result: Any, earlier: Collection[str], objectives: Sequence[Objective]) -> set[str]:
    """Returns the names of the objectives whose loss is that of an earlier objective, too.

    Args:
        result: what `compute_loss` returned.
        earlier: names of the objectives of earlier update groups, which report such a loss.
        objectives: the objectives.
    """
    losses, _ = split_result(result)
    if not isinstance(losses, dict):
        return set()
    reported = {identity_of(losses[name]) for name in earlier if name in losses}
    return {
        each.name
        for each in objectives
        if each.name in losses and identity_of(losses[each.name]) in reported
    }


def by_objective(
    losses: tf.Tensor | dict[str, tf.Tensor], objectives: Sequence[Objective]
) -> dict[str, tf.Tensor]:
    """Returns a dict of losses, keyed by objective name. A single objective needs no dict."""
    names = [objective.name for objective in objectives]
    if not names:  # a run that only evaluates
        return losses if isinstance(losses, dict) else {ONLY: losses}
    if names == [ONLY]:
        if isinstance(losses, dict):
            parts = ", ".join(repr(name) for name in losses)
            raise TypeError(
                "`compute_loss` must return one tensor for one optimizer; got a dict with "
                f"{parts}. "
                "A dict has one loss for each optimizer that build_optimizer() returns by name. "
                "Return the sum of the losses, and the parts as aux, for metrics: (sum, parts)."
            )
        return {ONLY: losses}
    if not isinstance(losses, dict) or not set(names) <= set(losses):
        found = sorted(losses) if isinstance(losses, dict) else type(losses).__name__
        raise TypeError(
            f"`compute_loss` must return a dict of losses with {', '.join(map(repr, names))}; got "
            f"{found}. Each optimizer from build_optimizer() has its own loss. Return "
            "{name: losses}."
        )
    return {name: losses[name] for name in names}


def check_losses(losses: tf.Tensor, batch: Batch) -> tf.Tensor:
    """Returns the losses of a batch, or raises TypeError or ValueError; see `losses_and_aux`."""
    losses = as_returned_loss(losses, "one loss per example, or (losses, aux)")
    rows = known_examples(batch)
    wanted = (
        f"`compute_loss` must return one loss per example, shape ({rows or 'examples'},); got shape"
    )
    found = losses.shape[:1].num_elements()
    if losses.shape.rank == 0 or (rows is not None and found not in (None, rows)):
        remedy = REMEDY_OF_SCALAR if losses.shape.rank == 0 else REMEDY
        raise ValueError(f"{wanted} {losses.shape}. {remedy}")
    if None not in (rows, found):
        return losses
    count = count_examples(batch)[None]
    same = tf.reduce_all(tf.shape(losses)[:1] == count)
    message = [wanted, tf.shape(losses), "for", count, "examples.", REMEDY]
    return nan_unless(same, losses, message)


def nan_unless(same: tf.Tensor, values: tf.Tensor, message: list[Any]) -> tf.Tensor:
    """Returns values, or fails unless `same` holds.

    Where XLA computes a shape while the graph runs, as after `tf.boolean_mask`, nothing can fail:
    all values are NaN then, so that the step is skipped.

    Args:
        same: computed from shapes only: shape (), bool.
        values: any shape, float32.
        message: of the error: strings and tensors.
    """
    with tf.control_dependencies(assert_shapes(same, message)):
        return tf.where(same, values, math.nan)


def assert_shapes(same: tf.Tensor, message: list[Any]) -> list[tf.Operation]:
    """Returns operations that fail when the graph runs or is compiled, unless `same` holds.

    XLA leaves assertions out. But it knows all shapes when it compiles, and then refuses to reshape
    one element into none.

    Args:
        same: computed from shapes only: shape (), bool.
        message: of the assertion: strings and tensors.
    """
    wrong = tf.zeros([tf.cast(~same, tf.int32)])
    refused = tf.reshape(wrong, [0], name="compute_loss_returned_a_wrong_shape")
    return [tf.debugging.Assert(same, message), refused.op]
