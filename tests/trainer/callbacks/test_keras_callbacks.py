"""KerasCallbacks: Keras's own and users' callbacks, with the calls and the logs of `fit`."""

import csv
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import linear_model, needs_multi_optimizer

from trainer import Trainer, Updates
from trainer.callbacks import KerasCallbacks
from trainer.callbacks.keras_callbacks import REFUSED

# Keras 3.15 converts variables in a way that NumPy 2 warns of, and leaves files to be collected.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

X = np.arange(1, 9, dtype=np.float32)[:, None] / 8
BATCHES = (X, 3 * X)


class Record(keras.callbacks.Callback):
    """Notes every call of fit, with its logs."""

    def __init__(self):
        """Has noted nothing."""
        super().__init__()
        self.calls = []

    def on_train_begin(self, logs=None):
        """Notes the call and the parameters."""
        self.calls.append(("train_begin", self.params["epochs"], self.params["steps"]))

    def on_epoch_begin(self, epoch, logs=None):
        """Notes the call."""
        self.calls.append(("epoch_begin", epoch))

    def on_train_batch_end(self, batch, logs=None):
        """Notes the call."""
        self.calls.append(("batch_end", batch, pytest.approx(logs, rel=1e-5)))

    def on_test_begin(self, logs=None):
        """Notes the call."""
        self.calls.append(("test_begin",))

    def on_test_end(self, logs=None):
        """Notes the call."""
        self.calls.append(("test_end",))

    def on_epoch_end(self, epoch, logs=None):
        """Notes the call."""
        self.calls.append(("epoch_end", epoch, pytest.approx(logs, rel=1e-5)))

    def on_train_end(self, logs=None):
        """Notes the call."""
        self.calls.append(("train_end",))


def make(callbacks, **arguments):
    """A trainer of one weight with Keras's callbacks, and one step per loop."""
    settings = {"steps_per_loop": 1, "verbose": False} | arguments
    return Trainer(
        model=linear_model,
        optimizer=lambda: keras.optimizers.SGD(0.5),
        loss_fn="mse",
        metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
        callbacks=[KerasCallbacks(callbacks)],
        **settings,
    )


def dataset():
    """Four batches of two examples, in order."""
    return tf.data.Dataset.from_tensor_slices(BATCHES).batch(2)


def train(trainer, epochs=3):
    """Trains with evaluations after each epoch."""
    return trainer.train(dataset(), epochs=epochs, eval_data=dataset())


def test_callbacks_get_the_calls_and_logs_of_fit():
    """The same calls in the same order with the same numbers, to the rounding of a mean."""
    with_keras, with_us = Record(), Record()
    model = linear_model()
    metrics = [keras.metrics.MeanAbsoluteError(name="error")]
    model.compile(keras.optimizers.SGD(0.5), loss="mse", metrics=metrics)
    model.fit(
        dataset(),
        validation_data=dataset(),
        epochs=3,
        callbacks=[with_keras],
        verbose=0,
        shuffle=False,
    )
    train(make([with_us]))

    def plain(calls):
        return [tuple(getattr(item, "expected", item) for item in call) for call in calls]

    assert with_us.calls == plain(with_keras.calls)


@pytest.mark.thorough  # takes seconds
def test_batch_hooks_come_once_per_loop():
    """With steps_per_loop=2 as with Keras's steps_per_execution=2: after every second batch."""
    record = Record()
    train(make([record], steps_per_loop=2), epochs=1)

    assert [call[1] for call in record.calls if call[0] == "batch_end"] == [1, 3]


class HalveAndStop(keras.callbacks.Callback):
    """Halves the learning rate after each epoch, and stops after two."""

    def __init__(self):
        """Has seen no epoch."""
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        """Acts through the model, as Keras's guide says."""
        self.seen.append(epoch)
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2
        if epoch == 1:
            self.model.stop_training = True


