"""One attempted step: veto, scale, reduction, clipping, statistics and kinds of models."""

import dataclasses
import math
import os
import subprocess
import sys
import types

import access
import fake_tpu
import keras
import numpy as np
import plans
import pytest
import tensorflow as tf
from helpers import Linear, all_copies, assert_same_bits, attempt, copies, slopes
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import Pair, keras_model, plan_of

import scaling
import strategies
from scaling import Cause
from scaling.telemetry.stats import COUNTS
from trainer import Skips, Trainer, Updates
from trainer.step import TrainState
from trainer.step import attempt as steps
from trainer.step.attempt import (
    ReplicaResult,
    apply_or_skip,
    combined,
    diagnosed,
    gradients_in_branch,
    replica_step,
    run_share,
)
from trainer.step.diagnose import Evidence, NonfiniteTable
from trainer.step.report import outcome_spec
from trainer.step.types import GlobalBatchSize, StepInputs

pytestmark = pytest.mark.sampled

HALF = {"precision": "mixed_float16", "jit_compile": False}


class Poisoned(Linear):
    """Float16, with BatchNorm and momentum. A batch can poison any example in the forward or
    backward pass.
    """

    def build_model(self):
        """Two dense layers with BatchNorm between them."""
        return keras.Sequential(
            [
                keras.Input([1]),
                keras.layers.Dense(3),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
            ]
        )

    def build_optimizer(self):
        """Momentum, so that there are slots."""
        return keras.optimizers.SGD(0.1, momentum=0.9)

    def compute_loss(self, batch, training):
        """A slope of 1e5 overflows float16 in the backward pass; one of inf makes the loss
        infinite.
        """
        predictions = tf.cast(self.model(batch["x"], training=training), tf.float32)[:, 0]
        return predictions * batch["slope"]


def batch_with(slope, replica, replicas):
    """A batch with two examples per replica. The first example of `replica` has the given slope,
    all others 1.
    """
    values = np.ones(2 * replicas, np.float32)
    values[2 * replica] = slope
    return {"x": np.linspace(0, 1, 2 * replicas, dtype=np.float32)[:, None], "slope": values}


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_one_replica_stops_the_update_everywhere(mirrored, replicas):
    """L5: a non-finite value on any one replica, from the forward or the backward pass, leaves
    every copy of weights, slots, statistics and `iterations` unchanged. A backward one halves the
    scale once; a forward one leaves the scale as it is (L17).
    """
    strategy = mirrored(replicas) if replicas > 1 else "default"
    trainer = Poisoned(strategy=strategy, loss_scale="dynamic", **HALF)
    [report] = attempt(trainer, [batch_with(1.0, 0, replicas)])
    assert report.grads_finite
    for replica in range(replicas):
        for slope, cause in [
            (1e6, Cause.BACKWARD),
            (np.inf, Cause.FORWARD),
            (np.nan, Cause.FORWARD),
        ]:
            before, scale = all_copies(trainer), trainer.loss_scale
            [report] = attempt(trainer, [batch_with(slope, replica, replicas)])

            assert not report.grads_finite
            assert cause == report.cause
            assert_same_bits(before, all_copies(trainer))
            assert trainer.loss_scale == (scale / 2 if cause is Cause.BACKWARD else scale)
    before = all_copies(trainer)
    [report] = attempt(trainer, [batch_with(1.0, 0, replicas)])

    assert report.grads_finite
    assert any((before[name][0] != copy[0]).any() for name, copy in all_copies(trainer).items())
    assert trainer.totals.skipped_by_cause == {"forward": 2 * replicas, "backward": replicas}


@pytest.mark.thorough
@pytest.mark.parametrize("on_overflow", ["skip", "retry"])
def test_of_two_workers_that_overflow_at_one_scale_one_lowers_it(monkeypatch, on_overflow):
    """A worker's step is merged into what other workers made of the state meanwhile, and not written
    over it; with and without retries, which leave no single verdict. In float16, no step says that
    it was in float32.
    """

    def after_another(scaler, before, after, verdict=None):
        scaler.assign(scaler.rule.advance(before, False))
        merge(scaler, before, after, verdict)

    def of_workers(strategy):
        return dataclasses.replace(strategies.capabilities(strategy), asynchronous=True)

    merge = scaling.LossScaler.merge
    monkeypatch.setattr(scaling.LossScaler, "merge", after_another)
    named = vars(strategies) | {"capabilities": of_workers}
    monkeypatch.setattr(steps, "strategies", types.SimpleNamespace(**named))
    rule = scaling.DynamicLossScale(8.0)
    trainer = Poisoned(loss_scale=rule, skips=Skips(on_overflow=on_overflow), **HALF)
    [report] = attempt(trainer, [batch_with(1e6, 0, 1)])
    assert (report.grads_finite, report.in_float32) == (on_overflow == "retry", False)
    assert trainer.loss_scale == 4.0
    attempt_again = attempt(trainer, [batch_with(1.0, 0, 1)])
    assert on_overflow == "retry" or next(attempt_again).loss_scale == 4.0
    assert trainer.loss_scale == (4.0 if on_overflow == "retry" else 2.0)


class Three(Linear):
    """A plain module with three weights. A batch can poison the gradient or the loss of any of
    them.
    """

    def build_model(self):
        """A module of three float32 weights."""
        model = tf.Module()
        model.weights = [tf.Variable(1.0) for _ in range(3)]
        return model

    def build_optimizer(self):
        """Momentum, so that there are slots."""
        return keras.optimizers.SGD(0.1, momentum=0.9)

    def compute_loss(self, batch, training):
        """Each weight, cast to float16, times its own column of slopes."""
        del training
        half = tf.stack([tf.cast(weight, tf.float16) for weight in self.model.weights])
        return tf.reduce_sum(tf.cast(half, tf.float32) * batch["slopes"], axis=1)


