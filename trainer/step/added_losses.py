"""Weights the entries of `model.losses`: regularizers, and what layers passed to `add_loss`.

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
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import strategies
from trainer.base.trace_apart import is_apart
from trainer.base.warn_once import warn_once
from trainer.keras_compat import all_layers, layer_that_added, replaced_calls
from trainer.step.microbatch import GlobalBatchSize


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
    fraction = tf.cast(share.examples / size.examples, tf.float32)
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
    model: keras.Model, listed: Sequence[Any], passed: Sequence[Any] = ()
) -> list[tf.Tensor]:
    """Returns the entries of `model.losses` after a call of the model, each as often as it counts.

    An entry that no layer has added is that of a weight's regularizer. If it is several numbers,
    none of them belongs to an example, and they are summed, as in Keras.

    Args:
        model: the model.
        listed: `model.losses`.
        passed: what layers have passed to `add_loss` in a `keras.StatelessScope`. If two layers
            pass the same tensor, Keras lists it twice for each of them.
    """
    often, seen = collections.Counter(map(id, passed)), collections.Counter[int]()
    found = []
    for loss in listed:
        seen[id(loss)] += 1
        if 0 < often[id(loss)] < seen[id(loss)]:
            continue
        entry = tf.convert_to_tensor(loss)
        if entry.shape.rank != 0 and layer_that_added(model, loss) is None:
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


def warn_of_losses_per_example(
    model: keras.Model, entries: Sequence[tf.Tensor], weights: tf.Tensor
) -> None:
    """Warns once about each layer that adds one number per example, which `fit` would sum."""
    for entry in entries:
        if may_be_per_example(entry, weights):
            layer = layer_that_added(model, entry)
            inner = entry.shape[1:] if entry.shape.rank else ()
            shape = ", ".join(["examples", *map(str, inner)])
            warn_once(
                f"{name_of(layer)} adds a loss of shape ({shape}), one number per example. The "
                "trainer takes its weighted mean over the global batch, as it does with the losses "
                "from compute_loss. Keras's fit sums it, so that it grows with the batch size. Add "
                "tf.reduce_mean(loss) to be independent of this rule."
            )


@contextlib.contextmanager
def recorded_losses(model: keras.Model) -> Iterator[list[Recorded]]:
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

    with replaced_calls(all_layers(model), recording, "add_loss"):
        yield recorded


def tapes_record() -> bool:
    """Returns whether gradient tapes record here. `tf.recompute_grad` stops them all."""
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x + x
    return tape.gradient(y, x) is not None


def check_on_tape(recorded: Sequence[Recorded]) -> None:
    """Raises ValueError if a loss was added where no tape records: it would have no gradient."""
    if names := {name_of(each.layer) for each in recorded if not each.on_tape}:
        raise ValueError(
            "`model` must not add losses inside of keras.remat or tf.recompute_grad; got one of "
            f"{min(names)} (add_loss or an activity regularizer). No tape records there, so the "
            "loss would be reported but have no gradient, as in Keras. Add it outside, from what "
            "the rematerialized layer returns, or create the layer in "
            'keras.RematScope("activations").'
        )


def warn_of_forgotten_losses(recorded: Sequence[Recorded], listed: Sequence[Any]) -> None:
    """Warns once of layers whose losses Keras has forgotten, as of a call before the last one.

    Args:
        recorded: what the layers have added: see `recorded_losses`.
        listed: `model.losses`.
    """
    known = {id(loss) for loss in listed}
    if names := {name_of(each.layer) for each in recorded if id(each.loss) not in known}:
        warn_once(
            f"{min(names)} adds a loss (add_loss or an activity regularizer) in a call that is not "
            "the model's last one in compute_loss. As in Keras, model.losses holds what the last "
            "call has added. Call the model once, with all inputs in one batch, or add the losses "
            "of the other calls in compute_loss."
        )


def name_of(layer: keras.Layer | None) -> str:
    """Returns how a warning calls a layer."""
    return "The model" if layer is None else f"Layer {layer.name!r}"
