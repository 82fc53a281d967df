"""What a checkpoint holds: how variables are found, described, compared and read, and states with
arrays. `tests/chaos/test_kills.py` kills jobs of several workers.
"""

import json

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from helpers import linear_model

import scaling
from trainer.base.tracking import copies_of
from trainer.checkpoint.contents import (
    ARRAYS,
    Contents,
    assign_own,
    comparable,
    describe,
    gathered,
    joined,
    others_with_variables,
    read_arrays,
    split,
    write_arrays,
)


def test_variables_are_described_by_name_dtype_and_shape():
    """Variables of Keras and of TensorFlow, of any dtype, also with an unknown shape."""
    described = describe(
        [
            linear_model(inputs=3).weights[0],
            tf.Variable([1j], name="complex"),
            tf.Variable("a", name="text"),
            tf.Variable([1.0], shape=tf.TensorShape(None), name="any"),
        ]
    )

    assert described[0].endswith("/kernel: float32 (3, 1)")
    assert described[1:] == [
        "complex:0: complex128 (1,)",
        "text:0: string ()",
        "any:0: float32 <unknown>",
    ]


def test_the_role_in_a_variables_name_is_compared():
    """L12: the last word of an optimizer's variable counts, but not the number that Keras adds."""
    lines = ["nadam/variable_12: float32 ()", "momentum:0: float32 (2,)", "a_velocity: int32 ()"]
    assert comparable({"model": lines, "optimizer": lines}) == {
        "model[0]": "float32 ()",
        "model[1]": "float32 (2,)",
        "model[2]": "int32 ()",
        "optimizer[0]": "variable: float32 ()",
        "optimizer[1]": "momentum: float32 (2,)",
        "optimizer[2]": "velocity: int32 ()",
    }


class Plain:
    """An object that TensorFlow cannot track."""

    def __init__(self, **attributes):
        """Stores the attributes."""
        vars(self).update(attributes)


def test_what_is_tracked_is_saved():
    """L12: variables, layers, metrics and generators of the trainer are found, in containers too; plain
    objects and closures are not searched.
    """
    layer = keras.layers.Dense(2)
    layer.build([None, 3])
    known, hidden = tf.Variable(1.0), tf.Variable(4.0)
    roots = {
        "plain": tf.Variable(2.0),
        "nested": {"b": [tf.Variable(3.0), 7], "a": (layer,)},
        "generator": tf.random.Generator.from_seed(1),
        "model": known,
        "text": "no variables",
        "empty": [],
        "function": lambda: hidden,
        "object": Plain(inside=hidden),
        "metric": keras.metrics.Sum(),
    }
    holder = others_with_variables(roots, {"known": known}, {})

    found = sorted(name for name in vars(holder) if not name.startswith("_"))
    assert found == ["generator_0", "metric.0", "nested_0", "nested_2", "plain_0"]
    assert holder.nested_2 is layer


def contents_of(model, metric, scaler):
    """The contents of a run with one model and one metric, on one replica."""
    return Contents({"model": model}, scaler, {"mean": metric}, tf.distribute.get_strategy())


def test_contents_are_read_back_bit_for_bit(tmp_path):
    """Copies and the scale are restored only if asked for."""
    model, metric = linear_model(), keras.metrics.Mean()
    scaler = scaling.LossScaler(scaling.DynamicLossScale(2.0**4))
    model.weights[0].assign([[0.1]])
    metric.update_state(0.3)
    contents_of(model, metric, scaler).write(str(tmp_path))
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {
        "copies",
        "scale",
        "variables",
    }

    other, other_metric = linear_model(), keras.metrics.Mean()
    other_scaler = scaling.LossScaler(scaling.DynamicLossScale(2.0**6))
    contents = contents_of(other, other_metric, other_scaler)
    contents.read(tmp_path, copies=False, scale=False)
    assert other.weights[0].numpy().tobytes() == model.weights[0].numpy().tobytes()
    assert float(other_metric.result()) == 0.0
    assert float(other_scaler.loss_scale.numpy()) == 2.0**6

    contents.read(tmp_path, copies=True, scale=True)
    assert float(other_metric.result()) == float(metric.result()) > 0.0
    assert float(other_scaler.loss_scale.numpy()) == 2.0**4
    assert contents.differing == describe(metric.variables)


