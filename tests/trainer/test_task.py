"""Hooks for subclasses, actions, and the moving average."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes

from trainer import Action
from trainer.data.batches import untuned


class Hooked(Linear):
    """Records the calls of its hooks."""

    def __init__(self, **arguments):
        """Creates a counter that is saved in checkpoints."""
        super().__init__(verbose=False, **arguments)
        self.calls = []
        self.updates = tf.Variable(0, dtype=tf.int64)
        self.batches_evaluated = 0

    def checkpoint_items(self):
        """Saves the counter."""
        return {"updates": self.updates}

    def on_train_begin(self):
        """Records the call."""
        self.calls.append(("train begins", self.totals.attempted))

    def on_loop_begin(self, step):
        """Records the call."""
        self.calls.append(("loop begins", step))

    def on_loop_end(self, step):
        """Records the call."""
        self.calls.append(("loop ends", step))

    def on_train_end(self, summary):
        """Records the call."""
        self.calls.append(("train ends", summary.step))

    def train_step(self, batch):
        """Halves the slopes and counts the updates."""
        report = super().train_step({**batch, "slope": batch["slope"] / 2})
        self.updates.assign_add(tf.cast(report.grads_finite, tf.int64))
        return report

    def eval_step(self, batch):
        """Doubles the losses and counts the traces."""
        self.batches_evaluated += 1
        total, weight = super().eval_step(batch)
        return 2 * total, weight


def test_hooks_are_called_in_order(tmp_path):
    """Hooks run at the beginning and end of training and of every inner loop; `train_step` and
    `eval_step` change the step; an extra checkpoint item is saved and restored.
    """
    trainer = Hooked(model_dir=tmp_path, steps_per_loop=2)
    trainer.train(slopes(2.0, 2.0), steps=3, global_batch=2)

    assert trainer.calls == [
        ("train begins", 0),
        ("loop begins", 0),
        ("loop ends", 2),
        ("loop begins", 2),
        ("loop ends", 3),
        ("train ends", 3),
    ]
    assert trainer.weight == 1.0 - 3 * 1.0
    assert trainer.evaluate(slopes(1.0, 3.0), global_batch=1)["loss"] == 2 * 2.0 * trainer.weight
    assert trainer.batches_evaluated == 1

    resumed = Hooked(model_dir=tmp_path, data_resume="restart")
    resumed.train(slopes(2.0, np.nan), steps=5, global_batch=2)

    assert resumed.calls[0] == ("train begins", 3)
    assert int(resumed.updates.numpy()) == 3


def test_a_run_stops_when_asked(tmp_path, capsys):
    """A run ends and saves after the inner loop in which `stop` was called, and can be
    continued.
    """
    action = Action(lambda trainer: trainer.totals.attempted >= 6 and trainer.stop(), every_steps=3)
    trainer = Linear(model_dir=tmp_path, actions=[action], log_interval=100)
    summary = trainer.train(slopes(1.0, 2.0), steps=20, global_batch=2)

    assert (summary.step, summary.checkpoint) == (6, str(tmp_path / "ckpt-6"))
    assert "stopped at step 6 of 20, as asked" in capsys.readouterr().out
    trainer.actions.clear()
    assert trainer.train(slopes(1.0, 2.0), steps=20, global_batch=2).step == 20


def test_metrics_are_those_of_applied_steps():
    """A skipped step does not count in training metrics."""
    seen = []

    class Measured(Linear):
        def build_metrics(self):
            return {"mean": keras.metrics.Mean()}

        def compute_loss(self, batch, training):
            return super().compute_loss(batch, training), batch["slope"]

        def update_metrics(self, batch, aux):
            del batch
            self.metrics["mean"].update_state(aux)

        def on_loop_end(self, step):
            seen.append((step, float(self.metrics["mean"].result())))

    batches = [slopes(1.0), slopes(np.inf), slopes(3.0)]
    specs = {"x": tf.TensorSpec([None, 1]), "slope": tf.TensorSpec([None])}
    data = untuned(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs))
    trainer = Measured(verbose=False, steps_per_loop=1, log_interval=100)
    trainer.train(data, steps=4)

    assert seen[:3] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_a_stopped_run_writes_its_log(tmp_path):
    """A stopped run writes a log line even before the first one was due."""
    action = Action(lambda trainer: trainer.stop(), every_steps=3)
    trainer = Linear(model_dir=tmp_path, actions=[action], log_interval=100, verbose=False)
    trainer.train(slopes(1.0, 2.0), steps=20, global_batch=2)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    [line] = [line for line in lines if line["split"] == "train"]

    assert line["step"] == 3


def test_metrics_without_an_update_are_refused():
    """Metrics beside a custom `compute_loss` need an `update_metrics`."""

    class Forgetful(Linear):
        def build_metrics(self):
            return {"mean": keras.metrics.Mean()}

    with pytest.raises(ValueError, match=r"`update_metrics` must be overridden with compute_loss"):
        Forgetful(verbose=False).train(slopes(1.0), steps=1, global_batch=1)


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("totals", lambda trainer: trainer.totals),
        ("loss_scale", lambda trainer: trainer.loss_scale),
        ("export", lambda trainer: trainer.export("model.keras")),
    ],
)
def test_state_is_unavailable_before_any_data(name, ask):
    """Before any data, the error says which methods to call first."""
    with pytest.raises(RuntimeError) as error:
        ask(Linear(verbose=False))

    assert str(error.value) == (
        f"`{name}` must be used after train, evaluate or predict; got a trainer that has not seen "
        "any data. The first batch builds the model and restores the run. Call one of these methods "
        "first."
    )
