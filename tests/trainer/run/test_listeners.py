"""The listeners that every run has: when they are called, in what order, and rollbacks."""

import json
import re
import shutil

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, all_copies, assert_same_bits, slopes

from trainer import Action, Callback, Checkpoints, DivergedError, Divergence, Monitoring, Trainer
from trainer.callbacks import KerasCallbacks
from trainer.checkpoint import folder
from trainer.checkpoint.folder import committed
from trainer.run.listeners import Periodic


def lines_of(folder):
    """The lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_period_ends_at_its_multiples_and_at_the_target():
    """It is counted from where it starts; without a period, only the target counts."""
    periodic, at_the_end = Periodic(10, 25, lambda: 2), Periodic(None, 25)

    assert [periodic.next_stop(step) for step in (0, 2, 11, 12, 22)] == [2, 12, 12, 22, 25]
    assert at_the_end.next_stop(3) == 25
    assert [periodic.is_due(before, before + 3) for before in (2, 8, 9, 22)] == [
        False,
        False,
        True,
        True,
    ]


def test_evaluations_and_checkpoints_happen_when_due(tmp_path):
    """Loops end at every checkpoint and evaluation; both also happen at the end, and none twice."""
    trainer = Linear(
        model_dir=tmp_path, steps_per_loop=4, checkpoints=Checkpoints(interval=6), verbose=False
    )
    trainer.train(
        slopes(1.0, 2.0), steps=15, global_batch=2, eval_data=slopes(1.0, 2.0), eval_interval=5
    )
    lines = lines_of(tmp_path)

    assert [line["step"] for line in lines if line["split"] == "validation"] == [5, 10, 15]
    saved = {path.name for path in tmp_path.glob("ckpt-*")}
    assert saved == {"ckpt-6", "ckpt-12", "ckpt-15"}


@pytest.mark.thorough
def test_log_lines_are_on_time(tmp_path):
    """A log line is written at each multiple of its interval, however long the loops are."""
    trainer = Linear(model_dir=tmp_path, steps_per_loop=10, log_interval=5, verbose=False)
    trainer.train(slopes(1.0), steps=17, global_batch=1)
    lines = lines_of(tmp_path)

    assert [line["step"] for line in lines if line["split"] == "train"] == [5, 10, 15, 17]


@pytest.mark.thorough
def test_the_order_between_inner_loops(tmp_path):
    """After an inner loop come the log line, the evaluation, the actions, the hook, the checkpoint."""
    seen = []

    def look(what):
        lines = lines_of(tmp_path)
        splits = [line["split"] for line in lines if line["step"] == 2 and line["split"] != "scale"]
        seen.append((what, splits, (tmp_path / "ckpt-2").exists()))

    class Looking(Linear):
        def on_loop_end(self, step):
            look("hook")

    actions = [Action(lambda _: look("action"), every_steps=2)]
    settings = {"log_interval": 2, "steps_per_loop": 2, "verbose": False}
    trainer = Looking(model_dir=tmp_path, callbacks=actions, **settings)
    trainer.train(slopes(1.0), steps=2, global_batch=1, eval_data=slopes(1.0))

    assert seen == [(what, ["train", "validation"], False) for what in ("action", "hook")]
    assert (tmp_path / "ckpt-2").exists()


class Noisy(Linear):
    """Its loss is the slope of the batch; Dropout's noise shows whether new numbers are drawn."""

    def build_model(self):
        """One weight after a dropout layer."""
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return keras.Sequential([keras.Input([1]), keras.layers.Dropout(0.5), dense])

    def build_optimizer(self):
        """A low learning rate, so that the loss depends on the data alone."""
        return keras.optimizers.SGD(1e-6, momentum=0.9)

    def compute_loss(self, batch, training):
        """The slope plus a small amount of noise."""
        predictions = tf.cast(self.model(batch["x"], training=training), tf.float32)
        return batch["slope"] + 1e-3 * predictions[:, 0]

    def on_recovery(self, step, restored):
        """Records the call."""
        self.__dict__.setdefault("recovered", []).append((step, restored))


