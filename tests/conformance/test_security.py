"""What docs/security.md says of files that somebody else has written."""

import pathlib
import re

import keras
import numpy as np
import pytest

from trainer import Checkpoints, Trainer

ROOT = pathlib.Path(__file__).parents[2]
ONES = np.ones([4, 3], np.float32)


def dense():
    """A layer of the same name in both models."""
    return keras.layers.Dense(1, name="dense")


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # in Keras itself
def test_only_the_weights_of_a_keras_file_are_read(tmp_path):
    """A Lambda layer in a file for `init_from` does not run; the weights beside it are loaded."""
    mark, path = tmp_path / "mark", tmp_path / "model.keras"

    def leave_a_mark(inputs):
        mark.touch()
        return inputs

    model = keras.Sequential([keras.Input([3]), keras.layers.Lambda(leave_a_mark), dense()])
    model.save(path)
    assert mark.exists()
    mark.unlink()
    trainer = Trainer(
        model=lambda: keras.Sequential([keras.Input([3]), dense()]),
        optimizer=lambda: keras.optimizers.SGD(0.0),
        loss_fn="mse",
        checkpoints=Checkpoints(init_from=path),
        verbose=False,
    )
    trainer.train((ONES, ONES[:, :1]), steps=1, global_batch=4)

    np.testing.assert_array_equal(trainer.model.get_weights()[0], model.get_weights()[0])
    assert not mark.exists()


def test_the_tests_that_the_page_names_exist():
    """Each claim of the page names a test file."""
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs" / "security.md").read_text())

    assert len(named) >= 5
    assert [name for name in named if not (ROOT / name).exists()] == []
