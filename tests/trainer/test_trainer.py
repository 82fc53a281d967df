"""The trainer itself: its arguments, and what it can say before it has seen any data."""

import copy
import dataclasses
import inspect
import os
import pickle
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers import Linear, linear_model, slopes

import scaling
from trainer import (
    Action,
    Checkpoints,
    Divergence,
    Losses,
    Monitoring,
    Skips,
    Trainer,
    Updates,
)
from trainer.base.fields import argument_texts

X = np.ones([8, 1], np.float32)


def make(**arguments):
    """A trainer of (x, y) batches, with overrides from the test."""
    good = {"model": linear_model, "optimizer": keras.optimizers.SGD, "loss_fn": "mse"}
    return Trainer(**good | {"verbose": False} | arguments)


@pytest.mark.thorough
@pytest.mark.parametrize("length", [{"steps": np.int64(4)}, {"epochs": np.int32(2)}])
def test_numbers_of_numpy_train_and_are_saved_as_those_of_python(tmp_path, length):
    """Settings that come out of a search or an array are counts and fractions like others."""

    def weights(folder, integer, fraction, length):
        trainer = Trainer(
            model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
            optimizer=lambda: keras.optimizers.SGD(0.1),
            loss_fn="mse",
            precision="mixed_float16",
            num_microbatches=integer(2),
            updates=Updates(ema_momentum=fraction(0.5), global_clipnorm=fraction(2)),
            skips=Skips(max_retries=integer(3), on_overflow="retry", max_consecutive=integer(50)),
            steps_per_loop=integer(2),
            log_interval=integer(2),
            checkpoints=Checkpoints(interval=integer(2)),
            callbacks=[Action(print, every_steps=integer(2))],
            seed=integer(3),
            model_dir=folder,
            verbose=False,
        )
        x = np.ones([16, 1], np.float32)
        trainer.train((x, x), global_batch=8, eval_data=(x, x), eval_interval=integer(2), **length)
        assert (folder / "ckpt-4" / "run.json").exists()
        return trainer.model.get_weights()

    plain = {name: int(value) for name, value in length.items()}
    ours = weights(tmp_path / "numpy", np.int64, np.float32, length)
    assert ours == weights(tmp_path / "python", int, float, plain)


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
    with pytest.raises(RuntimeError, match=f"`{name}`"):
        ask(Linear(verbose=False))


@pytest.mark.parametrize(
    "arguments",
    [
        {"strategy": "miror"},
        {"precision": "fp16"},
        {"loss_scale": 1000},
        {"loss_scale": "dynamite"},
        {"jit_compile": "yes"},
        {"num_microbatches": 0},
    ],
)
def test_arguments_are_refused_by_the_constructor(arguments):
    """The constructor refuses whatever an argument alone shows to be wrong, by its name."""
    with pytest.raises((ValueError, TypeError), match=f"`{next(iter(arguments))}`"):
        make(**arguments)


GROUPS = [Checkpoints, Losses, Monitoring, Skips, Updates]


def test_the_constructor_has_at_most_twenty_arguments():
    """The rest are fields of groups, which are handed on whole."""
    arguments = inspect.signature(Trainer).parameters

    assert len(arguments) <= 20
    assert list(argument_texts(Trainer)) == list(arguments)
    assert {type(each.default) for each in arguments.values()} >= {*GROUPS}


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_frozen_and_describes_its_fields(group):
    """In their order; the defaults pass the checks."""
    names = [field.name for field in dataclasses.fields(group)]

    assert list(argument_texts(group)) == names
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(group(), names[0], None)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("keep_best", {"checkpoints": Checkpoints(keep_best=3)}),
        ("max_records", {"skips": Skips(max_records=5)}),
        ("profile_steps", {"monitoring": Monitoring(profile_steps=(3, 9))}),
        ("divergence", {"monitoring": Monitoring(divergence=Divergence(loss_above=9.0))}),
    ],
)
def test_settings_that_need_a_folder(name, arguments):
    """They would do nothing without `model_dir`, and say nothing."""
    with pytest.raises(ValueError, match=f"^`{name}` must be left out"):
        make(**arguments)


