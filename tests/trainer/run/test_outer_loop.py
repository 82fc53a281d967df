"""The outer loop: what happens between inner loops, and in which order."""

import json
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from access import untuned
from helpers import STEEP, Linear, slopes

import scaling
from trainer import Action, Checkpoints, Monitoring, Trainer, Updates
from trainer.report.facts import settings_rows
from trainer.report.reading import read_run


def test_a_run_stops_when_asked(tmp_path, capsys):
    """A run ends and saves after the inner loop in which `stop` was called, and can be
    continued.
    """
    action = Action(lambda trainer: trainer.totals.attempted == 6 and trainer.stop(), every_steps=3)
    trainer = Linear(model_dir=tmp_path, callbacks=[action], log_interval=100)
    summary = trainer.train(slopes(1.0, 2.0), steps=20, global_batch=2)

    assert (summary.step, summary.checkpoint) == (6, str(tmp_path / "ckpt-6"))
    assert "stopped at step 6 of 20, as asked" in capsys.readouterr().out
    assert trainer.train(slopes(1.0, 2.0), steps=20, global_batch=2).step == 20


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["action", "data"])
def test_an_interval_that_an_error_cut_is_logged_as_a_whole(where, tmp_path):
    """The next call of `train` goes on with it, with its steps and with its metrics, whether the
    error came between two inner loops or within one.
    """
    x = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
    good = untuned(tf.data.Dataset.from_tensor_slices((x, x)).batch(4))
    bad = tf.data.Dataset.from_tensors("bad").map(
        lambda text: (tf.strings.to_number(text) * x[:4], x[:4])
    )
    failing = [RuntimeError("bad")] if where == "action" else []

    def fail(trainer):
        if failing and trainer.totals.attempted == 6:
            raise failing.pop()

    trainer = Trainer(
        model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        optimizer=lambda: keras.optimizers.SGD(0.1),
        loss_fn="mse",
        metrics=["mse"],
        callbacks=[Action(fail, every_steps=6)],
        model_dir=tmp_path,
        log_interval=4,
        verbose=False,
    )
    first = good if where == "action" else good.repeat(2).take(7).concatenate(bad)
    with pytest.raises(RuntimeError, match="bad"):
        trainer.train(first, 12)
    history = trainer.train(good, 12).history

    assert list(history["step"]) == [4, 8, 12]
    np.testing.assert_allclose(history["loss"], history["mse"], rtol=1e-6)


@pytest.mark.thorough
def test_the_summary_says_how_far_a_schedule_lags_behind(capsys):
    """A schedule counts updates, so every skipped step puts it one step further behind."""

    class Scheduled(Linear):
        def build_optimizer(self):
            return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(1.0, 100))

    rule = scaling.DynamicLossScale(initial_scale=2.0**17, max_scale=2.0**17)
    trainer = Scheduled(precision="mixed_float16", loss_scale=rule, jit_compile=False)
    trainer.train(STEEP, steps=1, global_batch=4)
    assert "; learning-rate schedule 1 step behind" in capsys.readouterr().out
    assert trainer.train(STEEP, steps=6, global_batch=4).schedule_lag == 3


