"""The position in data that Python makes: what is refused on resume, and what is said."""

import json

import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes

from trainer import Checkpoints, Monitoring
from trainer.data.batches import batches
from trainer.data.source_position import decode, encode, position_in

GENERATOR = np.random.default_rng(0)


def random_batches():
    """Yields other batches each time."""
    for _ in range(9):
        yield GENERATOR.standard_normal([2, 3]).astype(np.float32)


def stopped(data, folder, resume_mode="exact"):
    """A position in new data, and its checkpoint's folder, after two batches."""
    position = position_in(batches(data, "train_data", tf.distribute.get_strategy()), resume_mode)
    position.check_savable()
    for _ in range(2):
        next(position.iterator)
    position.taken = 2
    position.write(str(folder))
    return position


@pytest.mark.thorough
def test_a_generator_cannot_be_resumed(tmp_path, caplog):
    """It is said at the start and refused on resume; a new one may be skipped."""

    def train(data, steps, **arguments):
        trainer = Linear(
            model_dir=tmp_path,
            verbose=False,
            monitoring=Monitoring(check_gradients=False),
            **arguments,
        )
        trainer.train(data, steps=steps)
        return trainer.weight

    def generate():
        yield from (slopes(slope, slope) for slope in (1, 2, 4, 8))

    train(generate(), 2)
    assert "`train_data` (generator) can be read only once" in caplog.text
    with pytest.raises(ValueError, match="`train_data` must be readable again"):
        train(generate(), 3)
    assert train(generate(), 3, checkpoints=Checkpoints(data_resume="skip")) == 1 - (1 + 2 + 4)


def test_other_batches_are_refused(tmp_path, caplog):
    """A generator function that yields other batches each time is noticed on resume."""
    position = stopped(random_batches, tmp_path)
    assert "The position in `train_data` (generator function) cannot be saved" in caplog.text
    with pytest.raises(ValueError, match="`train_data`"):
        position.read(tmp_path, 2)


def test_a_list_of_other_batches_is_said(tmp_path, caplog):
    """What is found by index goes on there, and a warning says that the batch is another."""
    data = [(batch,) for batch in random_batches()]
    stopped(data, tmp_path)
    (tmp_path / "other").mkdir()
    other = stopped([(batch,) for batch in random_batches()], tmp_path / "other")
    other.read(tmp_path, 2)

    assert "Batch 3 of the list of batches is not the batch that came next" in caplog.text


def test_a_state_that_json_cannot_hold(tmp_path):
    """Objects are refused, because reading them could run code."""

    class Data:
        """Batches with such a state."""

        def __iter__(self):
            """The batches."""
            return iter([np.ones([2, 1], np.float32)] * 3)

        def state_dict(self):
            """A state that holds an object."""
            return {"at": object()}

        def load_state_dict(self, state):
            """Does nothing."""

    with pytest.raises(TypeError, match="`train_data` must have a state of plain values"):
        stopped(Data(), tmp_path)


def test_what_is_written_is_read():
    """Types, dtypes and shapes survive; a key need not be text."""
    state = {
        "at": (1, b"\x00\xff"),
        2: [None, 1.5, True, "text"],
        "array": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "__kind__": "bytes",
    }
    found = decode(json.loads(json.dumps(encode(state))))

    assert found.pop("array").tolist() == state.pop("array").tolist()
    assert found == state
    assert decode(json.loads(json.dumps(encode(np.float64(2))))) == 2.0


@pytest.mark.extras
def test_tensors_of_pytorch():
    """A generator's state is a tensor, and comes back as one."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    state = torch.Generator().manual_seed(3).get_state()

    assert torch.equal(decode(json.loads(json.dumps(encode(state)))), state)
