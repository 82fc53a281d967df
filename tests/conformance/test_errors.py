"""Values that public arguments refuse, each by an error that names the argument.

The words of an error stand where it is raised, and nowhere else.
"""

import contextlib
import functools
import inspect
import pathlib
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from helpers import linear_model

import scaling
import scaling.float8
import strategies
import trainer.flags
import trainer.report
import trainer.step
from strategies import factories, registry


def public(module):
    """The public names of a module, with their values."""
    return {name: getattr(module, name) for name in module.__all__}


# A new module needs a line here and one in `CASES`, and its examples' names in `names_in_examples`.
MODULES = {
    "scaling": public(scaling),
    "scaling.float8": public(scaling.float8),
    "strategies": public(strategies),
    "trainer": public(trainer),
    "trainer.flags": {
        "define_flags": trainer.flags.define_flags,
        "make_trainer": trainer.flags.make_trainer,
        "run_mode": trainer.flags.run_mode,
    },
    "trainer.report": public(trainer.report),
    "trainer.step": public(trainer.step),
}

# Cases by public name (`Class.method` for a method): the argument and an example. If the call itself
# is the mistake, the name of the function arguments_by_name the argument's place. The optional third item is
# the name that the message uses, if it differs: `parse_rule` says `loss_scale`, as `Trainer` does.
SCALING = {
    "DynamicLossScale": [
        ("initial_scale", "scaling.DynamicLossScale(initial_scale=1000.0)"),
        ("initial_scale", "scaling.DynamicLossScale(initial_scale=2.0**25)"),
        ("growth_interval", "scaling.DynamicLossScale(growth_interval=0)"),
        ("growth_interval", "scaling.DynamicLossScale(growth_interval=2**30 + 1)"),
        ("growth_factor", "scaling.DynamicLossScale(growth_factor=1.0)"),
        ("growth_factor", "scaling.DynamicLossScale(growth_factor=1.5)"),
        ("backoff_factor", "scaling.DynamicLossScale(backoff_factor=2.0)"),
        ("min_scale", "scaling.DynamicLossScale(min_scale=0.0)"),
        ("min_scale", "scaling.DynamicLossScale(min_scale=2.0**25)"),
        ("max_scale", 'scaling.DynamicLossScale(max_scale=float("inf"))'),
        ("hysteresis", "scaling.DynamicLossScale(hysteresis=1.5)"),
        ("hysteresis_refill", 'scaling.DynamicLossScale(hysteresis_refill="never")'),
        ("grace_steps", "scaling.DynamicLossScale(grace_steps=-1)"),
        ("low_scale_intervals", "scaling.DynamicLossScale(low_scale_intervals=(2.0, 25))"),
        ("low_scale_intervals", "scaling.DynamicLossScale(low_scale_intervals=((2.0, 0),))"),
    ],
    "DynamicLossScale.advance": [
        ("state", "rule.advance(2.0**15, True)"),
        ("verdict", "rule.advance(state, 1.0)"),
    ],
    "FixedLossScale": [("loss_scale", "scaling.FixedLossScale(1000)")],
    "FixedLossScale.advance": [
        ("state", "scaling.FixedLossScale(8.0).advance(state, True)"),
        (
            "verdict",
            "fixed = scaling.FixedLossScale(8.0); fixed.advance(fixed.initial_state(), [True])",
        ),
    ],
    "GradientStats.flushed": [("factor", "stats.flushed(factor=3.0)")],
    "HeadroomLossScale": [
        ("initial_scale", "scaling.HeadroomLossScale(initial_scale=1000.0)"),
        ("headroom_bits", "scaling.HeadroomLossScale(headroom_bits=-1)"),
        ("headroom_bits", "scaling.HeadroomLossScale(headroom_bits=41)"),
        ("growth_interval", "scaling.HeadroomLossScale(growth_interval=0)"),
        ("growth_factor", "scaling.HeadroomLossScale(growth_factor=0.5)"),
        ("backoff_factor", "scaling.HeadroomLossScale(backoff_factor=1.0)"),
        ("min_scale", "scaling.HeadroomLossScale(min_scale=-1.0)"),
        ("max_scale", "scaling.HeadroomLossScale(max_scale=65504.0)"),
    ],
    "HeadroomLossScale.advance": [
        ("state", "scaling.HeadroomLossScale().advance(state, True)"),
        (
            "verdict",
            "headroom = scaling.HeadroomLossScale(); headroom.advance(headroom.initial_state(), 1)",
        ),
    ],
    "LayerwiseLossScale": [
        ("max_layer_scale", "scaling.LayerwiseLossScale(max_layer_scale=0.5)"),
        ("max_total_scale", "scaling.LayerwiseLossScale(max_total_scale=1000.0)"),
        ("underflow_share", "scaling.LayerwiseLossScale(underflow_share=1)"),
    ],
    "LayerwiseLossScale.total_scale": [
        ("gradient", "scaling.LayerwiseLossScale().total_scale(tf.range(2), batch, [], 1.0)"),
        ("inputs", "scaling.LayerwiseLossScale().total_scale(batch, None, [tf.eye(2)], 1.0)"),
        ("kernels", "scaling.LayerwiseLossScale().total_scale(batch, batch, tf.eye(2), 1.0)"),
        ("above", "scaling.LayerwiseLossScale().total_scale(batch, batch, [], tf.ones([2]))"),
    ],
    "LogMaxLossScale": [
        ("initial_scale", "scaling.LogMaxLossScale(initial_scale=1000.0)"),
        ("min_scale", "scaling.LogMaxLossScale(min_scale=0.0)"),
        ("max_scale", "scaling.LogMaxLossScale(max_scale=2.0**127)"),
        ("mean_decay", "scaling.LogMaxLossScale(mean_decay=1.0)"),
        ("deviation_decay", "scaling.LogMaxLossScale(deviation_decay=-0.1)"),
        ("deviations", "scaling.LogMaxLossScale(deviations=101)"),
    ],
    "LogMaxLossScale.advance": [
        ("state", "scaling.LogMaxLossScale().advance(None, True)"),
        (
            "verdict",
            "logmax = scaling.LogMaxLossScale(); logmax.advance(logmax.initial_state(), None)",
        ),
    ],
    "LossScaler": [
        ("rule", 'scaling.LossScaler("dynamic")'),
        ("rule", "scaling.LossScaler(scaling.DynamicLossScale)"),
        (
            "LossScaler",
            "outside = scaling.LossScaler(rule); mirrored.run(lambda: "
            "(outside.unscale(gradients, outside.scale(1.0)[1]), outside.update(True)))",
        ),
    ],
    "LossScaler.scale": [("loss", "scaler.scale(tf.constant(1))")],
    "LossScaler.unscale": [
        ("gradients", "scaler.unscale([tf.constant(1)], token)"),
        ("token", "scaler.unscale(gradients, scaler.state)"),
        ("token", "scaler.unscale(gradients, token); scaler.unscale(gradients, token)"),
        ("token", "scaler.unscale(gradients, scaling.LossScaler(rule).scale(1.0)[1])"),
        ("token", "scaler.reset(); scaler.unscale(gradients, token)"),
    ],
    "LossScaler.update": [
        ("verdict", "scaler.update(gradients)"),
        ("update", "scaling.LossScaler(rule).update(True)"),
        ("update", "scaler.scale(1.0); scaler.update(True)"),
    ],
    "LossScaler.prepare_update": [("verdict", "scaler.prepare_update(gradients)")],
    "LossScaler.assign": [("state", 'scaler.assign({"loss_scale": 8.0})')],
    "LossScaler.merge": [
        ("before", 'scaler.merge({"loss_scale": 8.0}, scaler.state)', "state"),
        ("after", 'scaler.merge(scaler.state, {"loss_scale": 8.0})', "state"),
        ("verdict", 'scaler.merge(scaler.state, scaler.state, "finite")'),
    ],
    "LossScaler.load_state_dict": [
        ("state", 'scaler.load_state_dict({"loss_scale": 8.0})'),
        (
            "state",
            'scaler.load_state_dict(scaler.state_dict() | {"loss_scale": 3.0})',
            "loss_scale",
        ),
    ],
    "NoLossScale.advance": [
        ("state", "scaling.NoLossScale().advance(state, True)"),
        (
            "verdict",
            'none = scaling.NoLossScale(); none.advance(none.initial_state(), "finite")',
        ),
    ],
    "Precision": [("name", 'scaling.Precision("float16")', "precision")],
    "Precision.cast_to_compute": [
        ("tree", 'scaling.Precision("mixed_float16").cast_to_compute([model])')
    ],
    "Precision.cast_to_variable": [
        ("tree", 'scaling.Precision("mixed_float16").cast_to_variable([model])')
    ],
    "TolerantLossScale": [
        ("initial_scale", "scaling.TolerantLossScale(initial_scale=1000.0)"),
        ("growth_interval", "scaling.TolerantLossScale(growth_interval=True)"),
        ("growth_factor", "scaling.TolerantLossScale(growth_factor=3.0)"),
        ("backoff_factor", "scaling.TolerantLossScale(backoff_factor=0.8)"),
        ("min_scale", "scaling.TolerantLossScale(min_scale=2.0**-127)"),
        ("max_scale", "scaling.TolerantLossScale(max_scale=3.0)"),
        ("tolerance", "scaling.TolerantLossScale(tolerance=1.0)"),
        ("scale_interval", 'scaling.TolerantLossScale(scale_interval="no")'),
    ],
    "TolerantLossScale.advance": [
        ("state", "scaling.TolerantLossScale().advance(state, True)"),
        (
            "verdict",
            "tolerant = scaling.TolerantLossScale(); tolerant.advance(tolerant.initial_state(), 0)",
        ),
    ],
    "Verdict": [
        ("grads_finite", "rule.advance(state, scaling.Verdict(1.0))", "verdict.grads_finite"),
        ("cause", "rule.advance(state, scaling.Verdict(False, cause=9))", "verdict.cause"),
        (
            "max_magnitude",
            "headroom = scaling.HeadroomLossScale(); "
            "headroom.advance(headroom.initial_state(), scaling.Verdict(True))",
            "verdict.max_magnitude",
        ),
    ],
    "all_finite": [("structure", "scaling.all_finite([model])")],
    "as_verdict": [
        ("verdict", "scaling.as_verdict(1.0)"),
        ("verdict", "scaling.as_verdict([True, False])"),
    ],
    "coalesce": [
        ("gradient", "scaling.coalesce(tf.IndexedSlices(tf.range(2), tf.range(2)))", "gradients")
    ],
    "find_cause": [
        (flag, f'scaling.find_cause(**finite | {{"{flag}": 1.0}})')
        for flag in inspect.signature(scaling.find_cause).parameters
    ],
    "gradient_stats": [
        ("gradients", "scaling.gradient_stats([tf.constant(1)], state)"),
        ("state", "scaling.gradient_stats(gradients, 2.0**15)"),
    ],
    "layerwise_gradients": [
        ("layers", "scaling.layerwise_gradients([], batch, tf.reduce_mean)"),
        ("layers", "scaling.layerwise_gradients([model, model], batch, tf.reduce_mean)"),
        ("inputs", "scaling.layerwise_gradients([model], None, tf.reduce_mean)"),
        ("loss_fn", 'scaling.layerwise_gradients([model], batch, "mse")'),
        ("rule", "scaling.layerwise_gradients([model], batch, tf.reduce_mean, rule)"),
        (
            "training",
            'scaling.layerwise_gradients([model], batch, tf.reduce_mean, training="yes")',
        ),
    ],
    "parse_rule": [
        ("text", "scaling.parse_rule(1024)"),
        ("text", 'scaling.parse_rule("1000")', "loss_scale"),
        ("text", 'scaling.parse_rule("pytorhc")', "loss_scale"),
        ("text", 'scaling.parse_rule("fixed")', "loss_scale"),
        ("text", 'scaling.parse_rule("dynamic:500")', "loss_scale"),
        ("text", 'scaling.parse_rule("1024:growth_interval=5")', "loss_scale"),
        ("text", 'scaling.parse_rule("dynamic:growth_intervall=500")', "loss_scale"),
    ],
    "preset": [
        ("name", 'scaling.preset("deepsped")'),
        ("name", 'scaling.preset("caffe")'),
        ("version", 'scaling.preset("deepspeed", version="0.17")'),
        ("version", 'scaling.preset("megatron", version="0.9")'),
        ("overrides", 'scaling.preset("pytorch", growth_intervall=500)'),
    ],
    "recommend": [
        ("stats", "scaling.recommend(gradients)"),
        ("names", 'scaling.recommend(stats, ["kernel", "bias"])'),
        ("headroom_bits", "scaling.recommend(stats, headroom_bits=0.5)"),
    ],
    "scale_loss": [
        ("loss", "scaling.scale_loss(tf.constant(1), state)"),
        ("loss", "scaling.scale_loss(None, state)"),
        ("state", "scaling.scale_loss(1.0, 2.0**15)"),
    ],
    "unscale_gradients": [
        ("gradients", "scaling.unscale_gradients([tf.constant(1j)], state)"),
        ("state", "scaling.unscale_gradients(gradients, 2.0**15)"),
    ],
    "update_together": [
        ("scalers", "scaling.update_together(scaler, [True])"),
        ("scalers", "scaling.update_together([scaler, scaler], [True, True])"),
        ("verdicts", "scaling.update_together([scaler], [True, True])"),
    ],
}