def data(*slopes):
    """Returns a dataset of batches of two examples, with one slope per batch."""
    batches = {
        "x": np.ones([len(slopes), 2, 1], np.float32),
        "slope": np.repeat(np.array(slopes, np.float32)[:, None], 2, axis=1),
    }
    return tf.data.Dataset.from_tensor_slices(batches)


def run(model_dir, divergence, steps, slopes, kind=Noisy, **arguments):
    """Trains one step on each slope; returns the trainer."""
    arguments = {
        "checkpoints": Checkpoints(interval=2),
        "steps_per_loop": 3,
        "log_interval": 1,
    } | arguments
    trainer = kind(
        model_dir=model_dir,
        monitoring=Monitoring(divergence=divergence),
        seed=1,
        verbose=False,
        **arguments,
    )
    trainer.train(data(*slopes), steps=steps)
    return trainer


def recoveries(model_dir):
    """Returns the lines of `metrics.jsonl` about recoveries."""
    return [line for line in lines_of(model_dir) if line["split"] == "recovery"]


def trained_at(model_dir):
    """Returns the steps of the lines of `metrics.jsonl` about training."""
    return [line["step"] for line in lines_of(model_dir) if line["split"] == "train"]


@pytest.mark.thorough
def test_a_loss_above_the_bound_restores_and_skips_data(tmp_path):
    """The newest checkpoint from before the divergence is restored, and with skip_data the batches up
    to and including the bad one are skipped. The recovery is recorded in metrics.jsonl and run.json.
    """
    slopes = [1, 1, 1, 1, 1, 50, 1, 1, 1, 1]
    trainer = run(tmp_path, Divergence(loss_above=10.0, skip_data=True), 8, slopes)

    assert trainer.recovered == [(6, 4)]
    [line] = recoveries(tmp_path)
    assert line.pop("what").endswith(" above 10 at step 6")
    assert line == {
        "step": 6,
        "split": "recovery",
        "restored": 4,
        "batches_left_out": 2,
        "interval_begun": 5,
    }
    position = access.position(trainer)
    assert (trainer.totals.attempted, position.taken) == (8, 10)
    saved = json.loads((tmp_path / "ckpt-8" / "run.json").read_text())
    assert (saved["batches_taken"], saved["divergence"]["recoveries"]) == (10, 1)

    history = trainer._history.snapshot().arrays()
    assert history["step"].tolist() == list(range(1, 9))
    assert trained_at(tmp_path) == [1, 2, 3, 4, 5, 6, *range(5, 9)]
    assert history["loss"].max() < 10
    resumed = Noisy(model_dir=tmp_path, seed=1, verbose=False)
    assert resumed.train(data(*slopes), steps=8).history["loss"].tolist() == list(history["loss"])


@pytest.mark.thorough
def test_a_watch_that_is_new_at_a_resume_begins_empty(tmp_path):
    """The checkpoint knows of no losses, so those that diverged are not held against the next steps."""
    slopes = [1.0] * 6 + [50.0] + [1.0] * 9
    run(tmp_path, None, 4, slopes)
    trainer = run(tmp_path, Divergence(rise=2.0, window=2, skip_data=True), 12, slopes)
    assert len(trainer.recovered) == 1
    assert trainer.totals.attempted == 12


@pytest.mark.thorough
def test_a_scale_that_grew_in_undone_steps_is_written_again(tmp_path):
    """The report reads the scale from its lines, and those of undone steps do not count."""
    growing = "dynamic:initial_scale=16:growth_interval=4"
    arguments = {
        "precision": "mixed_float16",
        "loss_scale": growing,
        "checkpoints": Checkpoints(interval=4),
    }
    slopes = [1.0] * 6 + [50.0] + [1.0] * 3
    divergence = Divergence(loss_above=10.0, skip_data=True)
    trainer = run(tmp_path, divergence, 7, slopes, **arguments)
    kinds = [(line["split"], line.get("loss_scale")) for line in lines_of(tmp_path)]
    after = kinds[[kind for kind, _ in kinds].index("recovery") :]
    assert ("scale", trainer.loss_scale) in after