@pytest.fixture(scope="module")
def three(mirrored):
    """Trainers of `Three` by number of replicas, each traced once."""
    made = {}

    def of(replicas):
        if replicas not in made:
            made[replicas] = Three(strategy=mirrored(replicas), loss_scale=2.0**15)
            list(attempt(made[replicas], [{"slopes": np.ones([replicas, 3], np.float32)}]))
        return made[replicas]

    return of


@pytest.mark.thorough
@settings(max_examples=40)
@given(data=st.data(), replicas=st.sampled_from([2, 3, 4]))
def test_any_value_in_any_variable_on_any_replica_stops_the_update(three, data, replicas):
    """L5: nothing moves on any replica for every bad replica, variable and non-finite value.
    Forward, the loss is inf or NaN; backward, the loss is finite but its scaled float16 gradient is
    not. This holds for one such value and for several at once.
    """
    trainer = three(replicas)
    slopes_of = np.ones([replicas, 3], np.float32)
    places = st.tuples(st.integers(0, replicas - 1), st.integers(0, 2))
    bad = data.draw(st.lists(places, min_size=1, max_size=3, unique=True))
    values = [data.draw(st.sampled_from([np.inf, -np.inf, np.nan, 1e6, -1e6])) for _ in bad]
    for place, value in zip(bad, values, strict=True):
        slopes_of[place] = value
    before = module_copies(trainer)
    [report] = attempt(trainer, [{"slopes": slopes_of}])
    cause = Cause.BACKWARD if np.isfinite(values).all() else Cause.FORWARD

    assert (report.grads_finite, report.cause) == (False, cause)
    assert before == module_copies(trainer)


def module_copies(trainer):
    """The bytes of every copy of a module's weights and its optimizer's variables."""
    variables = [*trainer.model.weights, *trainer.optimizer.variables]
    return [[copy.tobytes() for copy in copies(variable)] for variable in variables]


@pytest.mark.thorough
def test_a_sum_that_overflows_is_found(mirrored):
    """L5: if every replica's gradient is finite but their sum is not, the cause is reduction and
    the scale halves.
    """
    trainer = Linear(strategy=mirrored(3), loss_scale=scaling.DynamicLossScale())
    [report] = attempt(trainer, [slopes(*[3e38 * 3 / 2**15] * 3)])

    assert (report.grads_finite, report.cause) == (False, Cause.REDUCTION)
    assert (trainer.weight, trainer.loss_scale) == (1.0, 2.0**14)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("where", ["cast", "sum"])
def test_an_overflow_of_float16_in_the_reduction_is_found(mirrored, replicas, where):
    """L5, L6, L17: a float32 gradient beyond float16's range on the last replica, or only in the
    sum, skips the step everywhere with cause reduction, and the scale halves. At that scale the
    batch is applied.
    """
    rule = scaling.DynamicLossScale(2.0**4)
    trainer = Linear(
        strategy=mirrored(replicas), loss_scale=rule, updates=Updates(reduce_dtype="float16")
    )
    largest = 1.5 * 65504 / 2**4  # of the mean over replicas; at half the scale it fits
    slope = (
        [0.0] * (replicas - 1) + [largest * replicas] if where == "cast" else [largest] * replicas
    )
    [skipped, applied] = attempt(trainer, [slopes(*slope)] * 2)

    assert (skipped.grads_finite, skipped.cause) == (False, Cause.REDUCTION)
    assert (skipped.bad_replica, skipped.inf_count, skipped.loss_scale) == (-1, 1, 2.0**4)
    assert (applied.grads_finite, applied.loss_scale, trainer.loss_scale) == (True, 2.0**3, 2.0**3)
    assert trainer.weight == pytest.approx(1.0 - largest, rel=replicas * 2.0**-11)


@pytest.mark.thorough
def test_a_batch_whose_sum_overflows_float16_is_retried(mirrored):
    """L6: with retries, each batch is applied once, at a scale at which the sum fits."""
    rule = scaling.DynamicLossScale(2.0**4)
    settings = {
        "loss_scale": rule,
        "updates": Updates(reduce_dtype="float16"),
        "skips": Skips(on_overflow="retry"),
    }
    trainer = Linear(strategy=mirrored(3), **settings)
    [report] = attempt(trainer, [slopes(*[4 * 4096.0] * 3)])

    assert (report.grads_finite, report.retries, report.loss_scale) == (True, 3, 2.0)
    assert trainer.weight == pytest.approx(1.0 - 4 * 4096.0, rel=3 * 2.0**-11)


@pytest.mark.thorough
@pytest.mark.parametrize("reduce_dtype", ["float16", "bfloat16"])
def test_one_replica_has_the_same_bits_whatever_its_sums(reduce_dtype):
    """On one replica nothing is summed: `reduce_dtype` has no effect."""
    weights = []
    for dtype in (None, reduce_dtype):
        trainer = Linear(loss_scale=2.0**4, updates=Updates(reduce_dtype=dtype))
        [report] = attempt(trainer, [slopes(1.0 + 2.0**-20, 3e6)])
        assert report.grads_finite
        weights.append(trainer.weight)
    assert weights[0] == weights[1] != 1.0