FLOAT8 = {
    "BlockScaling": [
        ("dtype", 'float8.BlockScaling("float8")'),
        ("block", "float8.BlockScaling(block=128)"),
        ("block", "float8.BlockScaling(block=(0, 128))"),
        ("axes", "float8.BlockScaling(axes=(-1,))"),
        ("axes", "float8.BlockScaling(axes=(0, 0))"),
        ("margin", "float8.BlockScaling(margin=0.5)"),
        ("power_of_two", "float8.BlockScaling(power_of_two=1)"),
    ],
    "BlockScaling.initial_state": [("shape", "float8.BlockScaling().initial_state(3)")],
    "BlockScaling.amax": [
        ("x", "float8.BlockScaling().amax([1])"),
        ("x", "float8.BlockScaling().amax([1.0])"),
    ],
    "BlockScaling.choose_scale": [
        ("state", "float8.BlockScaling().choose_scale(state, 1.0)"),
        ("amax", "(one := float8.BlockScaling()).choose_scale(one.initial_state(), 3)"),
    ],
    "BlockScaling.advance": [
        ("state", "float8.BlockScaling().advance(state, 1.0)"),
        ("amax", "(one := float8.BlockScaling()).advance(one.initial_state(), 3)"),
    ],
    "BlockScaling.spread": [
        ("x", "float8.BlockScaling().spread([[1.0]], [1.0])"),
        ("scale", "float8.BlockScaling().spread([[1.0]], [[1.0], [2.0]])"),
    ],
    "CurrentScaling": [
        ("dtype", 'float8.CurrentScaling("float8")'),
        ("margin", "float8.CurrentScaling(margin=0.5)"),
        ("power_of_two", "float8.CurrentScaling(power_of_two=1)"),
    ],
    "CurrentScaling.initial_state": [("shape", "float8.CurrentScaling().initial_state(3)")],
    "CurrentScaling.amax": [("x", "float8.CurrentScaling().amax([1])")],
    "CurrentScaling.choose_scale": [
        ("state", "float8.CurrentScaling().choose_scale(state, 1.0)"),
        ("amax", "(one := float8.CurrentScaling()).choose_scale(one.initial_state(), 3)"),
    ],
    "CurrentScaling.advance": [
        ("state", "float8.CurrentScaling().advance(state, 1.0)"),
        ("amax", "(one := float8.CurrentScaling()).advance(one.initial_state(), 3)"),
    ],
    "DelayedScaling": [
        ("dtype", 'float8.DelayedScaling("float8")'),
        ("history_length", "float8.DelayedScaling(history_length=0)"),
        ("algorithm", 'float8.DelayedScaling(algorithm="mean")'),
        ("includes_newest", 'float8.DelayedScaling(includes_newest="yes")'),
        ("keeps_nonfinite", "float8.DelayedScaling(keeps_nonfinite=1)"),
        ("fast_reciprocal", "float8.DelayedScaling(fast_reciprocal=None)"),
        ("margin", "float8.DelayedScaling(margin=0.5)"),
        ("power_of_two", "float8.DelayedScaling(power_of_two=1)"),
    ],
    "DelayedScaling.initial_state": [("shape", "float8.DelayedScaling().initial_state(3)")],
    "DelayedScaling.amax": [("x", "float8.DelayedScaling().amax([1])")],
    "DelayedScaling.choose_scale": [
        ("state", "float8.DelayedScaling().choose_scale(state, 1.0)"),
        ("amax", "(one := float8.DelayedScaling()).choose_scale(one.initial_state(), 3)"),
        ("amax", "(one := float8.DelayedScaling()).choose_scale(one.initial_state(), [1.0, 2.0])"),
    ],
    "DelayedScaling.advance": [
        ("state", "float8.DelayedScaling().advance(state, 1.0)"),
        ("amax", "(one := float8.DelayedScaling()).advance(one.initial_state(), 3)"),
        ("amax", "(one := float8.DelayedScaling()).advance(one.initial_state(), [1.0, 2.0])"),
    ],
    "dequantize": [
        ("x", "float8.dequantize(tf.constant([1]), 1.0)"),
        ("scale", "float8.dequantize([1.0], True)"),
        ("scale", "float8.dequantize([1.0], 0.0)"),
        ("dtype", 'float8.dequantize([1.0], 1.0, "float32")'),
    ],
    "losses_of_cast": [
        ("x", 'float8.losses_of_cast("one", 1.0, "float8_e5m2")'),
        ("scale", 'float8.losses_of_cast([1.0], -1.0, "float8_e5m2")'),
        ("dtype", 'float8.losses_of_cast([1.0], 1.0, "float16")'),
    ],
    "preset": [
        ("name", 'float8.preset("keras")'),
        ("dtype", 'float8.preset("keras3", "e5m2")'),
    ],
    "quantize": [
        ("x", 'float8.quantize([1, 2], 1.0, "float8_e4m3fn")'),
        ("scale", 'float8.quantize([1.0], None, "float8_e4m3fn")'),
        ("scale", 'float8.quantize(tf.ones([130]), [1.0, 2.0], "float8_e4m3fn")'),
        ("dtype", "float8.quantize([1.0], 1.0, tf.float16)"),
    ],
}

