"""L18: what the flight recorder keeps, and what it removes."""

import json

import numpy as np
import pytest
import tensorflow as tf
from access import untuned
from helpers import Linear, slopes

from trainer import Skips
from trainer.replay.recorder import (
    bytes_in,
    copies_by_name,
    read_record,
    read_state,
    write_state,
)

ALTERNATING = slopes(1.0, np.inf)  # every second step is skipped


def run(model_dir, steps=8, **arguments):
    """Trains in batches of one example; returns the records."""
    settings = {"skips": Skips(max_records=2), "seed": 1, "verbose": False}
    data = untuned(tf.data.Dataset.from_tensor_slices(ALTERNATING).batch(1))
    Linear(model_dir=model_dir, **settings | arguments).train(data, steps=steps)
    return sorted((model_dir / "overflows").iterdir())


def names(records):
    """The names of some records."""
    return [path.name for path in records]


@pytest.mark.thorough
def test_a_record_holds_the_batch_the_state_and_the_report(tmp_path):
    """The batch and the weights are those of the skipped step, and `record.json` is plain JSON."""
    [path] = run(tmp_path, steps=2)
    record, dataset, state = read_record(path)
    [batch] = dataset

    assert sorted(names(path.iterdir())) == ["batch", "record.json", "state.npz"]
    assert json.loads((path / "record.json").read_text())["step"] == record.step == 2
    assert (record.loss_scale, record.in_float32, record.random_seed) == (1.0, False, 1)
    assert record.setting["precision"] == "float32"
    assert dataset.element_spec["slope"].shape.as_list() == [None]
    assert batch["slope"].numpy().tolist() == [np.inf]
    assert [array.tolist() for array in state.values()] == [[[0.0]]]


@pytest.mark.thorough
def test_only_the_first_of_consecutive_skips_is_recorded(tmp_path, caplog):
    """And a record that would be larger than `max_record_bytes` is not: a warning says so."""
    arguments = {"model_dir": tmp_path / "run", "verbose": False, "skips": Skips(max_records=9)}
    trainer = Linear(**arguments)
    trainer.train(slopes(np.inf, 1.0), steps=5, global_batch=2)
    assert [path.name for path in (tmp_path / "run" / "overflows").iterdir()] == ["step-00000001"]

    small = Linear(
        **arguments
        | {"model_dir": tmp_path / "small", "skips": Skips(max_records=9, max_record_bytes=8)}
    )
    small.train(slopes(np.inf, 1.0), steps=5, global_batch=2)
    assert not (tmp_path / "small" / "overflows").exists()
    assert "max_record_bytes" in caplog.text


@pytest.mark.thorough
def test_the_oldest_records_are_removed(tmp_path):
    """All records together stay within `max_records` and `max_record_bytes`."""
    records = run(tmp_path / "a")
    size = bytes_in(records[:1])
    kept = run(tmp_path / "b", skips=Skips(max_records=2, max_record_bytes=int(1.5 * size)))

    assert names(records) == ["step-00000006", "step-00000008"]
    assert names(kept) == ["step-00000008"]


def test_a_record_holds_no_code(tmp_path):
    """Nothing in a record is a pickle, and arrays of objects are refused when it is read."""
    [path] = run(tmp_path, steps=2)
    np.savez(path / "state.npz", **{"0/0": np.array([{}], dtype=object)})
    with pytest.raises(ValueError, match="`overflow`"):
        read_record(path)


def test_a_state_is_written_back_to_the_same_variables_only(tmp_path):
    """Values come back bit for bit, also those of bfloat16, which NumPy's files do not know; another
    number of variables, or another shape, is refused.
    """
    strategy = tf.distribute.get_strategy()
    half = tf.Variable([1.5, -2.0], dtype=tf.bfloat16)
    variables = [tf.Variable([0.1, 0.2]), tf.Variable(3), half]
    np.savez(tmp_path / "state.npz", **read_state(variables, strategy))
    for variable in variables:
        variable.assign(tf.zeros_like(variable))
    with np.load(tmp_path / "state.npz") as found:
        state = dict(found)
    write_state(variables, state, strategy)

    assert list(copies_by_name(variables, strategy)) == list(state) == ["0/0", "1/0", "2/0"]
    assert variables[0].numpy().tobytes() == np.float32([0.1, 0.2]).tobytes()
    assert variables[1].numpy() == 3
    assert tf.cast(half, tf.float32).numpy().tolist() == [1.5, -2.0]
    with pytest.raises(ValueError, match=r"`overflow`.*'1/0'"):
        write_state([variables[0], tf.Variable([3]), half], state, strategy)