@pytest.mark.thorough
@pytest.mark.parametrize("saved", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_error_between_steps_says_where_the_run_stands(tmp_path, saved):
    """An error of a hook is raised as it is, with a note; the run is saved before."""

    class Broken(Linear):
        def on_loop_end(self, step):
            if step == 4:
                raise RuntimeError("broken")

    trainer = Broken(model_dir=tmp_path if saved else None, steps_per_loop=2, verbose=False)
    with pytest.raises(RuntimeError, match="broken") as error:
        trainer.train(slopes(1.0), steps=6, global_batch=1)

    assert error.value.__notes__ == [f"raised at step 4{'. The run was saved.' if saved else ''}"]
    assert [path.name for path in tmp_path.glob("ckpt-*")] == ["ckpt-4"] * saved


@pytest.mark.thorough
def test_a_run_that_left_no_checkpoint_begins_a_new_log(tmp_path):
    """Each step stands once in the log, although a run that was killed had begun one."""
    for steps in (4, 6):
        trainer = Linear(model_dir=tmp_path, log_interval=2, verbose=False)
        trainer.train(slopes(1.0, 2.0), steps=2, global_batch=1)
        trainer.train(slopes(1.0, 2.0), steps=steps, global_batch=1)
        for checkpoint in tmp_path.glob("ckpt-*"):
            shutil.rmtree(checkpoint)

    for name, expected in (("metrics.jsonl", [2, 4, 6]), ("previous-metrics.jsonl", [2, 4])):
        lines = map(json.loads, (tmp_path / name).read_text().splitlines())
        assert [line["step"] for line in lines if line["split"] == "train"] == expected


@pytest.mark.thorough
def test_the_log_says_what_was_trained(tmp_path):
    """The first line of `metrics.jsonl` has the optimizer with its constants, the loss, the clipping,
    the data and the versions; the report shows each constant in a row of its own.
    """
    rate = keras.optimizers.schedules.CosineDecay(0.5, 100)

    class Scheduled(Linear):
        def build_optimizer(self):
            return keras.optimizers.SGD(rate, momentum=0.75)

    trainer = Scheduled(model_dir=tmp_path, updates=Updates(global_clipnorm=2.0), verbose=False)
    trainer.train(slopes(1.0), steps=1, global_batch=1)
    settings = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["settings"]

    assert settings["optimizer"] == "SGD"
    assert settings["optimizer.momentum"] == "0.75"
    assert settings["optimizer.learning_rate"] == "CosineDecay"
    assert settings["loss.reduction"] == "mean"
    assert settings["global_clipnorm"] == "2"
    assert {"data", "versions"} <= {*settings}
    rows = {name: value for name, value, _ in settings_rows(read_run(tmp_path))}
    assert rows["optimizer.learning_rate.initial_learning_rate"] == "0.5"


class Counted(Linear):
    """Has the mean slope as a metric."""

    def build_metrics(self):
        """The mean slope."""
        return {"mean": keras.metrics.Mean()}

    def compute_loss(self, batch, training):
        """The slopes are the aux value."""
        return super().compute_loss(batch, training), batch["slope"]

    def update_metrics(self, batch, aux):
        """Takes the slopes of a batch."""
        del batch
        self.metrics["mean"].update_state(aux)


def numbers_of_log(folder):
    """What the log files say of training and evaluations, without times and numbers of layers."""
    timed = {"examples_per_second", "steps_per_second", "data_wait"}
    text = re.sub(r"(sequential|dense)_\d+", r"\1", (folder / "metrics.jsonl").read_text())
    lines = map(json.loads, text.splitlines())
    return [
        {name: value for name, value in line.items() if name not in timed}
        for line in lines
        if line["split"] not in {"run", "end"}
    ]


@pytest.mark.parametrize(
    ("how", "at", "settings"),
    [
        pytest.param("stopped", 6, {"precision": "mixed_float16"}, marks=pytest.mark.thorough),
        *(
            pytest.param(how, at, settings, marks=pytest.mark.slow)
            for how, at, settings in [
                ("killed", 11, {}),
                ("stopped", 1, {}),
                ("stopped", 8, {}),
                ("stopped", 7, {"monitoring": Monitoring(record_gradients=True)}),
                ("killed", 4, {"monitoring": Monitoring(record_gradients=True)}),
                ("killed", 7, {"precision": "mixed_float16", "num_microbatches": 2}),
            ]
        ),
    ],
)
def test_the_log_does_not_show_that_a_run_was_interrupted(tmp_path, how, at, settings):
    """L12: the lines of a run that is stopped or killed between two of them, and started again, are
    those of a run that was not, though the checkpoint lies in the middle of their steps.
    """
    steep = slopes(*range(1, 8), np.inf)

    def run(name, *actions):
        trainer = Counted(
            model_dir=tmp_path / name,
            callbacks=actions,
            log_interval=4,
            checkpoints=Checkpoints(interval=3),
            steps_per_loop=4,
            seed=0,
            verbose=False,
            **settings,
        )
        arguments = {"global_batch": 2, "eval_data": slopes(1.0), "eval_interval": 8}
        trainer.train(steep, steps=14, **arguments)

    def interrupt(trainer):
        if how == "stopped":
            trainer.stop()
        elif trainer.totals.attempted == at:
            shutil.copytree(tmp_path / "killed", tmp_path / "again")

    run("whole")
    run(how, Action(interrupt, every_steps=at))
    again = "stopped" if how == "stopped" else "again"
    run(again)

    assert numbers_of_log(tmp_path / again) == numbers_of_log(tmp_path / "whole")


class Interrupted(Linear):
    """Is interrupted while it evaluates the model of one step: stopped, or by an error."""

    def __init__(self, how=None, at=None, **arguments):
        """Takes "stop", "stop twice" or "error", and the step."""
        self.how, self.at, self.evaluated = how, at, []
        super().__init__(
            verbose=False,
            checkpoints=Checkpoints(keep_best=1, interval=3),
            log_interval=4,
            **arguments,
        )

    def on_evaluate_begin(self, step):
        """Interrupts."""
        if step == self.at and self.how == "error":
            raise OSError("the disk is gone")
        if step == self.at and self.how:
            self.stop()

    def on_evaluate_end(self, step, results):
        """Counts the evaluations that ended."""
        self.evaluated.append((step, results["loss"]))

    def go(self):
        """Trains, with an evaluation before the first step too."""
        return self.train(
            slopes(1.0, 2.0),
            8,
            global_batch=2,
            eval_data=slopes(3.0),
            eval_interval=4,
            evaluate_at_start=True,
        )


def logged(folder):
    """The lines of the log about training and evaluation, without times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if "second" not in name and "wait" not in name}
        for line in lines
        if line["split"] in {"train", "validation"}
    ]


def best_of(folder):
    """The names of the best models."""
    return sorted(path.name for path in (folder / "best").iterdir())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run that has ended without interruption."""
    trainer = Interrupted(model_dir=tmp_path_factory.mktemp("whole"))
    trainer.go()
    return trainer


USUAL_CUT = "stop twice", 4  # which CI tries
KERAS_FILES = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@KERAS_FILES
@pytest.mark.parametrize(
    ("how", "at"),
    [
        pytest.param(
            how, at, marks=pytest.mark.thorough if (how, at) == USUAL_CUT else pytest.mark.slow
        )
        for how in ("stop", "stop twice", "error")
        for at in (0, 4, 8)
    ],
)
def test_an_interrupted_evaluation_is_made_up_for(tmp_path, uninterrupted, how, at):
    """The same command evaluates the step whose evaluation was interrupted, once, and ends with the
    log and the best models of a run without interruption.
    """
    folder = tmp_path / "cut"
    ended = []
    for turn in [how] * (2 if how == "stop twice" else 1) + [None, None]:
        trainer = Interrupted(turn, at, model_dir=folder)
        if turn == "error":
            with pytest.raises(OSError, match="the disk is gone"):
                trainer.go()
        else:
            trainer.go()
        ended += trainer.evaluated

    assert ended == uninterrupted.evaluated
    assert [step for step, _ in ended] == [0, 4, 8]
    assert logged(folder) == logged(uninterrupted.model_dir)
    assert best_of(folder) == best_of(uninterrupted.model_dir)


@pytest.mark.thorough
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("hook", ["on_log", "on_evaluate_begin", "on_evaluate_end"])
def test_an_evaluation_that_a_hook_interrupted_is_repeated(hook, saved, tmp_path):
    """The next call of `train` makes up for it, with a model_dir and without."""

    class Once(Trainer):
        failed = False

        def fail(self, step, *results):
            del results
            if step == 2 and not self.failed:
                self.failed = True
                raise KeyError(hook)

    setattr(Once, hook, Once.fail)
    trainer = Once(
        model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        model_dir=tmp_path / "run" if saved else None,
        log_interval=2,
        verbose=False,
    )
    x = np.ones([4, 1], np.float32)
    arguments = {"global_batch": 4, "eval_data": (x, x), "eval_interval": 2}
    with pytest.raises(KeyError):
        trainer.train((x, x), 4, **arguments)
    summary = trainer.train((x, x), 4, **arguments)
    assert [*summary.history["val_step"]] == [2, 4]


@pytest.mark.thorough
@pytest.mark.parametrize("online", [False, True])
def test_evaluations_are_not_timed(monkeypatch, online):
    """The speed in a log line is that of the steps, without evaluations and what follows them."""
    clock = [0.0]

    class Slow(Linear):
        def on_evaluate_end(self, step, results):
            del step, results
            clock[0] += 1000

        def eval_step(self, batch):
            clock[0] += 1000
            return super().eval_step(batch)

    def tick():
        clock[0] += 1e-3
        return clock[0]

    monkeypatch.setattr("time.perf_counter", tick)
    lines = []
    trainer = Slow(log_interval=2, verbose=False, jit_compile=False)
    trainer.on_log = lambda _, values: lines.append(values)
    if online:
        for step in range(6):
            trainer.train_on_batch(slopes(1.0, 1.0))
            if step % 2:
                trainer.evaluate(slopes(1.0, 1.0), global_batch=2)
    else:
        data = slopes(1.0, 1.0)
        trainer.train(data, 6, global_batch=2, eval_data=data, eval_interval=2)
    for values in lines[1:]:
        assert values["examples_per_second"] > 1


@pytest.mark.thorough
@pytest.mark.parametrize("restarted", [False, True])
def test_the_best_result_is_one_on_this_data(tmp_path, restarted):
    """A summary names the best evaluation on the data that the call evaluates on, also if the program
    was started again; the same arrays, or others that are equal, are the same data.
    """

    def made():
        return Linear(model_dir=tmp_path, verbose=False, jit_compile=False)

    def trained(trainer, steps, slope):
        arrays = slopes(slope, slope)
        data = slopes(1.0, 1.0)
        return trainer.train(data, steps, global_batch=2, eval_data=arrays, eval_interval=2).best

    trainer = made()
    assert trained(trainer, 4, 1.0).step == 4
    trained(trainer, 6, -1.0)
    if restarted:
        trainer = made()
        assert trained(trainer, 4, 1.0).step == 4
    best = trained(trainer, 8, -1.0)
    assert (best.step, best.value) == (6, 5.0)
