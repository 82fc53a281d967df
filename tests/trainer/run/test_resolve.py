"""Arguments are turned into the objects that they stand for."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from helpers import Linear, linear_model, slopes

import scaling
import strategies
from trainer import Checkpoints, Skips, Trainer
from trainer.run.resolve import dtype_policy, resolve_rule

HALF = scaling.Precision("mixed_float16")


def make(**arguments):
    """A trainer that has not seen any data."""
    good = {"model": linear_model, "optimizer": keras.optimizers.SGD, "loss_fn": "mse"}
    return Trainer(**good | {"verbose": False} | arguments)


@pytest.mark.parametrize(
    ("argument", "precision", "rule"),
    [
        ("auto", "mixed_float16", scaling.DynamicLossScale()),
        ("auto", "mixed_bfloat16", scaling.NoLossScale()),
        ("auto", "float32", scaling.NoLossScale()),
        (None, "mixed_float16", scaling.NoLossScale()),
        ("none", "mixed_float16", scaling.NoLossScale()),
        (1024, "float32", scaling.FixedLossScale(1024.0)),
        (np.float32(0.5), "float32", scaling.FixedLossScale(0.5)),
        ("dynamic:growth_interval=500", "float32", scaling.DynamicLossScale(growth_interval=500)),
    ],
)
def test_a_loss_scale_becomes_a_rule(argument, precision, rule):
    """A name, a number or None stands for a rule; what "auto" stands for depends on the precision."""
    assert resolve_rule(argument, scaling.Precision(precision)) == rule


def test_a_rule_is_used_as_it_is():
    """Any object with `initial_state` and `advance` is a rule."""
    rule = scaling.DynamicLossScale(growth_interval=3)

    assert resolve_rule(rule, HALF) is rule


def test_a_registered_optimizer_has_a_name():
    """An optimizer can be given by the name under which a user registered it with Keras."""

    @keras.saving.register_keras_serializable("own")
    class Halved(keras.optimizers.SGD):
        pass

    try:
        assert isinstance(make(optimizer="own>Halved").optimizer, Halved)
    finally:
        del keras.saving.get_custom_objects()["own>Halved"]


def test_float16_without_a_loss_scale_is_warned_of_once(monkeypatch, caplog):
    """Float16 without a loss scale is warned of once, unless loss_scale="none" says that it is
    intended.
    """
    monkeypatch.setattr(logging, "_log_counter_per_token", {})  # another test may have logged it
    with caplog.at_level("WARNING"):
        make(precision="mixed_float16", loss_scale="none")
        make(precision="mixed_bfloat16", loss_scale=None)
        make(precision="mixed_float16")
        assert not caplog.records
        for _ in range(2):
            make(precision="mixed_float16", loss_scale=None)

    [record] = caplog.records
    assert "loss_scale" in record.getMessage()


def test_layers_are_created_under_the_dtype_policy():
    """Within the context, layers have the policy of the precision; afterwards they do not."""
    with dtype_policy(HALF):
        inside = keras.layers.Dense(1)

    assert inside.dtype_policy.name == "mixed_float16"
    assert keras.layers.Dense(1).dtype_policy.name == "float32"


def test_the_dtype_policy_is_restored_if_building_fails():
    """`build_model` runs under the policy of the precision, which does not outlive its error."""

    class Failing(Linear):
        def build_model(self):
            assert keras.config.dtype_policy().name == "mixed_float16"
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        _ = Failing(precision="mixed_float16", verbose=False).model
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("train", {"train_data": slopes(1.0), "steps": 9, "global_batch": 1}),
        ("train_on_batch", {"batch": slopes(1.0)}),
        ("save_checkpoint", {}),
    ],
)
def test_steps_are_not_taken_or_saved_while_train_runs(tmp_path, method, arguments):
    """A hook that trains would take steps that the run does not count."""

    class Nested(Linear):
        def on_loop_end(self, step):
            getattr(self, method)(**arguments)

    with pytest.raises(RuntimeError, match=f"`{method}` must not be called"):
        Nested(model_dir=tmp_path, verbose=False).train(slopes(1.0), 1, global_batch=1)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("max_records", {"skips": Skips(max_records=3)}),
        ("background", {"checkpoints": Checkpoints(background=True)}),
    ],
)
def test_what_one_process_cannot_do_for_others_is_refused(monkeypatch, tmp_path, name, setting):
    """No process has the variables of another to record, or a server's memory to copy."""
    make(model_dir=tmp_path, **setting)
    found = strategies.capabilities(tf.distribute.get_strategy())
    found = dataclasses.replace(found, multi_worker=name == "max_records", asynchronous=True)
    monkeypatch.setattr(strategies, "capabilities", lambda _: found)
    with pytest.raises(ValueError, match=f"`{name}`"):
        make(model_dir=tmp_path, **setting)


def test_several_processes_try_nothing(monkeypatch):
    """The changes that the others make could not be undone."""
    trainer = make()
    found = dataclasses.replace(strategies.capabilities(trainer.strategy), multi_worker=True)
    monkeypatch.setattr(strategies, "capabilities", lambda _: found)
    for method in ("dry_run", "overfit_one_batch"):
        with pytest.raises(ValueError, match=f"`{method}`"):
            getattr(trainer, method)(slopes(1.0), global_batch=1)
