"""What an entry says of an architecture, and the cells in which it is tried."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

EXAMPLES = 8
CLASSES = 3
SAME, SHARES, TRAINS = "same", "same on shares", "trains"
REFUSED, FAULT = "refused", "fault"


class Cell(NamedTuple):
    """How an architecture is trained."""

    title: str
    precision: str = "float32"
    replicas: int = 1
    num_microbatches: int = 1

    @property
    def shares(self):
        """Number of parts into which a batch is cut."""
        return self.replicas * self.num_microbatches


CELLS = {
    "float32": Cell("float32, one device"),
    "float16": Cell("mixed_float16", "mixed_float16"),
    "replicas": Cell("two replicas", replicas=2),
    "microbatches": Cell("two microbatches", num_microbatches=2),
}


class Entry(NamedTuple):
    """An architecture of other people.

    Attributes:
        name: of the architecture.
        source: who wrote it: a package, or the manner in which the model here is written.
        model: returns the model; called under the dtype policy.
        batch: takes a NumPy generator, returns a batch of `EXAMPLES` examples.
        loss: takes (model, batch, training, gather), returns float32 losses of shape [EXAMPLES]; or
            one number, if it is a function of the whole batch (`coupled`). `gather` returns the rows
            of all replicas.
        loss_fn: instead of `loss`, what `Trainer(loss_fn=)` and `compile` take, for batches (x, y).
        coupled: whether the loss is one number of the whole batch.
        shares: whether the model mixes the examples that it sees together, as BatchNorm does: where
            a batch is cut, the plain loop cuts it too.
        draws: whether the model draws random numbers, so that it is only seen to train.
        optimizer: returns the optimizer.
        steps: number of steps. After several, rounding has taken a deep network elsewhere.
        expected: outcomes by cell; where none is given, the one that follows from the fields above.
        because: what a reader of the page must know.
        needs: packages without which it is skipped.
        in_ci: whether CI tries it.
    """

    name: str
    source: str
    model: Callable[[], Any]
    batch: Callable[..., Any]
    loss: Callable[..., tf.Tensor] | None = None
    loss_fn: Callable[[], keras.losses.Loss] | None = None
    coupled: bool = False
    shares: bool = False
    draws: bool = False
    optimizer: Callable[[], keras.optimizers.Optimizer] = lambda: keras.optimizers.SGD(0.05)
    steps: int = 3
    expected: dict[str, str] = {}  # noqa: RUF012  # never changed
    because: str = ""
    needs: tuple[str, ...] = ()
    in_ci: bool = False

    def outcome(self, cell):
        """The expected outcome in a cell, by its key."""
        if cell in self.expected:
            return self.expected[cell]
        if self.draws:
            return TRAINS
        if cell == "microbatches" and self.coupled:
            return REFUSED
        return SHARES if self.shares and CELLS[cell].shares > 1 else SAME

    def losses(self, model, batch, training, gather=lambda rows: rows):
        """The losses of the examples, or the coupled loss."""
        if self.loss is not None:
            return self.loss(model, batch, training, gather)
        x, y = batch
        losses = self.loss_fn()(y, tf.cast(model(x, training=training), tf.float32))
        return tf.reduce_mean(losses)


def hub(name, **arguments):
    """A public class of KerasHub's models, or a function of its source, with arguments."""
    return getattr(importlib.import_module("keras_hub").models, name)(**arguments)


def hub_source(module, name, **arguments):
    """A class of KerasHub that is in none of its public modules."""
    return getattr(importlib.import_module(f"keras_hub.src.models.{module}"), name)(**arguments)


def without_dropout(model):
    """The model, in which no Dropout drops anything: some of KerasHub's have no argument for it."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    return model


def tokens(random, vocabulary=17, length=6, *, names=("token_ids", "padding_mask")):
    """Token ids, masks in which the last tokens of some examples are padding, and segments."""
    mask = (1 + random.integers(length, size=[EXAMPLES, 1]) > range(-2, length - 2)).astype("int32")
    ids = random.integers(1, vocabulary, size=[EXAMPLES, length]).astype("int32") * mask
    known = {"token_ids": ids, "padding_mask": mask, "segment_ids": ids % 2}
    return {name: known[name] for name in names}


def images(random, size=16):
    """Images of `size` x `size` pixels."""
    return random.normal(size=[EXAMPLES, size, size, 3]).astype("float32")


def classes(random, shape=()):
    """Labels."""
    return random.integers(CLASSES, size=[EXAMPLES, *shape]).astype("int32")


def cross_entropy():
    """What most models are trained with."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def squares(outputs, targets):
    """The mean square of each example's errors, in float32: shape [EXAMPLES]."""
    errors = tf.cast(outputs, tf.float32) - tf.cast(targets, tf.float32)
    return tf.reduce_mean(errors**2, axis=range(1, len(errors.shape)))


def to_waves(output=lambda outputs: outputs):
    """A loss: the mean square of each example's outputs' distance to a cosine over the last axis.

    A constant would not do: after a LayerNorm, its gradients cancel.
    """

    def loss(model, batch, training, gather):
        del gather
        outputs = output(model(batch, training=training))
        return squares(outputs, tf.cos(tf.range(outputs.shape[-1], dtype=tf.float32)))

    return loss
