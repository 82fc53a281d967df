"""The line of `metrics.jsonl` about float8 tensors."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from scaling.float8.simulate import compare, read_tensors
from trainer import Monitoring, Trainer, convert_to_float8
from trainer.float8.lines import float8_line
from trainer.step.float8 import FORMATS, Float8Tensor
from trainer.step.report import StepReport

TENSORS = [
    Float8Tensor("m/d/inputs", "1", "2", None, "float8_e4m3fn"),
    Float8Tensor("m/d/outputs_grad", "3", "4", None, "float8_e5m2"),
]


def reports(applied, amax, scale, saturated=(), flushed=()):
    """Reports of steps with these float8 fields; the other fields are zeros."""
    count = len(applied)
    fields = dict.fromkeys(StepReport._fields, np.zeros(count)) | {
        "step": np.arange(1, count + 1),
        "grads_finite": np.array(applied),
        "float8_amax": np.float32(amax),
        "float8_scale": np.float32(scale),
        "float8_saturated": np.float32(saturated).reshape(count, -1),
        "float8_flushed": np.float32(flushed).reshape(count, -1),
    }
    return StepReport(**fields)


def test_a_line_is_about_the_applied_steps():
    """The largest magnitude, the last scale, mean shares, and in how many steps something saturated."""
    steps = reports(
        [True, True, False],
        [[448, 7], [900, 3], [math.inf, math.inf]],
        [[1, 4], [1, 2], [8, 8]],
        [[0, 0], [0.5, 0], [1, 1]],
        [[0.25, 0], [0.75, math.nan], [0, 0]],
    )
    assert float8_line(steps, TENSORS) == {
        "step": 3,
        "split": "float8",
        "float8": {
            "m/d/inputs": {
                "format": "float8_e4m3fn",
                "amax": 900.0,
                "scale": 1.0,
                "saturated": 0.25,
                "flushed": 0.5,
                "saturated_steps": 1,
            },
            "m/d/outputs_grad": {
                "format": "float8_e5m2",
                "amax": 7.0,
                "scale": 2.0,
                "saturated": 0.0,
                "flushed": None,
                "saturated_steps": 0,
            },
        },
    }


def test_without_applied_steps_or_tensors_there_is_no_line():
    """Skipped steps do not count; a tensor that no update has reached is left out."""
    one = [[1.0, 1.0]]
    assert float8_line(reports([False], one, one), TENSORS) is None
    assert float8_line(reports([True], one, one), []) is None
    assert float8_line(reports([True], one, [[0.0, 0.0]]), TENSORS) is None
    assert list(float8_line(reports([True], one, [[0.0, 1.0]]), TENSORS)["float8"]) == [
        "m/d/outputs_grad"
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("record_gradients", [False, True])
def test_a_run_writes_a_line_at_each_interval(tmp_path, record_gradients):
    """Magnitudes and scales are always there, shares with `record_gradients`; a skip leaves no trace."""

    def model():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(16, name=name) for name in ("one", "two")]
        model = keras.Sequential([keras.Input([16]), *layers], name="model")
        convert_to_float8(model, lambda layer: layer.name == "two")
        return model

    rows = np.random.default_rng(2).normal(size=(16, 16)).astype("float32")
    rows[0, 0] = np.inf  # one batch is skipped
    trainer = Trainer(
        model=model,
        optimizer="sgd",
        loss_fn="mse",
        precision="mixed_float8",
        seed=1,
        verbose=False,
        jit_compile=False,
        model_dir=tmp_path,
        monitoring=Monitoring(record_gradients=record_gradients),
        steps_per_loop=2,
        log_interval=2,
    )
    summary = trainer.train((rows, rows[:, :16]), steps=4, global_batch=4)
    assert summary.totals.skipped == 1
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, text) if line["split"] == "float8"]
    assert [line["step"] for line in lines] == [2, 4]
    assert list(lines[0]["float8"]) == [f"model/two/{name}" for name in FORMATS]
    layer = trainer.model.layers[1]
    for name, form in FORMATS.items():
        own = [line["float8"][f"model/two/{name}"] for line in lines]
        # The history is longer than the run, and holds the applied steps.
        assert (
            max(one["amax"] for one in own) == getattr(layer, f"{name}_amax_history").numpy().max()
        )
        assert own[-1]["format"] == form
        assert own[-1]["scale"] < 1.0  # as it is at the start, and no longer
        assert all((one["flushed"] is not None) == record_gradients for one in own)
    underflow = [line for line in map(json.loads, text) if line["split"] == "underflow"]
    for line in underflow:  # scales and histories have no gradient
        assert list(line["share"]) == [
            f"model/{layer}/{kind}" for layer in ("one", "two") for kind in ("kernel", "bias")
        ]
    assert len(underflow) == (2 if record_gradients else 0)


@pytest.mark.thorough
def test_the_simulator_reads_what_a_run_writes(tmp_path):
    """Recorded at every step and played by the run's own rule, the scales have the run's own bits."""

    def model():
        layers = [keras.layers.Dense(32, name=name) for name in ("one", "two", "three")]
        return keras.Sequential([keras.Input([16]), *layers], name="model")

    rows = np.random.default_rng(3).normal(size=(48, 32)).astype("float32")
    rows *= np.float32(2.0) ** np.arange(48)[:, None]  # grows, so that scales move
    trainer = Trainer(
        model=model,
        optimizer="sgd",
        loss_fn="mse",
        precision="mixed_float8",
        seed=1,
        verbose=False,
        jit_compile=False,
        model_dir=tmp_path,
        log_interval=1,
    )
    data = tf.data.Dataset.from_tensor_slices((rows[:, :16] / 1e6, rows / 1e9)).batch(4)
    trainer.train(data, steps=12)
    tensors = read_tensors(tmp_path / "metrics.jsonl")

    assert [each.name for each in tensors] == [f"model/two/{name}" for name in FORMATS]
    outcomes = compare(tensors, ["delayed"])
    for recorded, played in outcomes:
        np.testing.assert_array_equal(recorded.scale, played.scale)
    assert sum(recorded.moves for recorded, _ in outcomes) > len(outcomes)
