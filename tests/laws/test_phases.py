"""Programs that call `train` several times, with other data or settings each time."""

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import all_copies, assert_same_bits

from trainer import Callback, Checkpoints, Divergence, Monitoring, Trainer
from trainer.callbacks import KerasCallbacks

X = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
Y = 3 * X + 1
FEW, ALL = (X[:32], Y[:32]), (X, Y)


class StopsAt(Callback):
    """Stops the run at a step, and lowers the learning rate at another."""

    def __init__(self, step):
        """Stores the step; None never stops."""
        self.step = step

    def on_loop_end(self, step):
        """Does so."""
        if step == 12:
            self.trainer.optimizer.learning_rate = self.trainer.optimizer.learning_rate * 0.5
        if step == self.step:
            self.trainer.stop()


def line(model_dir, callbacks=(), **arguments):
    """Returns a trainer of a line, behind a layer that can be frozen."""

    def model():
        layers = [keras.layers.Dense(2, name="base"), keras.layers.Dense(1, name="head")]
        return keras.Sequential([keras.Input([1]), *layers], name="line")

    return Trainer(
        model=model,
        optimizer=lambda: keras.optimizers.Adam(0.01),
        loss_fn="mse",
        model_dir=model_dir,
        callbacks=callbacks,
        checkpoints=Checkpoints(interval=5),
        steps_per_loop=1,
        log_interval=4,
        seed=1,
        verbose=False,
        **arguments,
    )


def shuffled(examples):
    """Returns a shuffled pipeline."""
    arrays = tf.data.Dataset.from_tensor_slices((X[:examples], Y[:examples]))
    return arrays.shuffle(64, seed=1).batch(16)


def other_arrays(_, train):
    """Half of the examples first."""
    train(FEW, 10, global_batch=16)
    train(ALL, 20, global_batch=16)


def other_pipeline(_, train):
    """The same, by pipelines of one structure."""
    train(shuffled(32), 10)
    train(shuffled(64), 20)


def other_order(_, train):
    """The same examples in another object: they are read from the beginning."""
    train(ALL, 10, global_batch=16)
    train((X.copy(), Y.copy()), 20, global_batch=16)


def smaller_batches(_, train):
    """Smaller batches in the second phase."""
    train(ALL, 10, global_batch=16)
    train(ALL, 20, global_batch=8)


def other_rate(trainer, train):
    """A learning rate is assigned, and the callback lowers it after that."""
    train(ALL, 10, global_batch=16)
    trainer.optimizer.learning_rate = 0.05
    train(ALL, 20, global_batch=16)


def schedule(trainer, train):
    """A schedule replaces the learning rate."""
    trainer.callbacks.clear()
    train(ALL, 10, global_batch=16)
    trainer.optimizer.learning_rate = keras.optimizers.schedules.CosineDecay(0.05, 20)
    train(ALL, 20, global_batch=16)


def unfrozen(trainer, train):
    """A layer is frozen at first, and its weights are set before the second phase."""
    trainer.model.get_layer("base").trainable = False
    train(FEW, 10, global_batch=16)
    trainer.model.get_layer("base").trainable = True
    trainer.model.get_layer("base").set_weights([np.ones([1, 2]), np.ones([2])])
    train(ALL, 20, global_batch=16)


def epochs(_, train):
    """Passes over data of two lengths, three phases."""
    train(FEW, epochs=5, global_batch=16)
    train(ALL, epochs=7, global_batch=16)
    train(FEW, epochs=8, global_batch=16)


def finish(program, model_dir, stop_at=None):
    """Runs a program, which ends where it is stopped; returns its trainer."""
    trainer = line(model_dir, [StopsAt(stop_at)])

    def train(*arguments, **settings):
        if not trainer.stop_asked:
            trainer.train(*arguments, **settings)

    program(trainer, train)
    return trainer


PROGRAMS = [
    other_arrays,
    other_pipeline,
    other_order,
    smaller_batches,
    other_rate,
    schedule,
    unfrozen,
    epochs,
]


def tier(program, stop_at):
    """Returns the marker of a case: the last phase of one program in CI, the others by night."""
    in_ci = stop_at == 13 and program is epochs
    return pytest.mark.thorough if in_ci else pytest.mark.slow


@pytest.mark.parametrize(
    ("program", "stop_at"),
    [
        pytest.param(program, stop_at, marks=tier(program, stop_at))
        for program in PROGRAMS
        for stop_at in (7, 10, 13, 19)
    ],
)
def test_a_program_of_several_phases_is_resumed_in_each(program, stop_at, tmp_path):
    """Stopped in any phase and started again, it ends with the bits of a run without a stop."""
    whole = finish(program, tmp_path / "whole")
    if program is schedule:  # it has no callback that could stop it
        killed = line(tmp_path / "stopped")
        program(killed, lambda data, steps, **rest: killed.train(data, min(steps, stop_at), **rest))
    else:
        finish(program, tmp_path / "stopped", stop_at)
    resumed = finish(program, tmp_path / "stopped")

    assert resumed.totals == whole.totals
    assert_same_bits(all_copies(resumed), all_copies(whole))