def test_copies_of_several_workers_are_marked(monkeypatch, mirrored):
    """Where a worker has only its own copies, as with MultiWorkerMirroredStrategy, the checkpoint says
    so, in words that the next run compares.
    """
    monkeypatch.setattr(
        "trainer.checkpoint.contents.copies_of", lambda *arguments: [*copies_of(*arguments)][:1]
    )
    strategy = mirrored(2)
    with strategy.scope():
        metric, scaler = keras.metrics.Mean(), scaling.LossScaler(scaling.DynamicLossScale())
    on_workers = Contents({}, scaler, {"mean": metric}, strategy)

    assert on_workers.differing == ["kept: of each worker", *describe(metric.variables)]


# Values of which each bit counts: two NaNs that differ, -0.0, and the smallest number.
BITS = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 1], np.uint32).view(np.float32)


def variables_on(strategy):
    """Variables of several types, with another copy on each replica."""
    values = [
        *(BITS, np.float16([[1.5], [2.5], [-0.0]]), np.int64(-(2**40)), np.array([True, False])),
        np.float32(0.1),
    ]
    with strategy.scope():
        variables = [
            tf.Variable(value, synchronization=tf.VariableSynchronization.ON_READ, trainable=False)
            for value in values
        ]
    for variable, value in zip(variables, values, strict=True):
        for replica, copy in enumerate(strategy.experimental_local_results(variable)):
            copy.assign(np.roll(value, replica) if np.ndim(value) else value)
    return variables


def bits_of(variables, strategy):
    """The bytes of every copy."""
    copies = [strategy.experimental_local_results(variable) for variable in variables]
    return [[copy.numpy().tobytes() for copy in of_one] for of_one in copies]


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_bit_of_every_copy_is_kept(mirrored, replicas):
    """L12: the copies of all replicas are gathered with every bit, and each gets its own again."""
    strategy = mirrored(replicas)
    variables = variables_on(strategy)
    before = bits_of(variables, strategy)
    table = gathered(variables, strategy)
    of_replicas = [b"".join(copies) for copies in zip(*before, strict=True)]
    assert [row.tobytes() for row in table] == of_replicas

    assign_own(variables, np.zeros_like(table), strategy)
    assert bits_of(variables, strategy) != before
    assign_own(variables, table, strategy)
    assert bits_of(variables, strategy) == before
    assert gathered([], strategy).shape == (replicas, 0)


def test_a_state_comes_back_from_its_files(tmp_path):
    """Numbers keep their values and arrays their bits, dtypes and shapes, bfloat16 included. A state
    without arrays has no file.
    """
    assert read_arrays(tmp_path / ARRAYS) == {}
    weights = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array(0.5, ml_dtypes.bfloat16),
        np.zeros([0, 2], np.int64),
    ]
    arrays = {}
    state = split({"best": np.float32(0.25), "wait": 3, "name": None, "weights": weights}, arrays)
    write_arrays(str(tmp_path / ARRAYS), arrays)
    found = joined(json.loads(json.dumps(state)), read_arrays(tmp_path / ARRAYS))

    for here, there in zip(found.pop("weights"), weights, strict=True):
        assert (here.dtype, here.shape, here.tobytes()) == (
            there.dtype,
            there.shape,
            there.tobytes(),
        )
    assert found == {"best": 0.25, "wait": 3, "name": None}


def test_what_json_does_not_know_is_an_error():
    """A checkpoint is not begun with a state that it cannot hold."""
    with pytest.raises(TypeError, match="`state_dict`"):
        split({"seen": [{1, 2}]}, {})