STRATEGIES = {
    "agree": [
        ("flag", "strategies.agree(1)"),
        ("flag", "strategies.agree([True, False])"),
    ],
    "any_worker": [
        ("flag", 'strategies.any_worker("no", tf.distribute.get_strategy())'),
        ("strategy", 'strategies.any_worker(False, "mirrored")'),
    ],
    "capabilities": [
        ("strategy", 'strategies.capabilities("mirrored")'),
    ],
    "decides_inside": [
        ("strategy", 'strategies.decides_inside("tpu")'),
    ],
    "exchanges_one_shape": [
        ("strategy", 'strategies.exchanges_one_shape("tpu")'),
    ],
    "from_chief": [
        ("number", "strategies.from_chief(0.5, tf.distribute.get_strategy())"),
        ("strategy", 'strategies.from_chief(1, "mirrored")'),
    ],
    "has_workers": [
        ("strategy", 'strategies.has_workers("mirrored")'),
    ],
    "is_asynchronous": [
        ("strategy", 'strategies.is_asynchronous("parameter_server")'),
    ],
    "is_chief": [
        ("strategy", "strategies.is_chief(None)"),
    ],
    "check_devices": [
        ("strategy", 'strategies.check_devices("mirrored")'),
        ("strategy", 'strategies.check_devices(tf.distribute.OneDeviceStrategy("GPU:7"))'),
    ],
    "check_divisible": [
        ("global_batch", "strategies.check_divisible(3, num_replicas=2, num_microbatches=2)"),
        ("global_batch", "strategies.check_divisible(4.5, num_replicas=2, num_microbatches=2)"),
        ("num_replicas", "strategies.check_divisible(64, num_replicas=0, num_microbatches=2)"),
        ("num_microbatches", "strategies.check_divisible(64, num_replicas=2, num_microbatches=-1)"),
    ],
    "create": [
        ("name", 'strategies.create("miror")', "strategy"),
        ("name", 'strategies.create("tpu")', "strategy"),
        ("devices", 'strategies.create("default", ["CPU:0"])'),
        ("devices", 'strategies.create("one_device", ["CPU:0", "CPU:1"])'),
        ("devices", 'strategies.create("one_device", "CPU:0")'),
        ("devices", 'strategies.create("mirrored", ["CPU:0", "CPU:0"])'),
        ("devices", 'strategies.create("mirrored", 2)'),
        ("devices", 'strategies.create("mirrored", ["GPU:6", "GPU:7"])', "strategy"),
    ],
    "register": [
        ("name", 'strategies.register("mirrored", lambda devices: mirrored)'),
        ("name", "strategies.register(None, lambda devices: mirrored)"),
        ("factory", 'strategies.register("mine", mirrored)'),
    ],
    "split_cpu": [
        ("count", "strategies.split_cpu(0)"),
        ("count", "strategies.split_cpu(3)"),
    ],
    "sum_gradients": [
        ("gradients", "strategies.sum_gradients([tf.constant(True)])"),
        ("dtype", 'strategies.sum_gradients(gradients, "float8")'),
        ("bucket_bytes", "strategies.sum_gradients(gradients, bucket_bytes=0)"),
        ("sum_gradients", "with mirrored.scope(): strategies.sum_gradients(gradients)"),
    ],
    "take": [
        ("share", "strategies.take(batch, 0, 2)"),
        ("index", "strategies.take(share, 2, parts=2)"),
        ("parts", "strategies.take(share, 0, parts=0)"),
    ],
    "whole": [
        ("weights", "strategies.whole(tf.ones([4, 1]), 1.0)"),
    ],
}

