"""The file of Keras's `CSVLogger` when a run goes back to a checkpoint."""

import shutil

import keras
import numpy as np
import pytest
from helpers import linear_model

from trainer import Action, Checkpoints, Divergence, Monitoring, Trainer
from trainer.callbacks import KerasCallbacks
from trainer.callbacks.csv_rows import take_back_rows

# Keras leaves the file to be collected if a run ends with an error, or is rolled back.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

X = np.arange(1, 9, dtype=np.float32)[:, None] / 8


def make(folder, **arguments):
    """A trainer that saves every fifth step and logs to `log.csv`; an epoch has two steps."""
    return Trainer(
        model=linear_model,
        optimizer=lambda: keras.optimizers.SGD(0.1),
        loss_fn="mse",
        model_dir=folder / "run",
        callbacks=[KerasCallbacks([keras.callbacks.CSVLogger(folder / "log.csv")])],
        checkpoints=Checkpoints(interval=5),
        seed=0,
        verbose=False,
        **arguments,
    )


def epochs_in(folder):
    """The numbers of the epochs in the file."""
    return [line.split(",")[0] for line in (folder / "log.csv").read_text().splitlines()]


def test_a_run_that_was_cut_off_has_each_epoch_once(tmp_path):
    """The rows of epochs behind the checkpoint are those of the resumed run, to the last digit."""

    def fail(trainer):
        if trainer.totals.attempted == 9:
            raise KeyError("cut off")

    (tmp_path / "whole").mkdir()
    make(tmp_path / "whole").train((X, X), epochs=5, global_batch=4)
    with pytest.raises(KeyError):
        make(tmp_path, callbacks=[Action(fail, every_steps=1)]).train(
            (X, X), epochs=5, global_batch=4
        )
    shutil.rmtree(tmp_path / "run" / "ckpt-9")  # as if the process had been killed
    assert epochs_in(tmp_path) == ["epoch", "0", "1", "2", "3"]
    make(tmp_path).train((X, X), epochs=5, global_batch=4)

    assert epochs_in(tmp_path) == ["epoch", "0", "1", "2", "3", "4"]
    assert (tmp_path / "log.csv").read_text() == (tmp_path / "whole" / "log.csv").read_text()


def test_a_run_that_is_rolled_back_has_each_epoch_once(tmp_path):
    """Rows of the epochs that are trained again are taken back while the file is open."""
    done = []

    def spoil(trainer):
        if trainer.totals.attempted == 8 and not done:
            done.append(8)
            trainer.model.set_weights([weight + 1000 for weight in trainer.model.get_weights()])

    trainer = make(
        tmp_path,
        callbacks=[Action(spoil, every_steps=1)],
        monitoring=Monitoring(divergence=Divergence(loss_above=50.0)),
        steps_per_loop=1,
    )
    trainer.train((X, X), epochs=7, global_batch=4)

    numbers = epochs_in(tmp_path)[1:]
    assert done
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    ("rows", "epochs", "left"),
    [
        ("0 1 2 3", 2, "0 1"),
        ("0 1 2 3", 4, "0 1 2 3"),
        ("0 1 2 3 0 1 2", 2, "0 1 2 3 0 1"),  # an earlier run's rows stay
        ("0 1 2 3 0 1 2", 0, "0 1 2 3"),
        ("", 0, ""),
    ],
)
def test_only_rows_at_the_end_are_taken_back(tmp_path, rows, epochs, left):
    """Those of this run, from the epoch on that it goes back to."""
    path = tmp_path / "log.csv"

    def text(numbers):
        return "epoch;loss\n" + "".join(f'{number};"[1, 2]"\n' for number in numbers.split())

    path.write_text(text(rows))
    take_back_rows(keras.callbacks.CSVLogger(path, separator=";"), epochs)
    assert path.read_text() == text(left)


def test_a_file_that_is_not_there_is_not_made(tmp_path):
    """Nothing has been logged so far."""
    take_back_rows(keras.callbacks.CSVLogger(tmp_path / "log.csv"), 0)
    assert not [*tmp_path.iterdir()]
