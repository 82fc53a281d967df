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
from trainer import Trainer
from trainer.run.resolve import (
    check_background,
    check_one_process,
    check_recordable,
    dtype_policy,
    resolve_loss,
    resolve_rule,
    resolve_strategy,
)

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


def test_a_strategy_is_used_as_it_is(mirrored):
    """A strategy object is returned, and a name creates one."""
    strategy = mirrored(2)

    assert resolve_strategy(strategy) is strategy
    assert resolve_strategy("default").num_replicas_in_sync == 1


def test_a_loss_can_have_a_name():
    """A name stands for Keras's loss; anything else is returned as it is."""
    loss = keras.losses.MeanSquaredError()

    assert resolve_loss("mse") is keras.losses.get("mse")
    assert resolve_loss(loss) is loss
    assert resolve_loss(None) is None


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

    assert [record.getMessage() for record in caplog.records] == [
        "loss_scale=None with precision='mixed_float16': small gradients are lost to underflow. "
        "Use "
        'loss_scale="dynamic", or "none" if that is what you want.'
    ]


def test_one_process_can_record_and_try(mirrored):
    """Several replicas in one process are no reason to refuse."""
    for strategy in (strategies.create("default"), mirrored(2)):
        check_recordable(3, strategy)
        check_one_process("dry_run", strategy)


def test_several_processes_can_neither_record_nor_try(monkeypatch, mirrored):
    """With several workers, recorded overflows and dry runs are refused."""
    strategy = mirrored(2)
    found = dataclasses.replace(strategies.capabilities(strategy), multi_worker=True)
    monkeypatch.setattr(strategies, "capabilities", lambda _: found)

    check_recordable(0, strategy)
    with pytest.raises(ValueError, match="`max_records`"):
        check_recordable(3, strategy)
    with pytest.raises(ValueError, match="`dry_run`"):
        check_one_process("dry_run", strategy)


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


@pytest.mark.parametrize("method", ["train", "train_on_batch"])
def test_steps_are_not_taken_while_train_runs(method):
    """A hook that trains would take steps that the run does not count."""

    class Nested(Linear):
        def on_loop_end(self, step):
            self.train(slopes(1.0), 9, global_batch=1) if method == "train" else (
                self.train_on_batch(slopes(1.0))
            )

    with pytest.raises(RuntimeError, match=f"`{method}` must not be called"):
        Nested(verbose=False).train(slopes(1.0), 1, global_batch=1)


def test_servers_do_not_share_memory(monkeypatch):
    """A checkpoint that is copied to memory first would lack what the servers hold."""
    strategy = tf.distribute.get_strategy()
    check_background(True, strategy)
    monkeypatch.setattr(strategies, "is_asynchronous", lambda _: True)
    check_background(False, strategy)
    with pytest.raises(ValueError, match="`background`"):
        check_background(True, strategy)