GO = ".train(data, 1, global_batch=4)"
TRAINER = {
    "Action": [
        ("call", "Action(None, every_steps=10)"),
        ("every_steps", "Action(print)"),
        ("every_steps", "Action(print, every_steps=0)"),
        ("every_secs", 'Action(print, every_secs="60")'),
        ("every_secs", "Action(print, every_steps=10, every_secs=60)", "every_steps"),
    ],
    "AimTracker": [
        ("experiment", "AimTracker(None)"),
        ("repo", "AimTracker(repo=3)"),
    ],
    "MLflowTracker": [
        ("experiment", 'MLflowTracker("")'),
        ("tracking_uri", "MLflowTracker(tracking_uri=3)"),
    ],
    "WandbTracker": [("project", "WandbTracker(None)")],
    "Divergence": [
        ("loss_above", "Divergence()"),
        ("loss_above", 'Divergence(loss_above=float("nan"))'),
        ("loss_above", 'Divergence(loss_above="100")'),
        ("rise", "Divergence(rise=1.0)"),
        ("window", "Divergence(rise=2.0, window=0)"),
        ("max_recoveries", "Divergence(rise=2.0, max_recoveries=0)"),
        ("skip_data", 'Divergence(rise=2.0, skip_data="no")'),
    ],
    "Trainer": [
        ("model", 'Trainer(model="resnet")'),
        ("model", f"Trainer(model=None){GO}"),
        ("model", f"Trainer(model=lambda: batch){GO}"),
        ("optimizer", "Trainer(optimizer=0.1)"),
        ("optimizer", 'Trainer(optimizer="sdg")'),
        ("loss_fn", 'Trainer(loss_fn="categorical_crosentropy")'),
        ("loss_fn", "Trainer(loss_fn=keras.losses.MeanSquaredError)"),
        ("loss_fn", "Trainer(loss_fn=[0.5])"),
        ("loss_fn", 'Trainer(loss_fn=keras.losses.MeanSquaredError(reduction="sum"))'),
        ("loss_fn", "Trainer(loss_fn=keras.losses.Circle())"),
        ("loss_fn", "Trainer().train((batch, tf.ones([4, 3])), 1, global_batch=4)"),
        ("loss_fn", "Trainer(loss_fn=keras.losses.Dice())"),
        ("loss_fn", 'Trainer(loss_fn=["mse", "mae"], loss_reduction="global")'),
        (
            "loss_fn",
            'Trainer(loss_fn={"a": keras.losses.SparseCategoricalCrossentropy(ignore_class=0)})',
        ),
        ("loss_weights", "Trainer(loss_weights=[2.0])"),
        ("loss_weights", 'Trainer(loss_fn=["mse", "mae"], loss_weights=[2.0])'),
        ("loss_weights", 'Trainer(loss_fn={"a": "mse"}, loss_weights={"a": float("inf")})'),
        ("class_weight", "Trainer(class_weight=[1.0, 5.0])"),
        ("class_weight", "Trainer(class_weight={0: float('inf')})"),
        ("class_weight", 'Trainer(loss_fn=["mse"], class_weight={0: 2.0})'),
        ("metrics", 'Trainer(loss_fn=["mse"], metrics={"a": ["mae"]})'),
        (
            "metrics",
            'Trainer(loss_fn={"a": "mse", "b": "mse"}, metrics={"a": ["mae", "mae"]}).evaluate(data,'
            " global_batch=4)",
        ),
        ("metrics", 'Trainer(metrics="accuracy")'),
        ("metrics", 'Trainer(metrics=["accuracy"], loss_fn="mse")'),
        ("metrics", 'Trainer(metrics=["acuracy"], loss_fn="binary_crossentropy")'),
        ("metrics", "Trainer(metrics=[keras.metrics.AUC])"),
        ("metrics", 'Trainer(metrics=["mae", keras.metrics.MeanSquaredError(name="mae")])'),
        ("metrics", f"Trainer(metrics=lambda: [keras.metrics.Mean()]){GO}"),
        ("metrics", f'Trainer(metrics=lambda: {{"loss": keras.metrics.Mean()}}){GO}'),
        ("model_dir", "Trainer(model_dir=3)"),
        ("model_dir", 'Trainer(model_dir="")'),
        ("model_dir", 'Trainer(model_dir="gs://bucket/run")'),
        ("model_dir", 'Trainer(model_dir="/runs/[64,32]")'),
        ("model_dir", f'Trainer(model_dir="notes.txt"){GO}'),
        ("strategy", 'Trainer(strategy="miror")'),
        ("strategy", "Trainer(strategy=2)"),
        ("precision", 'Trainer(precision="float16")'),
        ("loss_scale", "Trainer(loss_scale=1000)"),
        ("loss_scale", "Trainer(loss_scale=True)"),
        ("loss_scale", 'Trainer(loss_scale="dynamite")'),
        ("loss_scale", 'Trainer(loss_scale="1024:growth_interval=5")'),
        ("loss_scale", 'Trainer(loss_scale="fixed:loss_scale=1024:growth_interval=5")'),
        ("loss_scale", "Trainer(loss_scale=[1024])"),
        ("loss_scale", "Trainer(loss_scale=scaling.DynamicLossScale)"),
        ("loss_reduction", 'Trainer(loss_reduction="sum")'),
        ("num_microbatches", 'Trainer(loss_reduction="global", num_microbatches=2)'),
        ("num_microbatches", "Trainer(num_microbatches=0)"),
        ("num_microbatches", f"Trainer(num_microbatches=8){GO}", "global_batch"),
        ("reduce_dtype", 'Trainer(reduce_dtype="float8")'),
        ("reduce_dtype", 'Trainer(reduce_dtype="float16")'),
        ("reduce_bucket_bytes", "Trainer(reduce_bucket_bytes=0)"),
        ("global_clipnorm", "Trainer(global_clipnorm=0.0)"),
        ("global_clipnorm", "Trainer(global_clipnorm=1.0, clipnorm=1.0)"),
        (
            "global_clipnorm",
            f"Trainer(optimizer=keras.optimizers.SGD(clipnorm=2.0), global_clipnorm=1.0){GO}",
        ),
        ("clipnorm", 'Trainer(clipnorm="1.0")'),
        ("clipvalue", "Trainer(clipvalue=-1.0)"),
        ("ema_momentum", "Trainer(ema_momentum=1.0)"),
        (
            "ema_momentum",
            f"Trainer(optimizer=keras.optimizers.SGD(use_ema=True), ema_momentum=0.9){GO}",
        ),
        ("alternate_optimizers", 'Trainer(alternate_optimizers="yes")'),
        ("updates_per_step", "Trainer(alternate_optimizers=True, updates_per_step=5)"),
        (
            "updates_per_step",
            'Trainer(alternate_optimizers=True, updates_per_step={"critic": 0})',
        ),
        ("updates_per_step", 'Trainer(updates_per_step={"critic": 5})'),
        ("steps_per_loop", "Trainer(steps_per_loop=2.5)"),
        ("enable_checkpointing", "Trainer(enable_checkpointing=0)"),
        ("checkpoint_interval", "Trainer(checkpoint_interval=0)"),
        ("checkpoint_interval", "Trainer(enable_checkpointing=False, checkpoint_interval=10)"),
        (
            "divergence",
            'Trainer(enable_checkpointing=False, model_dir="runs/a", divergence=Divergence(9.0))',
        ),
        ("checkpoint_secs", "Trainer(checkpoint_secs=-60)"),
        ("checkpoint_secs", 'Trainer(checkpoint_secs="600")'),
        ("max_to_keep", "Trainer(max_to_keep=0)"),
        ("async_checkpoint", "Trainer(async_checkpoint=None)"),
        ("keep_best", "Trainer(keep_best=-1)"),
        ("keep_best", "Trainer(keep_best=3)"),
        ("best_metric", "Trainer(best_metric=None)"),
        (
            "best_metric",
            'Trainer(model_dir="runs/new", keep_best=1, best_metric="accuracy")'
            ".train(data, 1, global_batch=4, eval_data=data)",
        ),
        ("best_is", 'Trainer(best_is="lower")'),
        ("data_resume", 'Trainer(data_resume="exakt")'),
        ("allow_changes", 'Trainer(allow_changes="seed")'),
        ("allow_changes", 'Trainer(allow_changes=["weights"])'),
        ("allow_changes", "Trainer(allow_changes=True)"),
        ("init_from", "Trainer(init_from=1000)"),
        ("init_from", f'Trainer(init_from="runs/old"){GO}'),
        ("init_from_skip", 'Trainer(init_from_skip=["head/"])'),
        ("init_from_skip", 'Trainer(init_from="runs/old", init_from_skip="head/")'),
        ("init_from_skip", 'Trainer(init_from="runs/old", init_from_skip=["head("])'),
        ("divergence", "Trainer(divergence=100.0)"),
        ("divergence", "Trainer(divergence=Divergence(loss_above=100.0))"),
        ("log_interval", "Trainer(log_interval=0)"),
        ("verbose", "Trainer(verbose=1)"),
        ("profile_steps", "Trainer(profile_steps=(9, 3))"),
        ("profile_steps", "Trainer(profile_steps=(3, 9))"),
        ("jit_compile", 'Trainer(jit_compile="yes")'),
        ("jit_compile", "Trainer(jit_compile=1)"),
        ("seed", "Trainer(seed=-1)"),
        ("seed", "Trainer(seed=2**32)"),
        ("on_overflow", 'Trainer(on_overflow="rety")'),
        ("max_retries", "Trainer(max_retries=0)"),
        ("attribute_causes", "Trainer(attribute_causes=0)"),
        ("on_nonfinite_loss", 'Trainer(on_nonfinite_loss="retry")'),
        ("max_consecutive_skips", "Trainer(max_consecutive_skips=0)"),
        ("on_stuck", 'Trainer(on_stuck="wait")'),
        ("on_stuck", f'Trainer(model=tf.Module, on_stuck="float32"){GO}'),
        ("max_overflow_records", "Trainer(max_overflow_records=-1)"),
        ("max_overflow_records", "Trainer(max_overflow_records=5)"),
        ("max_overflow_bytes", "Trainer(max_overflow_bytes=1e9)"),
        ("record_gradients", "Trainer(record_gradients=10)"),
        ("check_gradients", "Trainer(check_gradients=1)"),
        ("check_data", "Trainer(check_data=1)"),
        ("actions", "Trainer(actions=[print])"),
        ("actions", "Trainer(actions=print)"),
        ("trackers", 'Trainer(trackers=["wand"])'),
        ("trackers", 'Trainer(trackers="wandb")'),
        ("callbacks", "Trainer(callbacks=[print])"),
        ("callbacks", "Trainer(callbacks=[keras.callbacks.EarlyStopping()])"),
        ("callbacks", "Trainer(callbacks=[callback, callback])"),
    ],
    "Trainer.train": [
        ("train_data", 'Trainer().train("digits", 1, global_batch=4)'),
        ("train_data", "Trainer().train(([1.0, 2.0], [1.0, 2.0]), 1, global_batch=2)"),
        ("train_data", "Trainer().train((batch, batch[:2]), 1, global_batch=4)"),
        ("train_data", "Trainer().train((batch[:0], batch[:0]), 1, global_batch=4)"),
        ("train_data", "Trainer().train(tf.data.Dataset.range(4), 1)"),
        ("train_data", "Trainer().train((np.ma.masked_array(batch), batch), 1, global_batch=4)"),
        ("train_data", "Trainer().train((tf.ones([]), tf.ones([])), 1, global_batch=4)"),
        (
            "train_data",
            'Trainer(model_dir="runs/new")'
            ".train(tf.data.Dataset.from_tensors(data)"
            ".map(lambda x, y: (x + tf.random.normal([4, 1]), y)), 1)",
        ),
        ("steps", "Trainer().train(data, global_batch=4)"),
        ("steps", "Trainer().train(data, 1, epochs=1, global_batch=4)"),
        ("steps", "Trainer().train(data, 0, global_batch=4)"),
        ("epochs", "Trainer().train(data, epochs=0.5, global_batch=4)"),
        (
            "epochs",
            "Trainer().train(tf.data.Dataset.from_tensors(data).repeat(), epochs=1)",
        ),
        ("global_batch", "Trainer().train(data, 1)"),
        ("global_batch", 'Trainer().train(data, 1, global_batch="4")'),
        ("global_batch", "Trainer(strategy=mirrored).train(data, 1, global_batch=1)"),
        (
            "global_batch",
            "Trainer().train(tf.data.Dataset.from_tensors(data), 1, global_batch=4)",
        ),
        ("eval_data", 'Trainer().train(data, 1, global_batch=4, eval_data="test")'),
        (
            "eval_data",
            'Trainer(model_dir="runs/new", keep_best=3).train(data, 1, global_batch=4)',
        ),
        (
            "eval_data",
            "Trainer().train(data, 1, global_batch=4, "
            "eval_data=tf.data.Dataset.from_tensors(data).repeat())",
        ),
        ("eval_interval", "Trainer().train(data, 1, global_batch=4, eval_interval=1)"),
        (
            "eval_interval",
            "Trainer().train(data, 1, global_batch=4, eval_data=data, eval_interval=0)",
        ),
        ("eval_data", "Trainer().train(data, 1, global_batch=4, eval_data={1: data})"),
        ("eval_steps", "Trainer().train(data, 1, global_batch=4, eval_steps=1)"),
        (
            "evaluate_at_start",
            'Trainer().train(data, 1, global_batch=4, eval_data=data, evaluate_at_start="yes")',
        ),
    ],
    "Trainer.restore": [("batch", "started.restore((batch, None))")],
    "Trainer.train_on_batch": [
        ("batch", "started.train_on_batch((batch, None))"),
        ("batch", "started.train_on_batch((batch, batch[:2]))"),
    ],
    "Trainer.save_checkpoint": [("save_checkpoint", "started.save_checkpoint()", "model_dir")],
    "Trainer.own_rows": [
        ("x", "started.own_rows(tf.ragged.constant([[1], [2, 3]]))"),
        ("x", "started.own_rows(tf.constant(1.0))"),
    ],
    "Trainer.all_gather": [
        ("x", "started.all_gather(tf.ragged.constant([[1], [2, 3]]))"),
        ("x", 'started.all_gather(tf.constant(["a"]))'),
    ],
    "Trainer.evaluate": [
        ("data", 'started.evaluate("test")'),
        ("data", "started.evaluate(tf.data.Dataset.from_tensors(data).repeat())"),
        ("global_batch", "started.evaluate(data)"),
        ("steps", "started.evaluate(data, global_batch=4, steps=0)"),
        ("precision", 'started.evaluate(data, global_batch=4, precision="float16")'),
        ("averaged", "started.evaluate(data, global_batch=4, averaged=True)"),
        ("averaged", 'started.evaluate(data, global_batch=4, averaged="yes")'),
    ],
    "Trainer.evaluate_continuously": [
        ("data", 'Trainer(model_dir="runs/new").evaluate_continuously("test")'),
        ("global_batch", 'Trainer(model_dir="runs/new").evaluate_continuously(data)'),
        (
            "steps",
            'Trainer(model_dir="runs/new").evaluate_continuously(data, global_batch=4, steps=0)',
        ),
        ("last_step", 'Trainer(model_dir="runs/new").evaluate_continuously(data, last_step=0)'),
        (
            "timeout_secs",
            'Trainer(model_dir="runs/new").evaluate_continuously(data, timeout_secs=-1)',
        ),
    ],
    "Trainer.predict": [
        ("data", "started.predict(tf.data.Dataset.from_tensors(batch).repeat())"),
        ("global_batch", "started.predict(batch, global_batch=0)"),
        ("precision", 'started.predict(batch, global_batch=4, precision="half")'),
        ("averaged", "started.predict(batch, global_batch=4, averaged=True)"),
    ],
    "Trainer.export": [
        ("export", 'Trainer().export("model.keras")'),
        ("path", "started.export(None)"),
        ("path", 'started.export("model.h5")'),
        ("path", r'started.export("model\0.keras")'),
        ("averaged", 'started.export("model.keras", averaged=True)'),
        ("precision", 'started.export("model.keras", precision="half")'),
    ],
    "Trainer.dry_run": [
        ("train_data", 'Trainer().dry_run("digits")'),
        ("global_batch", "Trainer().dry_run(data)"),
        ("eval_data", 'Trainer().dry_run(data, global_batch=4, eval_data="test")'),
    ],
    "Trainer.overfit_one_batch": [
        ("train_data", 'Trainer().overfit_one_batch("digits")'),
        ("steps", "Trainer().overfit_one_batch(data, 0, global_batch=4)"),
        ("steps", "Trainer().overfit_one_batch(data, 2**31, global_batch=4)"),
        ("global_batch", "Trainer().overfit_one_batch(data)"),
    ],
    "convert_to_float8": [
        ("model", "convert_to_float8(tf.Module())"),
        ("model", "convert_to_float8(keras.Sequential([keras.layers.Dense(16)], name='stack'))"),
        ("layers", 'convert_to_float8(model, layers="head")'),
        ("layers", "convert_to_float8(model, layers=lambda _: False)"),
        ("rule", "convert_to_float8(model, rule=scaling.DynamicLossScale())"),
    ],
    "find_batch_size": [
        ("make", "find_batch_size(Trainer(), data, 4)"),
        ("make", "find_batch_size(lambda parts: parts, data, 4)"),
        ("data", "find_batch_size(lambda parts: Trainer(), 3)", "train_data"),
        ("global_batch", "find_batch_size(lambda parts: Trainer(), data)"),
    ],
    "Trainer.replay": [
        ("overflow", "Trainer().replay(None)"),
        ("overflow", 'Trainer().replay("runs/old")'),
    ],
}

