"""Hooks for subclasses, actions, and the moving average."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes

from trainer import Action, TrainingStuckError
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


def test_actions_are_due_by_steps():
    """An inner loop ends at every multiple of the period, where the action runs; nothing else in
    the run changes.
    """
    seen = []
    action = Action(lambda trainer: seen.append(trainer.totals.attempted), every_steps=7)
    trainer = Linear(steps_per_loop=5, actions=[action], verbose=False)
    trainer.train(slopes(1.0, 2.0), steps=20, global_batch=2)

    assert seen == [7, 14]
    assert trainer.totals.applied == 20


def test_actions_are_due_by_seconds(monkeypatch):
    """Periods in seconds are checked after every inner loop, counting from when the action was
    created.
    """
    now = [100.0]
    monkeypatch.setattr("trainer.monitor.actions.time.monotonic", lambda: now[0])
    seen = []

    def passing(trainer):
        now[0] += 4.0
        seen.append(("passed", trainer.totals.attempted))

    by_steps = Action(passing, every_steps=1)
    by_time = Action(lambda trainer: seen.append(("due", trainer.totals.attempted)), every_secs=10)
    trainer = Linear(actions=[by_steps, by_time], verbose=False)
    trainer.train(slopes(1.0, 2.0), steps=8, global_batch=2)

    assert [step for kind, step in seen if kind == "due"] == [4, 8]


@pytest.mark.parametrize(
    ("periods", "message"),
    [
        (
            {},
            "`every_steps` must be given if `every_secs` is not; got None and None. One of the "
            "two is "
            "the period. Pass exactly one.",
        ),
        (
            {"every_steps": 3, "every_secs": 1.0},
            "`every_steps` must be given if `every_secs` is not; got 3 and 1.0. One of the two is "
            "the "
            "period. Pass exactly one.",
        ),
        (
            {"every_secs": -1.0},
            "`every_secs` must be positive; got -1.0. It is a time in seconds. 60 is once a "
            "minute.",
        ),
        (
            {"every_steps": 0},
            "`every_steps` must be an int of at least 1; got 0. It is a count. Pass a positive "
            "integer.",
        ),
    ],
)
def test_an_action_has_one_period(periods, message):
    """An action needs exactly one period, and it must be positive."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        Action(print, **periods)

    assert str(error.value) == message


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


# Raised by Keras when it saves: NumPy 2 expects another signature of its variables.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_average_is_what_is_evaluated_and_exported(mirrored, tmp_path, replicas):
    """`ema_momentum` keeps a moving average of the weights over updates. Evaluation, prediction and
    export use it by default, and the weights have their bits again afterwards.
    """
    trainer = Linear(
        strategy=mirrored(replicas) if replicas > 1 else "default",
        ema_momentum=0.5,
        verbose=False,
    )
    data = slopes(*[1.0] * replicas)
    trainer.train(data, steps=3, global_batch=replicas)
    weights = [0.0, -1.0, -2.0]
    average = weights[0]
    for weight in weights[1:]:
        average = 0.5 * average + 0.5 * weight
    path = tmp_path / "model.keras"
    trainer.export(path)

    assert trainer.evaluate(data, global_batch=replicas)["loss"] == average
    assert trainer.evaluate(data, global_batch=replicas, averaged=False)["loss"] == -2.0
    assert keras.saving.load_model(path).get_weights()[0].item() == average
    assert trainer.weight == -2.0
    assert (
        trainer.predict(data["x"], global_batch=replicas).ravel().tolist() == [average] * replicas
    )


def test_an_average_that_is_not_kept():
    """Asking for an average that is not kept is an error."""
    trainer = Linear(verbose=False)
    trainer.train(slopes(1.0), steps=1, global_batch=1)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        trainer.evaluate(slopes(1.0), global_batch=1, averaged=True)

    assert str(error.value) == (
        "`averaged` must be None or False if no average is kept; got True. There is nothing to put "
        "in the weights' place. Train with ema_momentum=."
    )


@pytest.mark.parametrize(
    ("ema_momentum", "message"),
    [
        (
            1.0,
            "`ema_momentum` must be strictly between 0 and 1; got 1.0. Each update keeps this "
            "fraction of the old average. 0.999 is a common choice.",
        ),
        (
            0.9,
            "`ema_momentum` must be None if the optimizer keeps an average; got 0.9 beside the "
            "optimizer's ema_momentum=0.99. One average is enough. Set one of the two.",
        ),
    ],
)
def test_two_averages_are_refused(ema_momentum, message):
    """The momentum must be below 1, and the trainer's and the optimizer's averages exclude each
    other.
    """

    class Averaging(Linear):
        def build_optimizer(self):
            return keras.optimizers.SGD(1.0, use_ema=True)

    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        Averaging(ema_momentum=ema_momentum, verbose=False).train(
            slopes(1.0), steps=1, global_batch=1
        )

    assert str(error.value) == message


def test_a_run_that_ends_in_an_error_calls_no_action():
    """A run that must end raises before the next action runs, even if the next log line is due much
    later.
    """
    seen = []
    action = Action(lambda trainer: seen.append(trainer.totals.attempted), every_steps=2)
    trainer = Linear(on_nonfinite_loss="raise", actions=[action], log_interval=100, verbose=False)
    with pytest.raises(TrainingStuckError, match="`compute_loss` must return finite losses"):
        trainer.train(slopes(np.nan), steps=50, global_batch=1)

    assert seen == []
    assert trainer.totals.attempted == 1


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

    with pytest.raises(
        ValueError, match=r"`update_metrics` must be overridden beside compute_loss"
    ):
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
        f"`{name}` must be asked for after train, evaluate or predict; got a trainer that has "
        "seen no "
        "data. The first batch builds the model and restores a run. Call one of the three before."
    )