def test_a_callback_acts_through_the_model():
    """A learning rate that it assigns takes effect, `stop_training` ends the run, and the model
    has no optimizer afterwards.
    """
    trainer = make([HalveAndStop()])
    summary = train(trainer, epochs=5)

    assert summary.step == 8
    assert summary.history["learning_rate"].tolist() == [0.5, 0.25]
    assert float(trainer.optimizer.learning_rate) == 0.125
    assert not hasattr(trainer.model, "optimizer") or trainer.model.optimizer is None


# How to make one of each public class of keras.callbacks that can work.
WORKING = {
    "CSVLogger": lambda folder: keras.callbacks.CSVLogger(folder / "log.csv"),
    "Callback": lambda _: keras.callbacks.Callback(),
    "EarlyStopping": lambda _: keras.callbacks.EarlyStopping(patience=1, min_delta=9.0),
    "History": lambda _: keras.callbacks.History(),
    "LambdaCallback": lambda _: keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: None),
    "LearningRateScheduler": lambda _: keras.callbacks.LearningRateScheduler(
        lambda _, rate: rate / 2
    ),
    "ModelCheckpoint": lambda folder: keras.callbacks.ModelCheckpoint(folder / "model.keras"),
    "ProgbarLogger": lambda _: keras.callbacks.ProgbarLogger(),
    "ReduceLROnPlateau": lambda _: keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=9.0),
    "RemoteMonitor": lambda _: keras.callbacks.RemoteMonitor("http://localhost:9"),
    "TensorBoard": lambda folder: keras.callbacks.TensorBoard(folder, histogram_freq=1),
}


def test_every_class_of_keras_is_known():
    """A class that a new version of Keras adds needs a line in one of the tables."""
    found = {name for name, value in vars(keras.callbacks).items() if inspect.isclass(value)}

    assert found <= WORKING.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_of_keras_that_cannot_work_is_refused(name):
    """When it is passed."""
    kind = getattr(keras.callbacks, name, None)
    if kind is None:
        pytest.skip(f"this version of Keras has no {name}")
    with pytest.raises(ValueError, match="`callbacks`"):
        KerasCallbacks([kind.__new__(kind)])


@pytest.mark.thorough
@pytest.mark.parametrize("name", WORKING)
@pytest.mark.filterwarnings("ignore::UserWarning")  # RemoteMonitor finds no server
def test_a_class_of_keras_works(name, tmp_path):
    """It does its work: it ends the run or lowers the rate, writes its file, or leaves the run alone."""
    if name == "TensorBoard":
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    callback = WORKING[name](tmp_path)
    trainer = make([callback], steps_per_loop=4, jit_compile=False)
    train(trainer)

    assert trainer.totals.applied == (8 if name == "EarlyStopping" else 12)
    rates = {"LearningRateScheduler": 0.0625, "ReduceLROnPlateau": 0.005}
    assert float(trainer.optimizer.learning_rate) == pytest.approx(rates.get(name, 0.5))
    if name == "History":
        assert callback.epoch == [0, 1, 2]
        assert sorted(callback.history) == ["error", "loss", "val_error", "val_loss"]
    elif name == "CSVLogger":
        rows = csv.DictReader((tmp_path / "log.csv").read_text().splitlines())
        assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    elif name == "ModelCheckpoint":
        saved = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_array_equal(saved.get_weights()[0], trainer.model.get_weights()[0])
    elif name == "TensorBoard":
        folders = {path.parent.name for path in tmp_path.rglob("events*")}
        assert folders == {"train", "validation"}


def test_what_could_never_work_is_an_error():
    """A hook that would never be called, and a number that the run does not have."""
    KerasCallbacks([keras.callbacks.ProgbarLogger()])  # Keras's own are left out without a word
    with pytest.raises(ValueError, match="on_test_batch_end"):
        KerasCallbacks([keras.callbacks.LambdaCallback(on_test_batch_end=print)])
    with pytest.raises(ValueError, match="`monitor` must be"):
        train(make([keras.callbacks.EarlyStopping("val_eror", mode="min")]))