OF_FLAGS = {
    "define_flags": [("defaults", "define_flags(flag_values, step=600)", "define_flags")],
    "make_trainer": [
        ("trainer_class", "make_trainer(None, parsed)"),
    ],
    "run_mode": [
        ("trainer", "run_mode(None, data, data, parsed)"),
        ("train_data", 'run_mode(Trainer(), "digits", data, parsed)'),
        ("test_data", 'run_mode(Trainer(), data, "digits", parsed)'),
    ],
}

STEP = {
    "Clip": [
        ("global_clipnorm", "Clip(global_clipnorm=-1.0)"),
        ("global_clipnorm", "Clip(global_clipnorm=1.0, clipvalue=0.5)"),
        ("clipnorm", 'Clip(clipnorm="1.0")'),
        ("clipvalue", 'Clip(clipvalue=float("nan"))'),
    ],
    "TrainState": [
        ("rule", 'TrainState("dynamic")'),
        ("seed", "TrainState(rule, seed=0.5)"),
        ("seed", "TrainState(rule, seed=2**63)"),
    ],
    "attempt_step": [
        ("batch", "attempt_step((), plan, run)"),
        ("plan", "attempt_step(batch, run, plan)"),
        ("run", "attempt_step(batch, plan, scaler)"),
        ("run", "attempt_step(batch, plan, TrainState(scaling.NoLossScale()))"),
    ],
    "own_rows": [("x", "own_rows(tf.ragged.constant([[1], [2, 3]]))")],
    "all_gather": [("x", "all_gather(tf.ragged.constant([[1], [2, 3]]))")],
    "plan_step": [
        ("strategy", 'plan_step(strategy="mirrored")'),
        ("model", "plan_step(model=tf.nn.relu)"),
        ("model", 'plan_step(model=keras.Sequential(name="empty"))'),
        ("optimizer", 'plan_step(optimizer="sgd")'),
        ("optimizer", "plan_step(optimizer=keras.optimizers.SGD(loss_scale_factor=8.0))"),
        (
            "optimizer",
            "plan_step(optimizer=keras.optimizers.MultiOptimizer(keras.optimizers.SGD))",
        ),
        ("compute_loss", 'plan_step(compute_loss="mse")'),
        ("rule", 'plan_step(rule="dynamic")'),
        ("example_weights", "plan_step(example_weights=tf.ones([4]))"),
        ("update_metrics", 'plan_step(update_metrics=["accuracy"])'),
        ("alternate", 'plan_step(alternate="yes")'),
        ("updates_per_step", 'plan_step(alternate=True, updates_per_step={"critic": 5})'),
        (
            "updates_per_step",
            'plan_step(optimizer={"critc": keras.optimizers.SGD()}, alternate=True, '
            'updates_per_step={"critic": 5})',
        ),
        ("updates_per_step", 'plan_step(updates_per_step={"critic": 5})'),
        ("num_microbatches", "plan_step(num_microbatches=0)"),
        ("loss_reduction", 'plan_step(loss_reduction="sum")'),
        ("reduce_dtype", "plan_step(reduce_dtype=tf.float16)"),
        ("reduce_bucket_bytes", "plan_step(reduce_bucket_bytes=1e6)"),
        ("clip", "plan_step(clip=1.0)"),
        ("ema_momentum", "plan_step(ema_momentum=1.0)"),
        ("ema_momentum", 'plan_step(ema_momentum="0.99")'),
        ("jit_compile", 'plan_step(jit_compile="auto")'),
        ("record_gradients", "plan_step(record_gradients=None)"),
        ("max_retries", "plan_step(max_retries=-1)"),
        ("attribute_causes", 'plan_step(attribute_causes="backward")'),
        ("halting_causes", "plan_step(halting_causes=scaling.Cause.WEIGHTS)"),
        ("halting_causes", 'plan_step(halting_causes=["forward"])'),
        ("max_skips", "plan_step(max_skips=0)"),
        ("float32_after", "plan_step(float32_after=1.5)"),
        ("others", "plan_step(others=model)"),
    ],
}

