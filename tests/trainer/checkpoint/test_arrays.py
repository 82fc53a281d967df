"""States with NumPy arrays, which checkpoints save in a file of their own."""

import json

import ml_dtypes
import numpy as np
import pytest

from trainer.checkpoint.arrays import joined, read_arrays, split, write_arrays


def test_a_state_comes_back_from_its_files(tmp_path):
    """Numbers keep their values and arrays their bits, dtypes and shapes, bfloat16 included."""
    weights = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array(0.5, ml_dtypes.bfloat16),
        np.zeros([0, 2], np.int64),
    ]
    arrays = {}
    state = split({"best": np.float32(0.25), "wait": 3, "name": None, "weights": weights}, arrays)
    write_arrays(str(tmp_path), arrays)
    found = joined(json.loads(json.dumps(state)), read_arrays(tmp_path))

    for here, there in zip(found.pop("weights"), weights, strict=True):
        assert (here.dtype, here.shape, here.tobytes()) == (
            there.dtype,
            there.shape,
            there.tobytes(),
        )
    assert found == {"best": 0.25, "wait": 3, "name": None}


def test_a_state_without_arrays_has_no_file(tmp_path):
    """Nothing is written, and nothing is read."""
    write_arrays(str(tmp_path), {})

    assert not list(tmp_path.iterdir())
    assert read_arrays(tmp_path) == {}


def test_what_json_does_not_know_is_an_error():
    """A checkpoint is not begun with a state that it cannot hold."""
    with pytest.raises(TypeError, match="`state_dict`"):
        split({"seen": [{1, 2}]}, {})