@pytest.mark.thorough
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_sparse_sum_that_overflows_is_found(mirrored, jit_compile):
    """L5: the sum is also checked if rows of one embedding entry overflow only when the replicas
    are added.
    """

    class Looked(Linear):
        def build_model(self):
            embedding = keras.layers.Embedding(4, 1)
            return keras.Sequential(
                [keras.Input([1], dtype="int32"), embedding, keras.layers.Flatten()]
            )

    trainer = Looked(
        strategy=mirrored(3), loss_scale=scaling.DynamicLossScale(), jit_compile=jit_compile
    )
    slope = np.full(3, 3e38 * 3 / 2**15, np.float32)
    [report] = attempt(trainer, [{"x": np.ones([3, 1], np.int32), "slope": slope}])

    assert (report.grads_finite, report.cause) == (False, Cause.REDUCTION)


@pytest.mark.thorough
def test_unscaling_that_overflows_is_found():
    """L5: a scaled gradient of 6e34 at scale 2^-14 is finite but overflows when unscaled; nothing
    moves.
    """

    class Steep(Linear):
        def compute_loss(self, batch, training):
            # The loss is 0; only the gradient, input times slope, exceeds float32.
            predictions = self.model(batch["x"], training=training)[:, 0]
            return (predictions - tf.stop_gradient(predictions)) * batch["slope"]

    trainer = Steep(loss_scale=scaling.DynamicLossScale(initial_scale=2.0**-14))
    [report] = attempt(trainer, [{"x": np.float32([[1e4]]), "slope": np.float32([1e35])}])

    assert (report.grads_finite, report.cause) == (False, Cause.UNSCALING)
    assert (trainer.weight, trainer.loss_scale) == (1.0, 2.0**-14)


def test_a_norm_beyond_float32_stops_the_update():
    """L5: in bfloat16 a gradient of 1e30 is finite but its square is not, which would ruin Adam's
    state.
    """
    trainer = Linear(precision="mixed_bfloat16")
    [report] = attempt(trainer, [slopes(1e30)])

    assert (report.grads_finite, report.cause) == (False, Cause.UNSCALING)
    assert trainer.weight == 1.0


@pytest.fixture(scope="module")
def restless():
    """A function that returns a trainer, reset to its start, whose scale moves on every step."""
    rule = scaling.DynamicLossScale(initial_scale=2.0**10, growth_interval=1, max_scale=2.0**16)
    trainer = Linear(loss_scale=rule, **HALF)
    list(attempt(trainer, [slopes(1.0)]))

    def reset():
        trainer.model.trainable_variables[0].assign([[0.0]])
        access.state(trainer).loss_scaler.assign(rule.initial_state())
        return trainer

    return reset


@settings(max_examples=15)
@given(history=st.lists(st.sampled_from([1.0, -2.0, 3.0, 2.0**12]), min_size=1, max_size=12))
def test_gradients_are_divided_by_the_scale_of_their_loss(restless, history):
    """L2: over any history in which the scale grows on every finite step and halves on every
    overflow, an applied step moves the weight by exactly its slope. Dividing by the next scale
    would halve it. A slope of 2^12 overflows float16 at every scale here that is above 2^3.
    """
    trainer = restless()
    weight, scale = 0.0, 2.0**10
    reports = attempt(trainer, [slopes(slope) for slope in history])
    for slope, report in zip(history, reports, strict=True):
        finite = abs(slope) * scale <= 65504
        assert (scale, finite) == (report.loss_scale, report.grads_finite)
        weight -= slope if finite else 0.0
        scale = min(scale * 2, 2.0**16) if finite else scale / 2

        assert (weight, scale) == (trainer.weight, trainer.loss_scale)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer_is_sgd", [True, False])