REPORT = {
    "write_report": [
        ("run_dir", "write_report(None)"),
        ("run_dir", 'write_report("runs")'),
        ("output", 'write_report("runs", output=3)'),
    ],
}

CASES = {
    "scaling": SCALING,
    "scaling.float8": FLOAT8,
    "strategies": STRATEGIES,
    "trainer": TRAINER,
    "trainer.flags": OF_FLAGS,
    "trainer.report": REPORT,
    "trainer.step": STEP,
}

# A flag and a command line. The optional third item is the name that the message uses, if the error
# is not absl's own and the name differs from the flag's.
FLAGS = [
    ("model_dir", "--model_dir=notes.txt"),
    ("mode", "--mode=evaluate"),
    ("strategy", "--strategy=miror"),
    ("logical_cpus", "--logical_cpus=0"),
    ("logical_cpus", "--logical_cpus=2", "--logical_cpus"),
    ("precision", "--precision=half"),
    ("loss_scale", "--loss_scale=dynamite"),
    ("loss_scale", "--loss_scale=1024:growth_interval=5"),
    ("initial_scale", "--initial_scale=high"),
    ("initial_scale", "--loss_scale=dynamic --initial_scale=1000"),
    (
        "initial_scale",
        "--loss_scale=1024 --initial_scale=65536",
        "--initial_scale",
    ),
    ("initial_scale", "--precision=mixed_bfloat16 --initial_scale=65536", "--initial_scale"),
    ("global_batch", "--global_batch=0"),
    ("num_microbatches", "--num_microbatches=two"),
    ("reduce_dtype", "--reduce_dtype=half"),
    ("reduce_bucket_bytes", "--reduce_bucket_bytes=25MB"),
    ("global_clipnorm", "--global_clipnorm=tight"),
    ("global_clipnorm", "--global_clipnorm=0"),
    ("ema_momentum", "--ema_momentum=1"),
    ("steps", "--steps=1e6"),
    ("steps_per_loop", "--steps_per_loop=0"),
    ("log_interval", "--log_interval=0"),
    ("verbose", "--verbose=loud"),
    ("profile_steps", "--profile_steps=101"),
    ("eval_interval", "--eval_interval=0"),
    ("checkpoint_interval", "--checkpoint_interval=0"),
    ("checkpoint_secs", "--checkpoint_secs=0"),
    ("max_to_keep", "--max_to_keep=-1"),
    ("eval_steps", "--eval_steps=0"),
    ("evaluate_at_start", "--evaluate_at_start=maybe"),
    ("continuous", "--continuous", "--continuous"),
    ("timeout_secs", "--timeout_secs=long"),
    ("timeout_secs", "--timeout_secs=60", "--timeout_secs"),
    ("enable_checkpointing", "--enable_checkpointing=maybe"),
    ("async_checkpoint", "--async_checkpoint=maybe"),
    ("tpu", "--tpu=local", "--tpu"),
    ("keep_best", "--keep_best=-1"),
    ("keep_best", "--keep_best=3"),
    ("best_metric", "--model_dir=runs/new --keep_best=1 --best_metric=accuracy"),
    ("best_is", "--best_is=lower"),
    ("data_resume", "--data_resume=exakt"),
    ("allow_changes", "--allow_changes=weights"),
    ("init_from", "--init_from=runs/old"),
    ("init_from_skip", "--init_from_skip=head/"),
    ("loss_above", "--loss_above=nan"),
    ("loss_above", "--loss_above=100", "divergence"),
    ("max_recoveries", "--max_recoveries=0"),
    ("max_recoveries", "--max_recoveries=9", "--max_recoveries"),
    ("jit_compile", "--jit_compile=yes"),
    ("record_gradients", "--record_gradients=maybe"),
    ("check_gradients", "--check_gradients=maybe"),
    ("check_data", "--check_data=maybe"),
    ("on_overflow", "--on_overflow=rety"),
    ("on_nonfinite_loss", "--on_nonfinite_loss=retry"),
    ("max_consecutive_skips", "--max_consecutive_skips=0"),
    ("on_stuck", "--on_stuck=wait"),
    ("max_overflow_records", "--max_overflow_records=-1"),
    ("max_overflow_records", "--max_overflow_records=5"),
    ("overflow", "--mode=replay"),
    ("overflow", "--overflow=runs/old", "--overflow"),
    ("overflow", "--mode=replay --overflow=runs/old"),
    ("seed", "--seed=-1"),
    (UNKNOWN := "precison", "--precison=mixed_float16"),
]


