"""One replica's way from its share of the batch to gradients that are ready to apply."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import copies
from plans import Pair, keras_model, plan_of

import scaling
from trainer import Skips, Updates
from trainer.step.replica import my_share, recompute_in_branch, replica_step
from trainer.step.types import StepInputs

pytestmark = pytest.mark.sampled


def step(plan, batch, weights=None, *, scale=1.0, in_float32=None):
    """Every replica's results of a step, as lists by field."""
    weights = tf.ones([len(batch)]) if weights is None else tf.constant(weights)
    state = scaling.FixedLossScale(scale).initial_state()
    random = tf.constant([0, 0], tf.int64)
    inputs = StepInputs(tf.constant(batch), weights, state, random, in_float32)

    @tf.function
    def run():
        def replica():
            found = replica_step(inputs, group=plan.groups[0], plan=plan)
            outcome = found.outcome
            return found.gradients, outcome.loss, outcome.gradient_norm, outcome.grads_finite

        return plan.strategy.run(replica)

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
    random = tf.constant([0, 0], tf.int64)
    inputs = StepInputs(tf.constant([3.0, 0.1]), tf.ones([2]), state, random, None)

    @tf.function
    def run():
        found = replica_step(inputs, group=plan.groups[0], plan=plan)
        lost = found._replace(gradients=None, evidence=found.evidence._replace(unscaled=None))
        again = recompute_in_branch(lost, state, plan)
        return found.gradients, again.gradients, found.evidence, again.evidence

    first, again, evidence, evidence_again = plan.strategy.run(run)
    assert [each.numpy().tobytes() for each in first] == [each.numpy().tobytes() for each in again]
    tf.nest.map_structure(np.testing.assert_array_equal, evidence, evidence_again)


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


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_shares_are_the_batch(mirrored, on_replicas, replicas):
    """Every replica gets its contiguous part of the batch and of the weights."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    shares = on_replicas(strategy, lambda: my_share(tf.range(5), tf.range(5.0)))

    assert [int(row) for part in shares.batch for row in part] == [0, 1, 2, 3, 4]
    assert [float(row) for part in shares.weights for row in part] == [0, 1, 2, 3, 4]
    assert sum(map(int, shares.examples)) == 5