@pytest.mark.parametrize("reduce_dtype", [None, "bfloat16"])
def test_replicas_are_summed_once(mirrored, replicas, optimizer_is_sgd, reduce_dtype, monkeypatch):
    """L7: R replicas with gradient 1 each move SGD by R, never by R squared, and each replica calls
    one all-reduce per step, whatever the optimizer. Sums of gradients in half precision have one of
    their own.
    """
    asked = []
    original = tf.distribute.ReplicaContext.all_reduce

    def counting(self, *args, **kwargs):
        asked.append(self.replica_id_in_sync_group)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", counting)
    optimizer = keras.optimizers.SGD if optimizer_is_sgd else keras.optimizers.AdamW

    class Summing(Linear):
        def build_optimizer(self):
            return optimizer(1.0)

        def example_weights(self, batch):
            # Each replica has one example; a weight of 1 / R makes each replica's gradient 1.
            return tf.ones_like(batch["slope"]) / replicas

    strategy = mirrored(replicas) if replicas > 1 else "default"
    trainer = Summing(strategy=strategy, updates=Updates(reduce_dtype=reduce_dtype))
    [report] = attempt(trainer, [slopes(*[float(replicas)] * replicas)])

    assert len(asked) == (replicas if replicas > 1 else 0) * (2 if reduce_dtype else 1)
    assert report.gradient_norm == replicas
    if optimizer_is_sgd:
        assert trainer.weight == 1.0 - replicas


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("owner", ["trainer", "optimizer"])
def test_clipping_comes_last(mirrored, replicas, owner):
    """L9: the bound applies to the gradient after summing over replicas and unscaling, whether the
    trainer or the optimizer clips: a gradient of 10 clipped to 1 moves SGD by 1, not by R.
    """

    class Clipping(Linear):
        def build_optimizer(self):
            return keras.optimizers.SGD(1.0, global_clipnorm=1.0 if owner == "optimizer" else None)

    trainer = Clipping(
        strategy=mirrored(replicas) if replicas > 1 else "default",
        loss_scale=1024.0,
        updates=Updates(global_clipnorm=1.0 if owner == "trainer" else None),
    )
    [report] = attempt(trainer, [slopes(*[10.0] * replicas)])

    assert report.gradient_norm == 10.0
    assert trainer.weight == pytest.approx(0.0, abs=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        ({"global_clipnorm": 5.0}, [3.0 * 5 / 13, -4.0 * 5 / 13, 12.0 * 5 / 13]),
        ({"clipnorm": 4.0}, [3.0, -4.0, 4.0]),
        ({"clipvalue": 3.5}, [3.0, -3.5, 3.5]),
    ],
    ids=["global_clipnorm", "clipnorm", "clipvalue"],
)
@pytest.mark.parametrize("owner", ["trainer", "optimizer"])
def test_every_kind_of_clipping_sees_the_sum(mirrored, replicas, bound, expected, owner):
    """L9: each kind of clipping sees the sum over replicas, whether the trainer or the optimizer
    clips: gradients 3, -4 and 12, with global norm 13, are clipped together, each on its own, or by
    element.
    """

    class Clipping(Three):
        def build_optimizer(self):
            return keras.optimizers.SGD(1.0, **(bound if owner == "optimizer" else {}))

    trainer = Clipping(
        strategy=mirrored(replicas) if replicas > 1 else "default",
        loss_scale=2.0**10,
        updates=Updates(**(bound if owner == "trainer" else {})),
    )
    [report] = attempt(trainer, [{"slopes": np.float32([[3.0, -4.0, 12.0]] * replicas)}])
    moved = [1.0 - weight.numpy() for weight in trainer.model.weights]

    # Each replica's gradient is rounded to float16 once, including a third of it.
    assert report.gradient_norm == pytest.approx(13.0, rel=2.0**-11)
    np.testing.assert_allclose(moved, expected, rtol=2.0**-10)


@pytest.mark.parametrize("replicas", [1, 2])
def test_clipping_sees_the_coalesced_gradient(mirrored, replicas):
    """L9: rows 3 and 4 of the same embedding entry form a gradient of norm 7, not 5."""

    class Embedded(Linear):
        def build_model(self):
            return keras.Sequential(
                [
                    keras.Input([1], dtype="int32"),
                    keras.layers.Embedding(4, 1),
                    keras.layers.Flatten(),
                ]
            )

    trainer = Embedded(
        strategy=mirrored(replicas) if replicas > 1 else "default",
        updates=Updates(global_clipnorm=7.0),
    )
    batch = {"x": np.array([[2], [2]]), "slope": np.array([6.0, 8.0], np.float32)}
    access.start(trainer, tf.nest.map_structure(tf.constant, batch))
    before = copies(trainer.model.trainable_variables[0])[0]
    [report] = attempt(trainer, [batch])
    moved = before - copies(trainer.model.trainable_variables[0])[0]

    assert report.gradient_norm == 7.0
    np.testing.assert_allclose(moved[:, 0], [0, 0, 7.0, 0], atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_small_updates_survive(mirrored, precision, replicas):
    """L13: an update of 2^-20 relative to a weight moves it on every replica in every precision;
    weights and slots are float32.
    """

    class Small(Linear):
        def build_optimizer(self):
            return keras.optimizers.SGD(2.0**-20, momentum=0.5)

    strategy = mirrored(replicas) if replicas > 1 else "default"
    trainer = Small(strategy=strategy, precision=precision, jit_compile=False)
    list(attempt(trainer, [slopes(*[1.0] * replicas)]))
    variables = [*trainer.model.trainable_variables, *trainer.optimizer.variables]

    for copy in copies(trainer.model.trainable_variables[0]):
        assert copy[0, 0] == 1.0 - 2.0**-20
    assert {"float32"} == {v.dtype for v in variables if "int" not in v.dtype}


class Normed(Linear):
    """A BatchNorm whose moving mean moves halfway to the batch mean, and a frozen one."""

    # Adding three of these and dividing by 3 changes the last bit.
    frozen_mean = np.float32(0.9)

    def build_model(self):
        """Both BatchNorms and a dense layer."""
        frozen = keras.layers.BatchNormalization(
            trainable=False,
            moving_mean_initializer=keras.initializers.Constant(self.frozen_mean),
        )
        norm = keras.layers.BatchNormalization(momentum=0.5)
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return keras.Sequential([keras.Input([1]), norm, frozen, dense])


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [2, 3])
def test_statistics_become_their_mean(mirrored, replicas):
    """Step 10: after an applied step every replica holds the mean of what the BatchNorms of all
    replicas would have written. A frozen one keeps its bits.
    """
    trainer = Normed(strategy=mirrored(replicas))
    batch = slopes(*[1.0] * (2 * replicas))
    batch["x"] = np.arange(2 * replicas, dtype=np.float32)[:, None] * 8
    list(attempt(trainer, [batch]))
    norm, frozen = trainer.model.layers[:2]

    # Replica r sees 16 r and 16 r + 8 with mean 16 r + 4; its moving mean goes halfway there from 0.
    expected = np.mean([8 * replica + 2 for replica in range(replicas)], dtype=np.float32)
    assert [expected] * replicas == [copy.item() for copy in copies(norm.moving_mean)]
    assert [Normed.frozen_mean] * replicas == [copy.item() for copy in copies(frozen.moving_mean)]


