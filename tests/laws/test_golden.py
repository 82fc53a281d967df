"""A checkpoint written by release 0.1.0 can still be read."""

import importlib.util
import json
import pathlib
import shutil

import numpy as np

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def maker():
    """The script that wrote the golden checkpoint."""
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_golden_checkpoint_is_restored_and_trained_on(tmp_path):
    """Weights, statistics, counts and scale are restored to the bit; the run continues from its
    step and its place in the data, and saves.
    """
    golden = maker()
    shutil.copytree(GOLDEN / "ckpt-8", tmp_path / "ckpt-8")
    expected = json.loads((GOLDEN / "expected.json").read_text())
    trainer = golden.make(tmp_path)
    trainer.evaluate(golden.data(), global_batch=4)
    found = golden.state_of(trainer)

    assert found == expected
    before = trainer.model.get_weights()
    summary = trainer.train(golden.data(), steps=12, global_batch=4)
    assert (summary.step, summary.steps_run) == (12, 4)
    assert all(np.isfinite(weight).all() for weight in trainer.model.get_weights())
    moved = [
        (old != new).any() for old, new in zip(before, trainer.model.get_weights(), strict=True)
    ]
    assert all(moved[:2])
    assert (tmp_path / "ckpt-12" / "run.json").exists()
    assert trainer._trained_on[-1].taken == 12