def test_the_direction_of_an_accuracy_is_known():
    """Keras looks for the metric in a compiled model, which the trainer's is not."""

    def run(metric):
        callback = keras.callbacks.EarlyStopping(f"val_{metric}", patience=1)
        trainer = Trainer(
            model=linear_model,
            optimizer=lambda: keras.optimizers.SGD(0.5),
            loss_fn="mse",
            metrics=lambda: {metric: keras.metrics.MeanAbsoluteError()},
            callbacks=[KerasCallbacks([callback])],
            verbose=False,
        )
        train(trainer, epochs=1)
        return callback

    assert run("accuracy").mode == "max"
    with pytest.raises(ValueError, match="`mode`"):
        run("quality")


@pytest.mark.thorough
def test_an_evaluation_that_was_stopped_belongs_to_its_epoch(tmp_path):
    """L12: the epoch ends after the evaluation is repeated, so callbacks get its results and decide as in
    a run that was not stopped.
    """

    class Stops(keras.callbacks.Callback):
        """Stops the trainer in one evaluation."""

        trainer, number = None, 0

        def on_test_begin(self, logs=None):
            """Counts."""
            self.number += 1
            if self.trainer and self.number == 2:
                self.trainer.stop()

    def run(folder, *, stopped):
        stops = Stops()
        early = keras.callbacks.EarlyStopping("val_loss", patience=2, min_delta=9.0)
        log = keras.callbacks.CSVLogger(tmp_path / f"{folder}.csv")
        trainer = make([stops, early, log], model_dir=tmp_path / folder, seed=0)
        stops.trainer = trainer if stopped else None
        return train(trainer, 8).step

    whole = run("whole", stopped=False)
    assert run("stopped", stopped=True) < whole
    assert run("stopped", stopped=False) == whole
    rows = [(tmp_path / f"{name}.csv").read_text() for name in ("whole", "stopped")]
    assert rows[0] == rows[1]


def best_checkpoint(monitor):
    """A callback that saves the best model."""
    return keras.callbacks.ModelCheckpoint("best.keras", monitor=monitor, save_best_only=True)


def best_weights(monitor):
    """A callback that restores the best weights."""
    return keras.callbacks.EarlyStopping(monitor, restore_best_weights=True)


@pytest.mark.parametrize("make_one", [best_checkpoint, best_weights])
def test_the_best_weights_of_a_run_with_an_average_are_not_those_evaluated(make_one):
    """An evaluation uses the average, and the callbacks would keep the weights themselves."""
    trainer = make([make_one("val_loss")], updates=Updates(ema_momentum=0.9))
    with pytest.raises(ValueError, match="`callbacks`"):
        train(trainer)


@pytest.mark.parametrize(
    ("make_one", "monitor", "ema_momentum"),
    [
        (keras.callbacks.EarlyStopping, "val_loss", 0.9),
        (best_checkpoint, "loss", 0.9),
        (best_weights, "loss", 0.9),
        (best_weights, "val_loss", None),
    ],
)
def test_other_callbacks_may_watch_a_run_with_an_average(
    tmp_path, monkeypatch, make_one, monitor, ema_momentum
):
    """What keeps no weights, or the best of a training loss, keeps what it says."""
    monkeypatch.chdir(tmp_path)
    trainer = make([make_one(monitor)], updates=Updates(ema_momentum=ema_momentum))
    assert train(trainer, epochs=1).step == 4


@needs_multi_optimizer
def test_an_inner_optimizer_without_variables_averages_nothing():
    """The evaluation uses the averages of the others, so the callback is refused."""
    makes = {"nothing.*": keras.optimizers.Adam()}
    several = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(use_ema=True), makes)
    )
    trainer = make([best_weights("val_loss")])
    trainer.optimizer = several
    with pytest.raises(ValueError, match="`callbacks`"):
        train(trainer)