@pytest.mark.thorough
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_empty_shares_write_no_statistics(mirrored, num_microbatches):
    """Of 3 replicas x M microbatches, those without real examples do not count in the mean: with
    examples of 8 and 24, it goes halfway from 0 to the mean of the two.
    """
    trainer = Normed(strategy=mirrored(3), num_microbatches=num_microbatches)
    batch = slopes(1.0, 1.0)
    batch["x"] = np.float32([[8.0], [24.0]])
    [report] = attempt(trainer, [batch])

    assert report.grads_finite
    assert [copy.item() for copy in copies(trainer.model.layers[0].moving_mean)] == [8.0] * 3


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_statistic_that_would_become_infinite_stops_the_update(mirrored, replicas):
    """L5, L6: a layer that squares 300 in float16 for a statistic that the loss does not use skips
    the step with a forward cause, and the statistic keeps its bits. A statistic that was already
    infinite does not skip steps.
    """

    class Squares(keras.layers.Layer):
        def build(self, shape):
            del shape
            weight = {"shape": (), "trainable": False}
            self.mean = self.add_weight(initializer="zeros", **weight)
            self.most = self.add_weight(initializer=keras.initializers.Constant(-np.inf), **weight)

        def call(self, inputs):
            self.mean.assign(keras.ops.mean(keras.ops.square(inputs)))
            self.most.assign(keras.ops.minimum(self.most, 0.0))
            return inputs

    class Squared(Linear):
        def build_model(self):
            return keras.Sequential([keras.Input([1]), Squares(), keras.layers.Dense(1)])

    trainer = Squared(strategy=mirrored(replicas) if replicas > 1 else "default", **HALF)
    good, bad = slopes(*[1.0] * replicas), slopes(*[1.0] * replicas)
    bad["x"] = np.float32([[1.0]] * (replicas - 1) + [[300.0]])
    first, second = attempt(trainer, [good, bad])

    assert first.grads_finite
    assert (second.grads_finite, second.cause) == (False, Cause.FORWARD)
    assert [copy.item() for copy in copies(trainer.model.layers[0].mean)] == [1.0] * replicas


def test_a_rule_can_ask_for_the_magnitude():
    """A rule with `needs_magnitude` gets the largest absolute value of the unscaled gradient."""
    magnitudes = []

    class Asking(scaling.FixedLossScale):
        needs_magnitude = True

        def advance(self, state, verdict):
            magnitudes.append(verdict.max_magnitude)
            found = tf.where(verdict.grads_finite, verdict.max_magnitude, state.loss_scale)
            return state._replace(loss_scale=found)

    trainer = Linear(loss_scale=Asking(8.0))
    list(attempt(trainer, [slopes(-3.0)]))

    assert None not in magnitudes
    assert trainer.loss_scale == 3.0


class Module(tf.Module):
    """A linear model in plain TensorFlow that casts by itself."""

    def __init__(self, precision):
        """One weight, initially 1."""
        super().__init__()
        self.precision = precision
        self.weight = tf.Variable([[1.0]])

    def __call__(self, x):
        """Multiplies in the compute dtype."""
        x, weight = self.precision.cast_to_compute((x, self.weight))
        return tf.matmul(x, weight)


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_plain_module_is_a_model(mirrored, replicas, precision, num_microbatches):
    """A `tf.Module` takes the same step as a Keras model, compiled or not."""

    class Plain(Linear):
        def build_model(self):
            return Module(self.precision)

        def compute_loss(self, batch, training):
            del training
            return tf.cast(self.model(batch["x"]), tf.float32)[:, 0] * batch["slope"]

    trainer = Plain(
        strategy=mirrored(replicas) if replicas > 1 else "default",
        precision=precision,
        loss_scale=1024.0,
        num_microbatches=num_microbatches,
    )
    good, bad = attempt(trainer, [slopes(1.0, 3.0, 1.0, 3.0), slopes(1.0, 1.0, 1.0, np.inf)])

    assert good.grads_finite
    assert (bad.grads_finite, bad.cause) == (False, Cause.FORWARD)
    assert [np.float32(-1.0)] * replicas == [copy.item() for copy in copies(trainer.model.weight)]


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_average_follows_updates(mirrored, replicas):
    """L10: the optimizer's EMA and schedule count updates: a skipped step moves neither."""

    class Averaged(Linear):
        def build_optimizer(self):
            rate = keras.optimizers.schedules.PiecewiseConstantDecay([2], [1.0, 0.5])
            return keras.optimizers.SGD(rate, use_ema=True, ema_momentum=0.5)

    trainer = Averaged(strategy=mirrored(replicas) if replicas > 1 else "default")
    history = [1.0, np.inf, 1.0, np.nan, np.inf, 1.0, 1.0]
    reports = list(attempt(trainer, [slopes(*[slope] * replicas) for slope in history]))
    weight, average = 1.0, None
    for update in range(4):
        weight -= 1.0 if update <= 2 else 0.5
        average = weight if average is None else 0.5 * average + 0.5 * weight

    assert [report.grads_finite for report in reports] == [bool(np.isfinite(s)) for s in history]
    assert trainer.weight == weight
    [ema] = [v for v in trainer.optimizer.variables if "average" in v.path]
    assert [average] * replicas == [copy.item() for copy in copies(ema)]
    assert int(trainer.optimizer.iterations.numpy()) == 4