@pytest.mark.thorough
def test_without_skip_data_the_run_meets_the_same_batch_again(tmp_path):
    """The same batch diverges each time, with new random numbers, so after max_recoveries the run ends
    at the last good checkpoint, with an error that says what was restored.
    """
    drawn = []

    class Drawing(Noisy):
        def on_recovery(self, step, restored):
            drawn.append(int(access.state(self).random_seed.numpy()))

    divergence = Divergence(loss_above=10.0, max_recoveries=2)
    with pytest.raises(DivergedError, match=re.escape(f"went back to {tmp_path / 'ckpt-2'}")):
        run(tmp_path, divergence, 5, [1, 1, 1, 50, 1], Drawing)

    assert [line["restored"] for line in recoveries(tmp_path)] == [2, 2]
    assert list(committed(tmp_path, "ckpt")) == [0, 2]
    assert drawn == [2, 3]


@pytest.mark.thorough
def test_a_killed_run_remembers_its_recoveries(tmp_path):
    """A recovery saves its count and the skipped data at once: a run that is killed right after it and
    started again ends with the same bits as one that was not killed.
    """
    slopes = [1, 1, 1, 1, 1, 50, 1, 1, 1, 1]
    divergence = Divergence(loss_above=10.0, skip_data=True)

    class Stopped(Noisy):
        def on_loop_begin(self, step):
            if getattr(self, "recovered", None):
                raise SystemExit

    whole = run(tmp_path / "whole", divergence, 8, slopes)
    with pytest.raises(SystemExit):
        run(tmp_path / "killed", divergence, 8, slopes, Stopped)
    again = run(tmp_path / "killed", divergence, 8, slopes)

    assert not hasattr(again, "recovered")
    ends = [list(all_copies(trainer).values()) for trainer in (whole, again)]
    assert_same_bits(*[dict(enumerate(end)) for end in ends])
    assert again._watch.state() == whole._watch.state()
    assert access.position(again).taken == access.position(whole).taken == 10


@pytest.mark.slow
def test_a_loss_that_rises_past_a_window(tmp_path):
    """The mean loss of the last window is compared with the lowest mean so far. The run goes back to a
    checkpoint from before that window, and later checkpoints are removed.
    """
    # Means of three: 4, 4, 4.33, 5, and 6.33 at step 7, which is above 1.5 x 4. That window
    # begins at step 5.
    slopes = [4, 4, 4, 4, 5, 6, 8, 4, 4, 4, 4, 4]
    divergence = Divergence(rise=1.5, window=3, max_recoveries=1, skip_data=True)
    trainer = run(tmp_path, divergence, 8, slopes)

    [line] = recoveries(tmp_path)
    assert (line["step"], line["restored"], line["batches_left_out"]) == (7, 4, 3)
    assert (trainer.totals.attempted, access.position(trainer).taken) == (8, 11)


class Counted:
    """An action that counts its calls, in checkpoints too."""

    def __init__(self):
        """Begins at 0."""
        self.count = 0

    def __call__(self, trainer):
        """Counts."""
        self.count += 1

    def state_dict(self):
        """Returns the count."""
        return {"count": self.count}

    def load_state_dict(self, state):
        """Takes a count over."""
        self.count = state["count"]


class Epochs(keras.callbacks.Callback):
    """Remembers the epochs, from nothing."""

    def __init__(self):
        """Has seen none."""
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        """Remembers one."""
        self.seen = [*self.seen, epoch]


# Keras converts its variables in a way that NumPy 2 warns about.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
def test_what_listens_to_the_run_goes_back_with_it(tmp_path):
    """After a rollback into an interval, the next line is about the whole interval, in its loss and
    in its metrics; actions and Keras callbacks are as they were, those that had not changed too;
    and the best models are those of the steps that are left.
    """
    x = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
    action, epochs = Action(Counted(), every_steps=1), Epochs()
    trainer = Trainer(
        model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        optimizer=lambda: keras.optimizers.SGD(0.01),
        loss_fn="mse",
        metrics=["mse"],
        callbacks=[action, Counting(), KerasCallbacks([epochs])],
        monitoring=Monitoring(divergence=Divergence(loss_above=20.0)),
        model_dir=tmp_path,
        checkpoints=Checkpoints(interval=7, keep_best=1),
        steps_per_loop=1,
        seed=1,
        verbose=False,
    )
    trainer.on_recovery = lambda *_: setattr(trainer.callbacks[1], "mended", True)
    data = {"global_batch": 4, "eval_data": (x, 3 * x + 1), "eval_interval": 2}
    summary = trainer.train((x, 3 * x + 1), 12, **data)

    assert [line["restored"] for line in recoveries(tmp_path)] == [7]
    assert [line["interval_begun"] for line in recoveries(tmp_path)] == [5]
    history = summary.history
    assert list(history["step"]) == [4, 8, 12]
    np.testing.assert_allclose(history["loss"], history["mse"], rtol=1e-6)
    assert action.call.count == 12
    assert epochs.seen == [0, 1, 2]
    kept = folder.committed(tmp_path / "best", "step")
    assert list(kept) == [summary.best.step]


