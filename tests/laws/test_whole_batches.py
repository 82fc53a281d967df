"""With a global loss on one replica nothing is divided, so a batch may hold tensors of any shapes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Losses, Trainer

SIZES = [(10, [3, 5, 2]), (4, [4]), (7, [1, 6])]  # numbers of nodes, and of each graph's
random = np.random.default_rng(0)
BATCHES = [
    {
        "nodes": random.normal(size=[nodes, 3]).astype("float32"),
        "owner": np.repeat(np.arange(len(graphs)), graphs),
        "y": random.normal(size=len(graphs)).astype("float32"),
        "temperature": np.float32(0.5 + len(graphs)),
    }
    for nodes, graphs in SIZES
]
SPEC = {
    "nodes": tf.TensorSpec([None, 3]),
    "owner": tf.TensorSpec([None], tf.int64),
    "y": tf.TensorSpec([None]),
    "temperature": tf.TensorSpec([]),
}


def model():
    """One number for each node."""
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(1, kernel_initializer="ones")])


def loss_of(model, batch):
    """The mean over graphs, and a prediction for each graph."""
    found = tf.math.segment_mean(model(batch["nodes"])[:, 0], batch["owner"])
    return tf.reduce_mean((found - batch["y"]) ** 2) / batch["temperature"], found


class Graphs(Trainer):
    """A regression of graphs: nodes, the graph of each node, a label for each graph, a scalar."""

    def build_metrics(self):
        """The mean absolute error."""
        return {"mae": keras.metrics.MeanAbsoluteError()}

    def compute_loss(self, batch, training):
        """One number, and a row for each graph."""
        return loss_of(self.model, {**batch, "nodes": self.all_gather(batch["nodes"])})

    def update_metrics(self, batch, aux):
        """Compares each graph."""
        self.metrics["mae"].update_state(batch["y"][:, None], aux[:, None])

    def predict_batch(self, batch):
        """A number for each graph."""
        return loss_of(self.model, batch)[1]


def graphs(**arguments):
    """A trainer with SGD."""
    return Graphs(
        model=model,
        optimizer=lambda: keras.optimizers.SGD(0.1),
        **{"losses": Losses(reduction="global"), "verbose": False} | arguments,
    )


def plain_weights():
    """The weights after a step with each batch, by a `GradientTape` alone."""
    plain = model()
    for batch in BATCHES:
        with tf.GradientTape() as tape:
            loss, _ = loss_of(plain, batch)
        for variable, gradient in zip(
            plain.trainable_variables,
            tape.gradient(loss, plain.trainable_variables),
            strict=True,
        ):
            variable.assign_sub(0.1 * gradient)
    return plain.get_weights()


def as_dataset():
    """The batches as a `tf.data` pipeline."""
    return tf.data.Dataset.from_generator(lambda: iter(BATCHES), output_signature=SPEC)


def one_by_one(trainer):
    """Passes the batches to `train_on_batch`."""
    for batch in BATCHES:
        trainer.train_on_batch(batch)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "train",
    [
        lambda trainer: trainer.train(BATCHES, steps=3),
        lambda trainer: trainer.train(as_dataset(), steps=3),
        one_by_one,
    ],
    ids=["list", "dataset", "one by one"],
)
def test_batches_of_graphs_train_as_in_a_plain_loop(train):
    """L8: nothing is required of the shapes, and the steps are those of a plain loop."""
    trainer = graphs()
    train(trainer)

    for ours, theirs in zip(trainer.model.get_weights(), plain_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_batches_of_graphs_are_evaluated_and_predicted():
    """A batch counts by the rows of its first tensor; metrics and predictions have a row per graph."""
    trainer, plain = graphs(), model()
    losses, found = zip(*(loss_of(plain, batch) for batch in BATCHES), strict=True)
    expected = np.average([float(loss) for loss in losses], weights=[n for n, _ in SIZES])
    labels = np.concatenate([batch["y"] for batch in BATCHES])
    results = trainer.evaluate(BATCHES)

    assert results["loss"] == pytest.approx(expected, rel=1e-5)
    assert results["mae"] == pytest.approx(np.abs(np.concatenate(found) - labels).mean(), rel=1e-5)
    np.testing.assert_allclose(trainer.predict(BATCHES), np.concatenate(found), rtol=1e-5)


def test_divided_batches_are_refused_by_the_names_of_their_entries(mirrored):
    """Where a loss has a share of the batch, rows must be examples."""
    two = graphs(strategy=mirrored(2), jit_compile=False)
    for trainer in (two, graphs(losses=Losses(reduction="mean"))):
        for data in (BATCHES, as_dataset()):
            with pytest.raises(ValueError, match=r"`train_data`.*'nodes': \(10, 3\).*'y': \(3,\)"):
                trainer.train(data, steps=3)
