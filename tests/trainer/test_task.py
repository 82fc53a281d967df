"""The user-defined part of a trainer: its hooks, its metrics, and what a checkpoint holds of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes


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


def test_metrics_without_an_update_are_refused():
    """Metrics beside a custom `compute_loss` need an `update_metrics`."""

    class Forgetful(Linear):
        def build_metrics(self):
            return {"mean": keras.metrics.Mean()}

    with pytest.raises(
        ValueError, match=r"`update_metrics` must be overridden along with compute_loss"
    ):
        Forgetful(verbose=False).train(slopes(1.0), steps=1, global_batch=1)