def test_settings_that_contradict_each_other(tmp_path):
    """A diverged run goes back to a checkpoint."""
    divergence = Monitoring(divergence=Divergence(loss_above=9.0))
    with pytest.raises(ValueError, match="`enabled`"):
        make(model_dir=tmp_path, checkpoints=Checkpoints(enabled=False), monitoring=divergence)


def test_refused_rules_never_reach_a_step():
    """L3: the constants of a rule are checked when it is created, before a trainer can use it."""
    with pytest.raises(ValueError, match="`growth_factor` must be greater than 1"):
        make(loss_scale=scaling.DynamicLossScale(growth_factor=0.5))


def test_nothing_is_built_before_data_comes(tmp_path):
    """Making a trainer calls no user code and writes no file."""

    class Failing(Linear):
        def build_model(self):
            raise AssertionError

        build_optimizer = build_metrics = build_model

    trainer = Failing(model_dir=tmp_path / "run", verbose=False)

    assert trainer.is_chief
    assert list(tmp_path.iterdir()) == []


def test_a_second_call_goes_on():
    """`steps` counts from the beginning of the run, over all calls of `train`."""
    trainer = Linear(verbose=False)
    first = trainer.train(slopes(1.0), steps=2, global_batch=1)
    second = trainer.train(slopes(1.0), steps=5, global_batch=1)

    assert (first.steps_run, second.steps_run) == (2, 3)
    assert trainer.weight == 1.0 - 5
    assert trainer.totals.attempted == 5


@pytest.mark.thorough
def test_the_folder_of_a_run_does_not_follow_the_working_directory(tmp_path, monkeypatch):
    """A relative `model_dir` is that of the directory in which the trainer was made."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    line = Linear(model_dir="runs/a", verbose=False)
    line.train(slopes(1.0, 1.0), 1, global_batch=2)
    monkeypatch.chdir("elsewhere")
    line.train(slopes(1.0, 1.0), 2, global_batch=2)

    assert sorted(path.name for path in (tmp_path / "runs" / "a").glob("ckpt-*")) == [
        "ckpt-1",
        "ckpt-2",
    ]
    assert list((tmp_path / "elsewhere").iterdir()) == []


CONFIGURES_DEVICES = """
import strategies
from trainer import Trainer

def two(devices):
    strategies.split_cpu(2)
    return strategies.create("mirrored")

strategies.register("two", two)
trainer = Trainer(loss_fn="mse", metrics=["mae"], strategy="two")
print(trainer.strategy.num_replicas_in_sync, "replicas")
"""


@pytest.mark.thorough
def test_a_strategy_may_configure_the_devices_before_a_metric_is_made():
    """A metric by name has variables, which would initialize the devices: with several workers, the
    collectives could not be configured any more.
    """
    run = [sys.executable, "-c", CONFIGURES_DEVICES]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "2 replicas\n", done.stderr


@pytest.mark.parametrize("hand_over", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_trainer_is_not_copied_or_pickled(hand_over):
    """Copies would share variables, and other processes have other strategies."""
    trainer = Trainer(model=linear_model, optimizer="sgd", loss_fn="mse", verbose=False)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        hand_over(trainer)


TWO = slopes(1.0, 1.0)


def interrupt(trainer):
    """Sends what Ctrl-C and a notebook's stop button send."""
    if trainer.totals.attempted == 20:
        os.kill(os.getpid(), signal.SIGINT)


def test_a_trainer_says_where_it_stands_also_after_an_interruption(tmp_path):
    """The line has the step, the precision, the loss scale, the replicas and the folder. A trainer
    that was interrupted goes on at the next call.
    """
    trainer = Linear(
        model_dir=tmp_path, verbose=False, callbacks=[Action(interrupt, every_steps=10)]
    )
    before = repr(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(TWO, steps=50, global_batch=2)
    interrupted = repr(trainer)
    step = trainer.totals.attempted
    trainer.train(TWO, steps=50, global_batch=2)

    end = f"float32, loss_scale 1, 1 replica, model_dir {str(tmp_path)!r}>"
    assert before == "<Linear: not started>"
    assert repr(Linear.__new__(Linear)) == before  # a debugger shows unfinished objects, too
    assert 20 <= step < 50  # the signal ends the loop that runs when it arrives
    assert interrupted == f"<Linear: at step {step}, {step} applied, 0 skipped, {end}"
    assert repr(trainer) == f"<Linear: at step 50, 50 applied, 0 skipped, {end}"