@functools.cache
def shared_values():
    """Values for the examples that are slow to build and do not change."""
    strategy, rule = tf.distribute.get_strategy(), scaling.DynamicLossScale()
    dense = keras.layers.Dense(1, name="dense")  # errors name it
    model = keras.Sequential([keras.Input([1]), dense], name="model")
    plan_step = functools.partial(
        trainer.step.plan_step,
        strategy=strategy,
        model=model,
        optimizer=keras.optimizers.SGD(),
        compute_loss=lambda batch, training: model(batch, training=training)[:, 0],
        rule=rule,
    )
    data = np.ones([4, 1], np.float32), np.ones([4, 1], np.float32)
    make = functools.partial(
        trainer.Trainer, model=linear_model, optimizer="sgd", loss_fn="mse", verbose=False
    )
    started = make()
    started.predict(data[0], global_batch=4)
    return {
        "rule": rule,
        "mirrored": strategies.create("mirrored", ["CPU:0", "CPU:1"]),
        "model": model,
        "plan_step": plan_step,
        "plan": plan_step(),
        "data": data,
        "Trainer": make,
        "started": started,
        "parsed": parse(),
    }


def new_flags():
    """An empty flag registry with absl's own `verbosity`."""
    flag_values = flags.FlagValues()
    flags.DEFINE_integer("verbosity", 0, "absl's own", flag_values=flag_values)
    return flag_values


