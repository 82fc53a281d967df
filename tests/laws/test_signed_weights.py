"""L8: weights of either sign: the step is a plain loop's, with the sum of their magnitudes below it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import attempt

from trainer import Trainer

random = np.random.default_rng(0)
X = random.normal(size=[9, 4, 3]).astype("float32")
Y = random.integers(0, 2, [9, 4])
OF_EXAMPLES = {
    "negative sum": np.float32([-1, 1, 1, 1, -1, -1, -1, -1, 0]),
    "sum 0": np.float32([2, -2, 1, -1, 0.5, -0.5, 3, -3, 0]),
    "nearly 0": np.float32([2, -2, 1, -1, 0.5, -0.5, 3, -3, 1e-6]),
    "all negative": -np.arange(1, 10, dtype="float32"),
}
WEIGHTS = OF_EXAMPLES | {"of elements": np.float32(random.choice([-2, -1, 0, 1], [9, 4]))}
# In one sequence the weights add up to 0, though each of them counts.
WEIGHTS["of elements"][2] = [1, -1, 1, -1]


def model():
    """Two logits for each of four positions."""
    dense = keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(1))
    return keras.Sequential([keras.Input([4, 3]), dense])


def plain_step(weights):
    """The weights after one step of SGD, and the loss, by a `GradientTape` alone."""
    plain = model()
    by_element = weights if weights.ndim == 2 else np.repeat(weights[:, None], 4, 1)
    with tf.GradientTape() as tape:
        losses = keras.losses.sparse_categorical_crossentropy(Y, plain(X), from_logits=True)
        loss = tf.reduce_sum(losses * by_element) / np.abs(by_element).sum()
    gradients = tape.gradient(loss, plain.trainable_variables)
    moved = [v.numpy() - g.numpy() for v, g in zip(plain.weights, gradients, strict=True)]
    return moved, float(loss)


class OwnWeights(Trainer):
    """A loss per element, and weights of its own."""

    def compute_loss(self, batch, training):
        """Returns shape (examples, 4)."""
        x, y, _ = batch
        outputs = self.model(x, training=training)
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    def example_weights(self, batch):
        """The third element of the batch, for each element."""
        return tf.reshape(batch[2], [-1, 1 if batch[2].shape.rank == 1 else 4]) * tf.ones([1, 4])


def trainer_of(mirrored, replicas, kind=Trainer, **arguments):
    """A trainer of `model` with SGD, on some replicas."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    losses = {} if kind is OwnWeights else {"loss_fn": loss}
    return kind(
        model=model,
        optimizer=lambda: keras.optimizers.SGD(1.0),
        strategy=mirrored(replicas) if replicas > 1 else "default",
        verbose=False,
        **losses,
        **arguments,
    )


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [Trainer, OwnWeights])
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(("replicas", "microbatches"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_a_step_moves_as_a_plain_loop(mirrored, replicas, microbatches, name, kind):
    """L8: the step, its loss and the evaluated loss, however the batch is divided."""
    weights = WEIGHTS[name]
    expected, loss = plain_step(weights)
    trainer = trainer_of(mirrored, replicas, kind, num_microbatches=microbatches)
    evaluated = trainer.evaluate((X, Y, weights), global_batch=9)["loss"]
    [report] = attempt(trainer, [(X, Y, weights)])

    assert float(report.loss) == pytest.approx(loss, abs=1e-6)
    assert evaluated == pytest.approx(loss, abs=1e-6)
    for ours, theirs in zip(trainer.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "weights", [OF_EXAMPLES["sum 0"], np.int32([-1, 2, -3, 0, 1, 1, -1, 2, -1])]
)
def test_metrics_weight_by_magnitudes(mirrored, weights):
    """An accuracy stays between 0 and 1; each output's loss is the loss."""
    correct = np.argmax(model()(X), -1) == Y
    expected = np.average(correct.mean(1), weights=np.abs(weights))
    trainer = trainer_of(mirrored, 2, metrics=["accuracy"])
    assert trainer.evaluate((X, Y, weights), global_batch=9)["accuracy"] == pytest.approx(expected)

    one = keras.Input([3])
    outputs = {name: keras.layers.Dense(1, name=name)(one) for name in "ab"}
    several = Trainer(
        model=lambda: keras.Model(one, outputs),
        optimizer="sgd",
        loss_fn=dict.fromkeys("ab", "mse"),
        verbose=False,
    )
    labels = {name: Y[:, :1].astype("float32") for name in "ab"}
    found = several.evaluate((X[:, 0], labels, weights), global_batch=9)
    assert found["loss"] == pytest.approx(found["a_loss"] + found["b_loss"], rel=1e-5)
    [report] = attempt(several, [(X[:, 0], labels, weights)])
    assert report.loss == pytest.approx(found["loss"], rel=1e-5)