@pytest.mark.slow
def test_a_phase_that_is_repeated_leaves_no_trace(tmp_path):
    """A call whose steps have all been taken saves nothing and logs nothing, and the interval that
    the checkpoint is in is logged as a whole. The next call logs the settings.
    """
    finish(other_arrays, tmp_path / "stopped", 13)
    resumed, log = line(tmp_path / "stopped"), tmp_path / "stopped" / "metrics.jsonl"
    before = log.read_text()
    assert resumed.train(FEW, 10, global_batch=16).steps_run == 0
    assert log.read_text() == before
    assert before.count('"split": "run"') == 1
    assert list(access.folder.committed(tmp_path / "stopped", "ckpt")) == [5, 10, 13]
    history = resumed.train(ALL, 20, global_batch=16).history
    assert log.read_text().count('"split": "run"') == 2
    whole = finish(other_arrays, tmp_path / "whole").train(ALL, 20, global_batch=16).history

    assert list(history["step"]) == list(whole["step"])
    np.testing.assert_array_equal(history["loss"], whole["loss"])


@pytest.mark.thorough
def test_a_phase_that_is_repeated_calls_no_hook_of_its_beginning(tmp_path):
    """A Keras callback would begin its file anew, before it is told of the checkpoint."""
    made = [StopsAt(13), KerasCallbacks([keras.callbacks.CSVLogger(tmp_path / "log.csv")])]
    trainer = line(tmp_path / "run", made)
    trainer.train(FEW, 10, global_batch=16)
    trainer.train(ALL, 20, global_batch=16)
    before = (tmp_path / "log.csv").read_text()
    made = [KerasCallbacks([keras.callbacks.CSVLogger(tmp_path / "log.csv")])]
    resumed = line(tmp_path / "run", made)
    resumed.train(FEW, 10, global_batch=16)
    assert (tmp_path / "log.csv").read_text() == before
    resumed.train(ALL, 20, global_batch=16)

    rows = (tmp_path / "log.csv").read_text().splitlines()[1:]
    assert [int(row.partition(",")[0]) for row in rows] == [0, 1, 2, 3, 4, 5, 6]


class Epochs(keras.callbacks.Callback):
    """Lists where epochs begin and end."""

    def __init__(self):
        """Has seen none."""
        super().__init__()
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        """Lists one."""
        self.seen = [*self.seen, epoch]

    def on_epoch_end(self, epoch, logs=None):
        """Lists one, with whether it was evaluated."""
        self.seen = [*self.seen, -epoch, "val_loss" in logs]


class Steps(Callback):
    """Lists the steps at which epochs end."""

    def __init__(self):
        """Has seen none."""
        self.seen = []

    def on_epoch_end(self, epoch):
        """Lists one."""
        self.seen.append((epoch, self.trainer.totals.attempted))


@pytest.mark.thorough
def test_epochs_end_where_passes_over_the_data_end():
    """With data of another length, too, and after a phase that ended within a pass; and a target in
    epochs counts the passes over all data.
    """
    steps, keras_epochs = Steps(), Epochs()
    trainer = line(None, [steps, KerasCallbacks([keras_epochs])])
    held_out = {"eval_data": FEW, "global_batch": 16}
    trainer.train(ALL, 6, **held_out)  # one pass and a half
    assert trainer.train(FEW, epochs=3, **held_out).step == 10  # two passes more, of two steps
    assert trainer.train(ALL, epochs=3, **held_out).steps_run == 0
    assert trainer.train(ALL, epochs=4, **held_out).step == 14

    assert steps.seen == [(1, 4), (2, 8), (3, 10), (4, 14)]
    passes = [[0, 0, True], [1], [1, -1, True], [2, -2, True], [3, -3, True]]
    assert keras_epochs.seen == [each for one in passes for each in one]


@pytest.mark.thorough
def test_a_rollback_into_an_earlier_phase_begins_the_data_anew(tmp_path):
    """The checkpoint before the divergence holds the position in other data."""

    class Bursts(Callback):
        def on_loop_begin(self, step):
            if step == 11 and not self.trainer.recovered:
                self.trainer.optimizer.learning_rate = 1e3

        def on_recovery(self, step, restored):
            self.trainer.recovered.append(restored)

    trainer = line(
        tmp_path, [Bursts()], monitoring=Monitoring(divergence=Divergence(loss_above=1e3))
    )
    trainer.recovered = []
    trainer.train(FEW, 10, global_batch=16)
    seen = []
    trainer.on_loop_end = lambda _: seen.append(access.current_position(trainer).taken)
    trainer.train(ALL, 16, global_batch=8)

    assert trainer.recovered == [10]
    assert seen[-6:] == [1, 2, 3, 4, 5, 6]
