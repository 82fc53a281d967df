"""Checks, names and weights the losses that `compute_loss` returned.

It also weights the entries of `model.losses`: regularizers, and what layers passed to `add_loss`.

The loss of a global batch is a mean over its examples, and each share contributes its part. What
an entry of `model.losses` contributes depends on what it is:

- **one number per example** (the first dimension is the share's number of examples): weighted as
  the losses from `compute_loss` are, after a sum over the other dimensions. Keras's `fit` sums over
  the examples, too;
- **a scalar, or a tensor of any other shape**: the sum of its elements, times the share's fraction
  of the examples. This is exact for a mean over the examples and for a regularizer, which is the
  same in every share. A sum over the examples looks the same, and is divided by the number of
  shares: `trainer.run.gradient_check` finds it.
"""

import collections
import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import strategies
from strategies.division import count_examples, known_examples
from trainer.base.argument_checks import as_returned_loss
from trainer.base.trace_apart import is_apart
from trainer.base.warn_once import warn_once
from trainer.keras_compat import all_layers, outputs_of_called, replaced_calls
from trainer.step.gather import scalar_loss
from trainer.step.objective import ONLY, Objective
from trainer.step.types import Aux, Batch, GlobalBatchSize, MicrobatchPlan, Model


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
        f"and weights of shape {weights.shape}"
    )
    if inner.rank != wanted.rank or not inner.is_compatible_with(wanted):
        raise ValueError(message)
    if inner.is_fully_defined() and wanted.is_fully_defined():
        return losses
    # Broadcasting would count one weight for several losses.
    same = tf.reduce_all(tf.shape(losses)[1:] == tf.shape(weights)[1:])
    with tf.control_dependencies(assert_shapes(same, [message])):
        return tf.identity(losses)


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
            raise TypeError(
                "`compute_loss` must return one tensor for one optimizer, or (sum of the losses, "
                f"aux); got a dict with {list(losses)}"
            )
        return {ONLY: losses}
    if not isinstance(losses, dict) or not set(names) <= set(losses):
        found = sorted(losses) if isinstance(losses, dict) else type(losses).__name__
        raise TypeError(
            f"`compute_loss` must return a dict of losses for the optimizers {names}; got {found}"
        )
    return {name: losses[name] for name in names}


def check_losses(losses: tf.Tensor, batch: Batch) -> tf.Tensor:
    """Returns the losses of a batch, or raises TypeError or ValueError; see `losses_and_aux`."""
    losses = as_returned_loss(losses, "one loss per example, or (losses, aux)")
    rows, found = known_examples(batch), losses.shape[:1].num_elements()
    wanted = "`compute_loss` must return one loss per example, without their mean, shape"
    if losses.shape.rank == 0 or (rows is not None and found not in (None, rows)):
        raise ValueError(f"{wanted} ({rows or 'examples'},); got shape {losses.shape}")
    if None not in (rows, found):
        return losses
    count = count_examples(batch)[None]
    same = tf.reduce_all(tf.shape(losses)[:1] == count)
    return nan_unless(same, losses, [wanted, count, "; got shape", tf.shape(losses)])


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


class Recorded(NamedTuple):
    """A loss that a layer has added in a forward pass."""

    layer: keras.Layer
    loss: Any
    on_tape: bool  # whether gradient tapes recorded what it was computed from


def added_loss(
    entries: Sequence[tf.Tensor], share: strategies.Share, size: GlobalBatchSize
) -> tf.Tensor:
    """Returns a share's contribution to the global batch's `model.losses`: shape (), float32.

    Args:
        entries: the entries of `model.losses`, as the model added them for the share's examples.
        share: the examples and their weights.
        size: the size of the global batch.
    """
    fraction = size.fraction(share)
    total = tf.constant(0.0)
    for entry in entries:
        value = tf.cast(entry, tf.float32)  # before the sum, which overflows float16
        if may_be_per_example(entry, share.weights):
            rows = sums_of_rows(value)
            weights = weights_of_rows(rows, share, size, fraction)
            total += tf.reduce_sum(tf.math.multiply_no_nan(rows, weights))
        else:
            total += tf.reduce_sum(value) * fraction
    return total


def added_entries(
    listed: Sequence[Any], recorded: Sequence[Recorded], passed: Sequence[Any] = ()
) -> list[tf.Tensor]:
    """Returns the entries of `model.losses` after a call of the model, each as often as it counts.

    An entry that no layer has added is that of a weight's regularizer. If it is several numbers,
    none of them belongs to an example, and they are summed, as in Keras.

    Args:
        listed: `model.losses`.
        recorded: what the layers have added: see `recorded_losses`.
        passed: what layers have passed to `add_loss` in a `keras.StatelessScope`. If two layers
            pass the same tensor, Keras lists it twice for each of them.
    """
    often, seen = collections.Counter(map(id, passed)), collections.Counter[int]()
    added = {id(each.loss) for each in recorded}
    found = []
    for loss in listed:
        seen[id(loss)] += 1
        if 0 < often[id(loss)] < seen[id(loss)]:
            continue
        entry = tf.convert_to_tensor(loss)
        if entry.shape.rank != 0 and id(loss) not in added:
            entry = tf.reduce_sum(tf.cast(entry, tf.float32))
        found.append(entry)
    return found


