"""What a trainer does to evaluate the checkpoints of a run that another process trains."""

import json

import pytest
import tensorflow as tf
from helpers import Linear, linear_model, slopes

from trainer import Callback, Checkpoints
from trainer.callbacks import EarlyStopping
from trainer.checkpoint import folder
from trainer.run.follow import adopt_compile_mode


class Module(tf.Module):
    """One weight."""

    def __init__(self):
        """The weight is 1."""
        super().__init__()
        self.weight = tf.Variable([[1.0]])


@pytest.mark.parametrize(
    ("model", "asked", "mode"),
    [(Module, "auto", "update"), (Module, False, False), (linear_model, "auto", False)],
)
def test_a_module_computes_as_in_the_run(tmp_path, model, asked, mode):
    """The compile mode of the newest checkpoint is used for a `tf.Module` with "auto"."""
    trainer = Linear(model_dir=tmp_path, jit_compile=asked)
    trainer.build_model = model
    for step, saved in ((1, False), (2, "update")):
        (tmp_path / f"ckpt-{step}").mkdir()
        (tmp_path / f"ckpt-{step}" / folder.MANIFEST).write_text(json.dumps({"jit_compile": saved}))
    adopt_compile_mode(trainer, tmp_path)

    assert trainer.jit_compile == mode


def test_a_missing_best_metric_is_an_error(tmp_path):
    """It is one at the first checkpoint, when the names of the results are known."""
    Linear(model_dir=tmp_path, verbose=False).train(slopes(1.0), steps=1, global_batch=1)
    trainer = Linear(
        model_dir=tmp_path, checkpoints=Checkpoints(best_metric="b/loss"), verbose=False
    )
    with pytest.raises(ValueError, match="but the results are a/loss"):
        trainer.evaluate_continuously({"a": tf.data.Dataset.from_tensors(slopes(1.0))})


class Note(Callback):
    """Notes its calls."""

    def __init__(self):
        """Has noted nothing."""
        self.calls = []

    def on_evaluate_begin(self, step):
        """Notes the step."""
        self.calls.append(step)

    def on_evaluate_end(self, step, results):
        """Notes the step and the results."""
        self.calls.append((step, results))


def test_callbacks_hear_of_evaluations(tmp_path, capsys):
    """They get the calls of a run's own evaluations, except those that act on training."""
    settings = {"model_dir": tmp_path, "checkpoints": Checkpoints(interval=1)}
    Linear(**settings, verbose=False).train(slopes(1.0), steps=2, global_batch=1)
    note, stopping = Note(), EarlyStopping(mode="max")
    trainer = Linear(**settings, callbacks=[note, stopping])
    results = trainer.evaluate_continuously(slopes(1.0), global_batch=1)

    assert list(results) == [1, 2]
    assert note.calls == [1, (1, results[1]), 2, (2, results[2])]
    assert stopping.best is None
    assert "not called, because they act on training: EarlyStopping" in capsys.readouterr().out
