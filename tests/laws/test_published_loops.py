"""Training loops that papers and tutorials publish, each written as a trainer and as a plain loop.

A case has a model, batches, and the losses of a batch, one per example. The trainer gets these losses
from `compute_loss`. The plain loop takes the gradients of their mean over the whole batch, without
scaling and without the library, and applies SGD. Models and losses are those of `examples/`.
"""

from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import example
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


TEACHER = network(4, 16, 3)


def distillation_losses(model, batch):
    """A teacher that runs in the step, on each replica's share."""
    logits, teacher = (floats(network(batch["x"])) for network in (model, TEACHER))
    losses = example("distillation").distillation_losses
    return losses(logits, teacher, batch["y"], batch["known"])


def translation_losses(model, batch):
    """Cross entropy per token, averaged over the tokens that are there in the whole batch, so that each
    example's is its share.
    """
    inputs, words = batch
    there = tf.cast(inputs[1] != 0, tf.float32)
    tokens = tf.nn.sparse_softmax_cross_entropy_with_logits(words, floats(model(inputs)))
    return tf.reduce_sum(tokens * there) / tf.reduce_sum(there)


class Case(NamedTuple):
    """A published loop."""

    model: object
    losses: object  # takes the model and a batch; returns losses, shape (examples,)
    batch: object
    loss_fn: object = None  # what the trainer gets in place of the losses
    rate: float = RATE


CASES = {
    "vae": Case(
        example("vae").Autoencoder,
        example("vae").vae_losses,
        {
            "image": RANDOM.random([EXAMPLES, 64], dtype=np.float32),
            "noise": normal(EXAMPLES, 2),
        },
        rate=RATE / 64,  # the loss is a sum over the pixels
    ),
    "distillation": Case(
        lambda: network(4, 4, 3),
        distillation_losses,
        {
            "x": normal(EXAMPLES, 4),
            "y": RANDOM.integers(3, size=EXAMPLES),
            "known": (np.arange(EXAMPLES) % 3 > 0).astype(np.float32),
        },
    ),
    "seq2seq": Case(
        lambda: example("seq2seq").translator(width=6),
        translation_losses,
        example("seq2seq").numbers(EXAMPLES, seed=0),
        loss_fn=example("seq2seq").make_loss(),
    ),
    "maml": Case(
        lambda: example("maml").Learner(width=6),
        example("maml").maml_losses,
        {name: normal(EXAMPLES, 5) for name in ("x", "y", "x_query", "y_query")},
    ),
    "ppo": Case(
        example("ppo").actor_critic,
        example("ppo").ppo_losses,
        {
            "state": normal(EXAMPLES, 4),
            "move": RANDOM.integers(2, size=EXAMPLES),
            "log_chance": -RANDOM.random(EXAMPLES, dtype=np.float32) - 0.2,
            "advantage": normal(EXAMPLES),
            "return": normal(EXAMPLES),
        },
    ),
    "pinn": Case(
        lambda: example("pinn").network(width=8), example("pinn").pinn_losses, normal(EXAMPLES, 1)
    ),
}


def start_of(case, precision):
    """A model with the same weights in every precision and loop."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(precision)
    try:
        model = case.model()
        model(case.batch) if not model.built else None
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
            variable.assign_sub(case.rate * tf.cast(tf.convert_to_tensor(gradient), tf.float32))
    return model.get_weights()


def trained(case, precision, replicas, mirrored):
    """The trainer after as many steps."""

    class Published(Trainer):
        def compute_loss(self, batch, training):
            del training
            return case.losses(self.model, batch)

    trainer = (Trainer if case.loss_fn else Published)(
        loss_fn=case.loss_fn,
        model=lambda: start_of(case, precision),
        optimizer=lambda: keras.optimizers.SGD(case.rate),
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


def length(arrays):
    """The norm of all arrays together."""
    return np.linalg.norm(np.concatenate([each.ravel() for each in arrays]))


@pytest.mark.thorough
@pytest.mark.sampled
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
    # Relative to how far the weights moved, so that a small rate hides nothing.
    apart = [one - other for one, other in zip(found, expected, strict=True)]
    assert length(apart) <= (1e-4 if precision == "float32" else 2e-2) * length(moved)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=bound)
