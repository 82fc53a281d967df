"""Prediction: one row per example, in order, on any number of replicas."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Action, Trainer

pytestmark = pytest.mark.sampled

X = np.random.default_rng(0).standard_normal([11, 5]).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 11)


def classifier(**arguments):
    """A classifier of five features into three classes."""
    return Trainer(
        model=lambda: keras.Sequential([keras.Input([5]), keras.layers.Dense(3)]),
        optimizer="sgd",
        loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        verbose=False,
        **arguments,
    )


@pytest.mark.parametrize("replicas", [1, 3])
def test_dropout_in_prediction_draws_anew(mirrored, replicas):
    """Monte Carlo dropout draws other masks in every replica, batch and call, and the same program
    draws the same masks again.
    """

    class MonteCarlo(Trainer):
        def predict_batch(self, batch):
            return self.model(batch, training=True)

    def trainer():
        return MonteCarlo(
            model=lambda: keras.Sequential(
                [keras.Input([64]), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
            ),
            optimizer="sgd",
            loss_fn="mse",
            seed=3,
            verbose=False,
            strategy=mirrored(replicas) if replicas > 1 else "default",
        )

    first, second = trainer(), trainer()
    x = np.ones([2 * replicas, 64], np.float32)
    draws = [first.predict(x, global_batch=replicas) for _ in range(2)]

    assert len(np.unique(draws)) == 4 * replicas
    for draw in draws:
        np.testing.assert_array_equal(second.predict(x, global_batch=replicas), draw)
    first.model.layers[-1].trainable = False  # the parts are made again
    third = first.predict(x, global_batch=replicas)
    assert len(np.unique([*draws, third])) == 6 * replicas


def test_a_prediction_needs_neither_optimizer_nor_loss(tmp_path):
    """L21: a trainer of a model alone predicts from a checkpoint; training asks for the rest."""
    first = classifier(model_dir=tmp_path)
    first.train((X, Y), steps=2, global_batch=11)
    model = lambda: keras.Sequential([keras.Input([5]), keras.layers.Dense(3)])  # noqa: E731
    second = Trainer(model=model, model_dir=tmp_path, verbose=False)
    expected = first.predict(X, global_batch=11)

    np.testing.assert_array_equal(second.predict(X, global_batch=11), expected)
    assert second.totals.attempted == 2
    with pytest.raises(ValueError, match="`optimizer` must be given"):
        second.train((X, Y), steps=3, global_batch=11)


@pytest.mark.parametrize(
    "result",
    [
        lambda outputs: tf.reduce_mean(outputs, axis=0),
        tf.reduce_mean,
        lambda outputs: {"a": outputs, "b": None},
    ],
    ids=["mean", "scalar", "none"],
)
def test_predictions_have_one_row_for_each_example(result):
    """Rows of replicas and batches are joined, so a mean over a batch would pass for a prediction."""
    trainer = classifier()
    trainer.predict_batch = lambda x: result(trainer.model(x))
    with pytest.raises(ValueError, match="`predict_batch` must"):
        trainer.predict(X, global_batch=11)


def test_a_number_of_rows_that_is_known_late_is_checked():
    """Rows that are chosen by their values are missing in the result, which would go unnoticed."""
    trainer = classifier()
    trainer.predict_batch = lambda x: tf.boolean_mask(
        trainer.model(x), x[:, 0] > np.median(X[:, 0])
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="`predict_batch` must"):
        trainer.predict(X, global_batch=11)

    trainer = classifier()
    trainer.predict_batch = lambda x: tf.boolean_mask(trainer.model(x), x[:, 0] < np.inf)
    assert len(trainer.predict(X, global_batch=4)) == len(X)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_predictions_may_be_sparse(mirrored, replicas):
    """A model that returns a sparse tensor predicts one with the rows of all batches."""
    trainer = classifier(strategy=mirrored(replicas) if replicas > 1 else "default")
    trainer.predict_batch = lambda x: tf.sparse.from_dense(tf.nn.relu(trainer.model(x)))
    found = trainer.predict(X, global_batch=4)
    assert found.shape == (len(X), 3)
    outputs = trainer.model(X).numpy()
    np.testing.assert_allclose(tf.sparse.to_dense(found), np.maximum(outputs, 0), rtol=1e-5)


class Doubling(tf.Module):
    """A weight that only training moves; it computes in evaluation exactly as in training."""

    def __init__(self):
        """Begins with 2."""
        super().__init__()
        self.factor = tf.Variable(2.0)

    def __call__(self, x):
        """Multiplies."""
        return self.factor * x


def test_a_module_predicts_as_it_trains():
    """Without Keras there are no layers whose precision could change."""
    trainer = Trainer(model=Doubling, optimizer="sgd", loss_fn="mse", verbose=False)

    np.testing.assert_array_equal(trainer.predict(X, global_batch=4), 2 * X)


@pytest.mark.thorough
def test_a_prediction_in_another_thread_undoes_no_step():
    """It begins before a step of `train` and ends after ten others: nothing is restored."""
    x = np.ones([4, 1], np.float32)
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        yield x
        yield x  # the first two are read before the prediction begins
        begun.set()
        assert go_on.wait(30)
        yield x

    def trained(*actions):
        trainer = Trainer(
            model=Doubling,
            optimizer=lambda: keras.optimizers.SGD(0.01),
            loss_fn="mse",
            steps_per_loop=1,
            callbacks=actions,
            verbose=False,
        )
        trainer.predict(x, global_batch=4)
        trainer.train((x, 0 * x), steps=20, global_batch=4)
        return trainer.model.factor.numpy()

    threads = []

    def start(trainer):
        if not threads:
            threads.append(threading.Thread(target=lambda: trainer.predict(slow)))
            threads[0].start()
            assert begun.wait(30)

    def end(_):
        go_on.set()
        threads[0].join(30)

    actions = Action(start, every_steps=5), Action(end, every_steps=15)
    assert trained(*actions) == trained()
    assert not threads[0].is_alive()