class Counting(Callback):
    """Counts steps, and makes the run diverge at the ninth, until it is mended."""

    def __init__(self):
        """Begins at 0."""
        self.steps, self.mended = 0, False

    def on_loop_begin(self, step):
        """Sets a learning rate at which the loss grows."""
        if step == 8 and not self.mended:
            self.trainer.optimizer.learning_rate = 1e3

    def on_loop_end(self, step):
        """Counts."""
        self.steps += 1

    def state_dict(self):
        """Returns the count."""
        return {"steps": self.steps}

    def load_state_dict(self, state):
        """Takes a count over."""
        self.steps = state["steps"]


@pytest.mark.thorough
def test_after_the_error_another_call_goes_on_as_another_process_does(tmp_path):
    """What a resume restores is restored: position in the data, log, callbacks, optimizer."""
    x = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
    examples = tf.data.Dataset.from_tensor_slices((x, 3 * x + 1)).batch(4)

    def line(folder):
        return Trainer(
            model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
            optimizer=lambda: keras.optimizers.SGD(0.05),
            loss_fn="mse",
            callbacks=[Counting()],
            monitoring=Monitoring(divergence=Divergence(loss_above=1e4, max_recoveries=1)),
            model_dir=folder,
            checkpoints=Checkpoints(interval=5),
            steps_per_loop=1,
            log_interval=2,
            seed=1,
            verbose=False,
        )

    here = line(tmp_path / "here")
    with pytest.raises(DivergedError):
        here.train(examples, 20)
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    runs = [here, line(tmp_path / "copy")]
    for trainer in runs:
        trainer.callbacks[0].mended = True
        trainer.train(examples, 20)

    assert_same_bits(*map(all_copies, runs))
    assert [trainer.callbacks[0].steps for trainer in runs] == [20, 20]
    assert [trained_at(tmp_path / name) for name in ("here", "copy")] == [[*range(2, 21, 2)]] * 2


def test_other_data_begin_a_window_of_their_own(tmp_path):
    """A loss that is larger there is no divergence: the run takes all its steps in each phase."""
    divergence = Divergence(rise=3.0, window=3)
    trainer = run(tmp_path, divergence, 6, [1] * 6)
    trainer.train(data(*[100] * 6), steps=12)

    assert recoveries(tmp_path) == []
    assert trained_at(tmp_path) == [*range(1, 13)]


def test_a_rollback_ends_where_the_data_of_the_call_begin(tmp_path, caplog):
    """It goes back to the checkpoint that the earlier call has ended with, and says what that undoes."""
    divergence = Divergence(rise=3.0, window=3, skip_data=True)
    trainer = run(tmp_path, divergence, 6, [1] * 6, checkpoints=Checkpoints(interval=3))
    trainer.train(data(1, 1, 1, 50, 50, 50, 1, 1, 1, 1), steps=12)

    assert trainer.recovered == [(10, 6)]
    assert "goes back to step 6, before this call" in caplog.text


@pytest.mark.thorough
def test_without_a_checkpoint_of_these_data_the_run_ends(tmp_path):
    """The steps between an older checkpoint and these data would be taken with the wrong ones."""
    divergence = Divergence(rise=3.0, window=3)
    trainer = run(tmp_path, divergence, 6, [1] * 6, checkpoints=Checkpoints(interval=3))
    shutil.rmtree(tmp_path / "ckpt-6")

    with pytest.raises(DivergedError, match="went back to"):
        trainer.train(data(1, 1, 1, 50, 50, 50), steps=12)