def may_be_per_example(entry: tf.Tensor, weights: tf.Tensor) -> bool:
    """Returns whether the static shape of an entry allows one number per example.

    Args:
        entry: an entry of `model.losses`. Operations such as `tf.math.segment_sum` do not tell how
            many numbers they return.
        weights: the weights of the share's examples: shape (max(examples, 1), ...).
    """
    rows = entry.shape[:1].num_elements()
    return entry.shape.rank != 0 and rows in (None, weights.shape[0])


def sums_of_rows(value: tf.Tensor) -> tf.Tensor:
    """Returns an entry summed over all dimensions but the first: shape (rows,), or (1,)."""
    if value.shape.rank is not None:
        return tf.reduce_sum(value, axis=list(range(1, value.shape.rank)))
    first = tf.concat([tf.shape(value)[:1], [1]], axis=0)[0]
    return tf.reduce_sum(tf.reshape(value, [first, -1]), axis=1)


def weights_of_rows(
    rows: tf.Tensor, share: strategies.Share, size: GlobalBatchSize, fraction: tf.Tensor
) -> tf.Tensor:
    """Returns what to multiply each row of an entry by: same shape as `rows`, float32.

    Args:
        rows: an entry of `model.losses`, summed over all dimensions but the first.
        share: the examples and their weights.
        size: the size of the global batch.
        fraction: the share's fraction of the examples: shape (), float32. It multiplies the rows
            if they turn out not to be examples.
    """
    inner = list(range(1, share.weights.shape.rank))  # of weights of tokens, for example
    weights = tf.math.divide_no_nan(tf.reduce_sum(share.weights, axis=inner), size.weight)
    if rows.shape[0] is not None:
        return weights
    count = tf.shape(rows)[0]
    return tf.cond(
        count == tf.shape(weights)[0], lambda: weights, lambda: tf.fill([count], fraction)
    )


def warn_of_added_losses(
    entries: Sequence[tf.Tensor],
    recorded: Sequence[Recorded],
    weights: tf.Tensor,
    plan: MicrobatchPlan,
) -> None:
    """Warns once about each layer whose losses may count for something else than in `fit`.

    `fit` sums a loss with one number per example. Where batches are divided, a scalar counts by
    its share's fraction of the examples, which is right for a mean and for a function of weights
    alone, and not for a sum over examples. The shape does not tell which one it is.
    """
    layers = {id(each.loss): each.layer for each in recorded}
    for entry in entries:
        layer = layers.get(id(entry))
        if may_be_per_example(entry, weights):
            inner = entry.shape[1:] if entry.shape.rank else ()
            shape = ", ".join(["examples", *map(str, inner)])
            warn_once(
                f"{name_of(layer)} adds a loss of shape ({shape}), one number per example: its "
                "weighted mean over the global batch counts here, and its sum in Keras's fit."
            )
        elif layer is not None and not plan.single_pass:
            warn_once(
                f"{name_of(layer)} adds a scalar loss. This run divides its batches. A mean over "
                "examples or a function of weights is right; a sum over examples counts for less."
            )


@contextlib.contextmanager
def recorded_losses(model: Model) -> Iterator[list[Recorded]]:
    """Context manager for a forward pass: records what layers add, also what Keras then forgets.

    A call of a model forgets what its layers have added in the call before.

    Yields:
        What this thread's calls add.
    """
    recorded: list[Recorded] = []
    thread = threading.get_ident()

    def recording(layer: keras.Layer) -> Callable[..., None]:
        add = layer.add_loss

        def run(loss: Any, **others: Any) -> None:
            if threading.get_ident() == thread and not is_apart():
                on_tape = tapes_record()
                recorded.extend(Recorded(layer, each, on_tape) for each in tf.nest.flatten(loss))
            add(loss, **others)

        return run

    layers = all_layers(model) if isinstance(model, keras.Layer) else []
    with replaced_calls(layers, recording, "add_loss"):
        yield recorded


def tapes_record() -> bool:
    """Returns whether gradient tapes record here. `tf.recompute_grad` stops them all."""
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x + x
    return tape.gradient(y, x) is not None


def check_added_losses(recorded: Sequence[Recorded], listed: Sequence[Any]) -> None:
    """Finds losses that layers have added and that would not move a weight as they should.

    It warns once of what Keras has forgotten: `model.losses` holds what the last call has added.

    Args:
        recorded: what the layers have added: see `recorded_losses`.
        listed: `model.losses`.

    Raises:
        ValueError: if a loss was added where no tape records: it would have no gradient.
    """
    if names := {name_of(each.layer) for each in recorded if not each.on_tape}:
        raise ValueError(
            "`model` must not add losses inside of keras.remat or tf.recompute_grad, without a "
            f"gradient; got one of {min(names)}"
        )
    known = {id(loss) for loss in listed}
    if names := {name_of(each.layer) for each in recorded if id(each.loss) not in known}:
        warn_once(
            f"{min(names)} adds a loss (add_loss or an activity regularizer) in a call that is not "
            "the model's last one in compute_loss, so that it does not count, as in Keras."
        )


def name_of(layer: keras.Layer | None) -> str:
    """Returns how a warning calls a layer."""
    return "The model" if layer is None else f"Layer {layer.name!r}"
