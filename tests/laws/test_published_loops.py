"""Training loops that papers and tutorials publish, each written as a trainer and as a plain loop.

A case has a model, batches, and the losses of a batch, one per example. The trainer gets these losses
from `compute_loss`. The plain loop takes the gradients of their mean over the whole batch, without
scaling and without the library, and applies SGD.
"""

from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import scaling
from trainer import Trainer

EXAMPLES, STEPS, RATE = 12, 3, 0.125
RANDOM = np.random.default_rng(0)


def normal(*shape):
    """Normal numbers, float32."""
    return RANDOM.normal(size=shape).astype(np.float32)


def network(inputs, *units, activation="tanh"):
    """Dense layers; the last one is linear."""
    hidden = [layers.Dense(each, activation=activation) for each in units[:-1]]
    return keras.Sequential([keras.Input([inputs]), *hidden, layers.Dense(units[-1])])


def floats(x):
    """A model's outputs, in float32."""
    return tf.cast(x, tf.float32)


def rows_mean(x):
    """The mean of each example's numbers."""
    return tf.reduce_mean(tf.reshape(x, [tf.shape(x)[0], -1]), axis=1)


class Autoencoder(keras.Model):
    """A variational autoencoder; the noise comes with the batch, so that both loops draw the same."""

    def __init__(self):
        """Builds both halves."""
        super().__init__()
        self.encoder, self.decoder = network(4, 8, 4), network(2, 8, 4)

    def call(self, batch):
        """The reconstruction, and mean and logarithm of the variance of the code."""
        mean, spread = tf.split(floats(self.encoder(batch["x"])), 2, axis=1)
        code = mean + tf.exp(0.5 * spread) * floats(batch["noise"])
        return floats(self.decoder(code)), mean, spread


def vae_losses(model, batch):
    """Kingma and Welling 2013, equation 10: reconstruction and divergence from the prior."""
    decoded, mean, spread = model(batch)
    divergence = -0.5 * tf.reduce_sum(1 + spread - mean**2 - tf.exp(spread), axis=1)
    return rows_mean((decoded - batch["x"]) ** 2) + 0.125 * divergence


TEACHER = network(4, 16, 3)


def distillation_losses(model, batch):
    """Hinton et al. 2015: soft targets of a teacher at a temperature of 2, and the labels."""
    hot = 2.0
    soft = tf.nn.softmax(floats(TEACHER(batch["x"])) / hot)
    logits = floats(model(batch["x"]))
    targets = tf.nn.softmax_cross_entropy_with_logits(soft, logits / hot) * hot**2
    hard = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], logits)
    return 0.5 * targets + 0.5 * hard


def translator():
    """An embedding with a mask, a recurrent layer, and a distribution over words for each token."""
    return keras.Sequential(
        [
            keras.Input([5], dtype="int32"),
            layers.Embedding(7, 4, mask_zero=True),
            layers.GRU(6, return_sequences=True, use_cudnn=False),
            layers.Dense(7),
        ]
    )


def translation_losses(model, batch):
    """Sutskever et al. 2014: cross entropy per token, averaged over the tokens that are there."""
    there = tf.cast(batch["words"] != 0, tf.float32)
    logits = floats(model(batch["words"]))
    tokens = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["next"], logits)
    return tf.reduce_sum(tokens * there, axis=1) / tf.reduce_sum(there, axis=1)


def maml_losses(model, batch):
    """Finn et al. 2017, algorithm 1, for a task per example: a line is adapted by one step of gradient
    descent from the model's start, and the loss is that of the adapted line on other points.
    """
    start = floats(model(tf.ones_like(batch["slope"])[:, None]))  # the same start for every task

    def loss(line, x):
        return (line[:, :1] * x + line[:, 1:] - batch["slope"][:, None] * x) ** 2

    with tf.GradientTape() as tape:
        tape.watch(start)
        inner = tf.reduce_mean(loss(start, batch["support"]), axis=1)
    adapted = start - 0.25 * tape.gradient(inner, start)
    return tf.reduce_mean(loss(adapted, batch["query"]), axis=1)