@pytest.mark.thorough
@pytest.mark.parametrize("jit_compile", [False, True])
def test_penalties_are_summed_in_float32(jit_compile):
    """An activity penalty whose sum of squares exceeds 65504 does not skip a float16 step, and the
    layer has its own regularizer again afterwards.
    """
    regularizer = keras.regularizers.L2(1e-3)

    class Penalized(Linear):
        def build_model(self):
            layer = keras.layers.Dense(
                1, use_bias=False, kernel_initializer="ones", activity_regularizer=regularizer
            )
            return keras.Sequential([keras.Input([1]), layer])

    trainer = Penalized(precision="mixed_float16", loss_scale=1.0, jit_compile=jit_compile)
    batch = slopes(*[1.0] * 4)
    batch["x"] *= 300
    [report] = attempt(trainer, [batch])

    assert report.grads_finite
    assert report.regularization_loss == pytest.approx(1e-3 * 300**2)
    assert trainer.model.layers[0].activity_regularizer is regularizer


class Late(keras.Model):
    """A subclassed model that creates a layer and all variables on its first call."""

    def __init__(self):
        """Creates an unbuilt layer and a counter."""
        super().__init__()
        self.last = keras.layers.Dense(1)

    def build(self, shape):
        """Creates another layer."""
        self.hidden = keras.layers.Dense(4)
        self.hidden.build(shape)
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs):
        """Applies both layers and counts."""
        self.calls.assign(self.calls + 1)
        return self.last(self.hidden(inputs))


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_that_is_built_when_called(mirrored, replicas):
    """The model is built on one example, in the strategy's scope and under the policy, and nothing
    that this forward pass writes moves before the first step.
    """

    class Lately(Linear):
        def build_model(self):
            return Late()

    strategy = mirrored(replicas) if replicas > 1 else "default"
    trainer = Lately(strategy=strategy, precision="mixed_float16", jit_compile=False)
    [report] = attempt(trainer, [slopes(1.0, 1.0)])

    assert report.grads_finite
    assert {layer.compute_dtype for layer in trainer.model.layers} == {"float16"}
    assert {variable.dtype for variable in trainer.model.trainable_variables} == {"float32"}
    assert [len(copies(variable)) for variable in trainer.model.variables] == [replicas] * 5
    assert [copy.item() for copy in copies(trainer.model.calls)] == [1] * replicas


STEPS_IN_XLA = """
import access, numpy as np, tensorflow as tf
from helpers import Linear, slopes

trainer = Linear(precision="mixed_float16", loss_scale="dynamic", verbose=False)
access.start(trainer, slopes(0.1, 0.5))
step = tf.function(trainer.train_step, jit_compile=True)
for number in (0.1, np.inf, 0.2, 1e30, 0.3):
    batch = slopes(number, 0.5)
    report = step({name: tf.constant(value) for name, value in batch.items()})
    print(report.step.numpy(), report.grads_finite.numpy(), report.cause.numpy())
"""