def parse(*arguments):
    """Defines the flags and parses a command line."""
    flag_values = new_flags()
    trainer.flags.define_flags(flag_values)
    flag_values(["script.py", *arguments])
    return flag_values


def run_script(*arguments):
    """Builds a trainer from a command line and runs it."""
    flag_values, data = parse(*arguments), shared_values()["data"]
    made = trainer.flags.make_trainer(shared_values()["Trainer"], flag_values)
    trainer.flags.run_mode(made, data, data, flag_values)


def names_in_examples():
    """The names that examples use: the public names, and valid values for everything else."""
    return {
        **{
            name: value
            for module in MODULES
            if not module.startswith("scaling")
            for name, value in MODULES[module].items()
        },
        "float8": scaling.float8,
        "keras": keras,
        "np": np,
        "scaling": scaling,
        "strategies": strategies,
        "tf": tf,
        **shared_values(),
        "finite": dict.fromkeys(inspect.signature(scaling.find_cause).parameters, True),
        "callback": trainer.Callback(),
        "flag_values": new_flags(),
    }


TENSORS = ("state", "scaler", "token", "gradients", "stats", "batch", "share", "run")


def tensors_in_examples():
    """Tensors and variables that examples use, by the names in `TENSORS`."""
    rule = shared_values()["rule"]
    state, scaler, gradients = rule.initial_state(), scaling.LossScaler(rule), [tf.ones([2])]
    return {
        "state": state,
        "scaler": scaler,
        "token": scaler.scale(tf.constant(1.0))[1],
        "gradients": gradients,
        "stats": scaling.gradient_stats(gradients, state),
        "batch": tf.ones([4, 1]),
        "share": strategies.whole(tf.range(4), tf.ones([4])),
        "run": trainer.step.TrainState(rule),
    }


def error_of(call):
    """The error that a call raises, as Python prints it."""
    built_in = {name: getattr(factories, name) for name in ("default", "one_device", "mirrored")}
    # Only our own strategies, because an error lists the registered ones and another test may have
    # added some; and a temporary working directory, whose path is left out.
    with (
        mock.patch.dict(registry._FACTORIES, built_in, clear=True),
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
    ):
        pathlib.Path("notes.txt").touch()
        try:
            call()
        except (TypeError, ValueError, RuntimeError, flags.Error) as error:
            text = str(error).replace(f"{pathlib.Path.cwd()}/", "")
            return f"{type(error).__name__}: {text}"
    return "accepted"


@functools.cache
def refusal(code):
    """The error that an example raises."""
    names = names_in_examples()
    if any(name in code for name in TENSORS):
        names |= tensors_in_examples()
    return error_of(lambda: exec(code, names))  # noqa: S102 - the text is what a reader sees


@functools.cache
def refusal_of_flags(line):
    """The error that a command line raises."""
    return error_of(lambda: run_script(*line.split()))


ALL_CASES = [
    (name, argument, code, *(word or [argument]))
    for module in CASES.values()
    for name, cases in module.items()
    for argument, code, *word in cases
]


@pytest.mark.parametrize(
    ("code", "word"), [case[2:] for case in ALL_CASES], ids=[case[2] for case in ALL_CASES]
)
def test_bad_input_is_refused(code, word):
    """A value that an argument refuses raises an error that names the argument."""
    check_form(refusal(code), word)


@pytest.mark.parametrize(
    ("flag", "line", "word"),
    [(flag, line, *(word or [flag])) for flag, line, *word in FLAGS],
    ids=[line for _, line, *_ in FLAGS],
)
def test_a_bad_flag_is_refused(flag, line, word):
    """A bad flag is refused by absl, or by an error that names the argument."""
    refused = refusal_of_flags(line)
    if flag == UNKNOWN:
        assert refused.startswith("UnrecognizedFlagError: ")
    elif refused.startswith("IllegalFlagValueError: "):
        assert refused.startswith(f"IllegalFlagValueError: flag --{flag}=")
    else:
        check_form(refused, word)


def check_form(refused, word):
    """Raises unless an error is of a type of Python's, and begins with the argument's name."""
    kind, _, message = refused.partition(": ")

    assert kind in {"TypeError", "ValueError", "BatchError", "RuntimeError"}, refused
    assert message.startswith(f"`{word}` "), message


def test_every_flag_has_a_case():
    """Every flag has a case, and every case but the unknown flag has a flag."""
    defined = set(parse()) - set(new_flags()) - set(trainer.flags.ALIASES)

    assert {flag for flag, *_ in FLAGS} == {*defined, UNKNOWN}