def pinn_losses(model, batch):
    """Raissi et al. 2019: the residual of u'' + u = 0 at points inside, and u(0) = 0, u'(0) = 1."""

    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = floats(model(x))
        return value, tape.gradient(value, x)

    x = batch["x"]
    with tf.GradientTape() as tape:
        tape.watch(x)
        value, slope = both(x)
    residual = tape.gradient(slope, x) + value
    at_zero, slope_at_zero = both(tf.zeros_like(x))
    return (residual**2 + at_zero**2 + (slope_at_zero - 1.0) ** 2)[:, 0]


class Case(NamedTuple):
    """A published loop."""

    model: object
    losses: object  # takes the model and a batch; returns losses, shape (examples,)
    batch: dict


CASES = {
    "vae": Case(Autoencoder, vae_losses, {"x": normal(EXAMPLES, 4), "noise": normal(EXAMPLES, 2)}),
    "distillation": Case(
        lambda: network(4, 4, 3),
        distillation_losses,
        {"x": normal(EXAMPLES, 4), "y": RANDOM.integers(3, size=EXAMPLES)},
    ),
    "seq2seq": Case(
        translator,
        translation_losses,
        {
            "words": np.where(
                np.arange(5) < RANDOM.integers(1, 6, [EXAMPLES, 1]),
                RANDOM.integers(1, 7, [EXAMPLES, 5]),
                0,
            ),
            "next": RANDOM.integers(7, size=[EXAMPLES, 5]),
        },
    ),
    "maml": Case(
        lambda: network(1, 4, 2),
        maml_losses,
        {
            "slope": normal(EXAMPLES),
            "support": normal(EXAMPLES, 5),
            "query": normal(EXAMPLES, 5),
        },
    ),
    "pinn": Case(lambda: network(1, 8, 8, 1), pinn_losses, {"x": normal(EXAMPLES, 1)}),
}


def start_of(case, precision):
    """A model with the same weights in every precision and loop."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(precision)
    try:
        model = case.model()
        model(case.batch) if isinstance(model, Autoencoder) else None
    finally:
        keras.config.set_dtype_policy("float32")
    return model


def plain(case, precision):
    """The weights after a plain loop."""
    model = start_of(case, precision)
    batch = tf.nest.map_structure(tf.constant, case.batch)
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(case.losses(model, batch))
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(RATE * tf.cast(tf.convert_to_tensor(gradient), tf.float32))
    return model.get_weights()


def trained(case, precision, replicas, mirrored):
    """The trainer after as many steps."""

    class Published(Trainer):
        def compute_loss(self, batch, training):
            del training
            return case.losses(self.model, batch)

    trainer = Published(
        model=lambda: start_of(case, precision),
        optimizer=lambda: keras.optimizers.SGD(RATE),
        precision=precision,
        loss_scale=scaling.FixedLossScale(2.0**8) if precision == "mixed_float16" else None,
        strategy=mirrored(replicas) if replicas > 1 else "default",
        jit_compile=False,
        verbose=False,
    )
    data = tf.data.Dataset.from_tensors(case.batch).repeat()
    summary = trainer.train(data, steps=STEPS)
    assert summary.totals.applied == STEPS
    return trainer


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        ("mixed_float16", 2),
        pytest.param("float32", 2, marks=pytest.mark.slow),
        pytest.param("mixed_float16", 1, marks=pytest.mark.slow),
        pytest.param("float32", 1, marks=pytest.mark.slow),
    ],
)
def test_a_published_loop_is_its_plain_loop(name, precision, replicas, mirrored):
    """L8: the weights are those of the plain loop, in float16 those of the plain loop in float16."""
    case = CASES[name]
    found = trained(case, precision, replicas, mirrored).model.get_weights()
    before = start_of(case, "float32").get_weights()
    moved = [one - start for one, start in zip(found, before, strict=True)]
    expected = plain(case, precision)
    bound = 2e-6 if precision == "float32" else 4e-3

    assert all(np.any(each) for each in moved)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=bound)