@pytest.mark.slow
def test_xla_compiles_a_whole_step_once(tmp_path):
    """A program of XLA that holds the whole step does not depend on the numbers of a step, with an
    overflow or without. XLA writes a file for each program that it compiles.
    """
    found = subprocess.run(
        [sys.executable, "-c", STEPS_IN_XLA],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert found.stdout.splitlines() == [
        "1 True 0",
        "2 False 2",
        "3 True 0",
        "4 False 3",
        "5 True 0",
    ]
    programs = list(tmp_path.glob("*train_step*before_optimizations.txt"))
    assert len(programs) == 1


@pytest.mark.replicas(1)
def test_a_plan_knows_what_it_trains():
    """Freezing or unfreezing asks for a new plan, also where as many variables stay trainable."""
    model = plans.keras_model()
    model.layers[3].trainable = False
    plan = plans.plan_of(model)
    run = TrainState(plan.rule)
    step = tf.function(lambda batch: steps.attempt_step(batch, plan, run))
    step(tf.ones([4, 2]))
    model.layers[0].trainable, model.layers[3].trainable = False, True
    with pytest.raises(ValueError, match="`plan`"):
        step(tf.ones([3, 2]))


BATCH = 16


class Noisy(Trainer):
    """BatchNorm, Dropout, momentum, a moving average and a metric."""

    def build_model(self):
        """Dense layers with BatchNorm and Dropout."""
        return keras.Sequential(
            [
                keras.Input([6]),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )

    def build_optimizer(self):
        """SGD with momentum."""
        return keras.optimizers.SGD(0.1, momentum=0.9)

    def compute_loss(self, batch, training):
        """Squared errors."""
        x, y = batch
        return tf.square(tf.cast(self.model(x, training=training), tf.float32) - y)[:, 0]


def data():
    """Batches with static shapes."""
    x = np.random.default_rng(0).normal(size=[BATCH, 6]).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    return dataset.batch(BATCH, drop_remainder=True)


def traced(**arguments):
    """The graph of the step that `train` would run."""
    trainer = Noisy(strategy=fake_tpu.strategy(), jit_compile=False, seed=1, **arguments)
    dataset = data()
    access.start(trainer, next(iter(dataset)))
    loop = access.steps(trainer).python_function
    assert loop.args[0].__wrapped__.__func__ is Noisy.train_step is Trainer.train_step
    return tf.function(trainer.train_step).get_concrete_function(dataset.element_spec).graph


@pytest.mark.parametrize(
    "arguments",
    [
        {"precision": "mixed_bfloat16"},
        {"precision": "mixed_float16", "updates": Updates(ema_momentum=0.9, global_clipnorm=1.0)},
        {"precision": "mixed_float16", "num_microbatches": 2},
    ],
)
def test_a_step_is_one_program(arguments):
    """A step is one program from the share of the batch to the update, and every replica reaches
    every collective.
    """
    graph = traced(**arguments)

    assert fake_tpu.count(graph, "TPUReplicateMetadata") == 1
    assert fake_tpu.count(graph, "CrossReplicaSum") > 0
    assert fake_tpu.divergent_conditions(graph) == []


@pytest.mark.thorough
def test_deciding_outside_the_replicas_makes_several_programs(monkeypatch):
    """A decision in cross-replica context, as on other strategies, makes more than one program, and
    every gradient would leave the first.
    """
    real = strategies.capabilities

    def decided_outside(strategy):
        return dataclasses.replace(real(strategy), decides_in_replica=False)

    monkeypatch.setattr(strategies, "capabilities", decided_outside)
    assert fake_tpu.count(traced(precision="mixed_bfloat16"), "TPUReplicateMetadata") > 1


def test_a_replica_that_decides_alone_is_noticed():
    """The check finds a collective behind a replica's own decision, which is what Keras's loss
    scaling does.
    """
    strategy = fake_tpu.strategy(2)

    @tf.function
    def step():
        def replica():
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            mine = tf.cast(index, tf.float32)
            return tf.cond(mine > 0, lambda: strategies.sum_gradients(mine), lambda: mine)

        return strategy.run(replica)

    graph = step.get_concrete_function().graph
    assert len(fake_tpu.divergent_conditions(graph)) == 1


def inputs_of(plan, batch, weights, state, in_float32=None):
    """The inputs of the first step of a run with seed 0."""
    shares = strategies.shares(batch, weights, plan.strategy)
    random = tf.constant([0, 0], tf.int64)
    return StepInputs(shares, GlobalBatchSize.of(weights), state, random, in_float32)


def step(plan, batch, weights=None, *, scale=1.0, in_float32=None):
    """Every replica's results of a step, as lists by field."""
    weights = tf.ones([len(batch)]) if weights is None else tf.constant(weights)
    state = scaling.FixedLossScale(scale).initial_state()

    @tf.function
    def run():
        inputs = inputs_of(plan, tf.constant(batch), weights, state, in_float32)

        def replica(inputs):
            local = run_share(inputs, group=plan.groups[0], plan=plan)
            found = replica_step(*local, inputs, group=plan.groups[0], plan=plan)
            outcome = found.outcome
            return found.gradients, outcome.loss, outcome.gradient_norm, outcome.grads_finite

        return plan.strategy.run(replica, args=(inputs,))

    return tf.nest.map_structure(plan.strategy.experimental_local_results, run())


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_every_replica_has_the_unscaled_sum(mirrored, replicas, scale):
    """L2, L7: on every replica the gradients are those of the mean over the global batch."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    plan = plan_of(in_scope(strategy, Pair), strategy=strategy)
    (first, second), loss, norm, finite = step(plan, [1.0, 2.0, 3.0, 6.0], scale=scale)

    assert [float(copy) for copy in first] == [3.0] * replicas
    assert [float(copy) for copy in second] == [6.0] * replicas
    assert [float(copy) for copy in loss] == [15.0] * replicas
    np.testing.assert_allclose([float(copy) for copy in norm], np.sqrt(45), rtol=1e-6)
    assert [bool(copy) for copy in finite] == [True] * replicas


def in_scope(strategy, make):
    """What a function makes in a strategy's scope."""
    with strategy.scope():
        return make()


@pytest.mark.parametrize("bad", [0, 3])
def test_one_bad_example_is_everybodys_verdict(mirrored, bad):
    """L5: NaN in any replica's share makes the verdict false on every replica."""
    plan = plan_of(in_scope(mirrored(3), Pair), strategy=mirrored(3))
    batch = np.float32([1.0, 2.0, 3.0, 4.0])
    batch[bad] = np.nan
    *_, finite = step(plan, batch)

    assert [bool(copy) for copy in finite] == [False] * 3


@pytest.mark.parametrize(
    "bound", [{}, {"clipvalue": 0.3}, {"clipnorm": 1.0}, {"global_clipnorm": 1.0}]
)
def test_branches_that_take_the_sums_alone_find_the_same_bits(bound):
    """In a program that holds the whole step, gradients are computed again from their sums."""
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    plan = plan_of(
        in_scope(strategy, Pair), strategy=strategy, updates=Updates(**bound), jit_compile="step"
    )
    state = scaling.FixedLossScale(2.0**10).initial_state()
    inputs = inputs_of(plan, tf.constant([3.0, 0.1]), tf.ones([2]), state)

    @tf.function
    def run():
        local = run_share(inputs, group=plan.groups[0], plan=plan)
        found = replica_step(*local, inputs, group=plan.groups[0], plan=plan)
        return found.gradients, gradients_in_branch(found._replace(gradients=None), state, plan)

    first, again = plan.strategy.run(run)
    assert [each.numpy().tobytes() for each in first] == [each.numpy().tobytes() for each in again]


def test_gradients_are_clipped_and_the_norm_is_not():
    """L9: the gradients are within the bound, and the reported norm is that before clipping."""
    plan = plan_of(Pair(), updates=Updates(clipvalue=4.0))
    (first, second), _, norm, _ = step(plan, [3.0])

    assert (float(first[0]), float(second[0])) == (3.0, 4.0)
    assert float(norm[0]) == pytest.approx(np.sqrt(45))


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
def test_nothing_is_assigned(mirrored, replicas):
    """L6: a replica's step changes no variable, not even BatchNorm's statistics."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    model = in_scope(strategy, keras_model)
    plan = plan_of(model, strategy=strategy)
    variables = [*model.variables, *plan.objectives[0].optimizer.variables]
    before = [copy.tobytes() for variable in variables for copy in copies(variable)]
    step(plan, np.ones([6, 2], np.float32))

    assert [copy.tobytes() for variable in variables for copy in copies(variable)] == before


@pytest.mark.parametrize(("in_float32", "exact"), [(False, False), (True, True)])
def test_a_step_can_be_computed_in_float32(in_float32, exact):
    """L11: in float32 a half-precision model computes without rounding to half."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype="mixed_float16")
    model = keras.Sequential([keras.Input([1], dtype="float32"), layer])

    def compute_loss(batch, training):
        return tf.cast(model(batch, training=training), tf.float32)[:, 0]

    plan = plan_of(model, compute_loss, skips=Skips(on_stuck="float32", max_consecutive=1))
    value = 1.0 + 2.0**-20  # rounds to 1 in float16
    _, loss, *_ = step(plan, [[value]], in_float32=tf.constant(in_float32))

    assert (float(loss[0]) == value) == exact


def outcome(**fields):
    """An outcome of zeros, with some fields replaced."""
    zeros = tf.nest.map_structure(
        lambda spec: tf.zeros(spec.shape, spec.dtype), outcome_spec(recorded=2)
    )
    return zeros._replace(**{name: tf.constant(value) for name, value in fields.items()})


def test_the_variable_is_named_by_its_position_in_the_model():
    """L17: the second group's only variable is the model's second one."""
    optimizers = {name: keras.optimizers.SGD() for name in ("first", "second")}
    model = Pair()

    def compute_loss(batch, training):
        del training
        return {
            "first": model.first.weight * batch,
            "second": model.second.weight * batch,
        }

    plan = plan_of(
        model, compute_loss, optimizer=optimizers, updates=Updates(alternate_optimizers=True)
    )
    table = NonfiniteTable(tf.zeros([1]), tf.zeros([1, 2]), tf.ones([1]))
    gradients = [tf.constant(math.inf)]
    evidence = Evidence(table, tf.constant(value=True), gradients)
    state = scaling.NoLossScale().initial_state()
    for place, group in enumerate(plan.groups):
        result = ReplicaResult(outcome(), evidence, [], {}, (), ())
        found, no_inf = diagnosed(result, group, state, plan)

        assert Cause(int(found.cause)) is Cause.BACKWARD
        assert (int(found.bad_replica), int(found.bad_variable)) == (0, place)
        assert (int(found.inf_count), int(found.nan_count), bool(no_inf)) == (1, 0, False)


def test_outcomes_of_groups_are_combined():
    """Losses, counts and underflow add up, norms as the norm of both, and the largest magnitude counts;
    the verdict and the cause are those of the later groups.
    """
    first = outcome(loss=1.0, gradient_norm=3.0, max_magnitude=8.0, underflow=[0.5, 0.0])
    later = outcome(
        loss=2.0,
        gradient_norm=4.0,
        max_magnitude=2.0,
        underflow=[0.0, 0.25],
        cause=int(Cause.BACKWARD),
    )
    first = first._replace(float8_amax=tf.constant([448.0, 0.0]))
    later = later._replace(float8_amax=tf.constant([0.0, 7.0]))
    counts = tf.range(float(COUNTS))
    first = first._replace(magnitude_counts=counts)
    later = later._replace(magnitude_counts=2.0 * counts)
    found = combined(first._replace(grads_finite=tf.constant(value=True)), later)

    assert [float(found.loss), float(found.gradient_norm), float(found.max_magnitude)] == [3, 5, 8]
    assert found.underflow.numpy().tolist() == [0.5, 0.25]
    assert found.float8_amax.numpy().tolist() == [448.0, 7.0]
    assert found.magnitude_counts.numpy().tolist() == (3.0 * counts).numpy().tolist()
    assert (bool(found.grads_finite), int(found.cause)) == (False, int(Cause.BACKWARD))


def test_a_repeated_group_reports_its_last_update():
    """Only the largest magnitude is taken over all updates of the same group."""
    first, later = outcome(loss=1.0, max_magnitude=8.0), outcome(loss=2.0, max_magnitude=2.0)
    found = combined(first, later, repeated=True)

    assert [float(found.loss), float(found.max_magnitude)] == [2, 8]


@pytest.mark.parametrize("finite", [True, False])
def test_a_branch_returns_its_finding(finite):
    """The branch that the verdict takes runs, the other does not; its finding goes into the outcome,
    whose other fields stay.
    """
    taken = tf.Variable(0)

    def branch(number):
        taken.assign(number)
        fields = ("cause", "bad_replica", "bad_variable", "inf_count", "nan_count")
        places = {name: number * 10 + place for place, name in enumerate(fields)}
        return outcome(loss=-1.0, **places)

    @tf.function
    def run():
        before = outcome(grads_finite=finite, loss=3.0, gradient_norm=5.0)
        return apply_or_skip(before, lambda: branch(1), lambda: branch(2))

    found, number = run(), 1 if finite else 2
    assert int(taken) == number
    assert (float(found.loss), float(found.gradient_norm)) == (3.0, 5.0)
    assert (bool(found.grads_finite), int(found.cause)) == (finite, number * 10)
    assert (int(found.bad_replica), int(found.bad_variable)) == (number * 10 + 1, number * 10 + 2)
    assert (int(found.inf_count), int(found.nan_count)) == (number * 10 + 3, number * 10 + 4)
