"""The outcomes of update groups: diagnosed after a skip, combined after an update."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from plans import Pair, plan_of

import scaling
from scaling import Cause
from scaling.telemetry.stats import COUNTS
from trainer import Updates
from trainer.step.diagnose import Evidence, NonfiniteTable
from trainer.step.outcomes import apply_or_skip, combined, diagnosed, on_first_replica
from trainer.step.replica import ReplicaResult
from trainer.step.report import Outcome, outcome_spec


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
    evidence = Evidence(table, tf.constant(value=True), gradients, gradients)
    state = scaling.NoLossScale().initial_state()
    for place, group in enumerate(plan.groups):
        result = ReplicaResult(outcome(), evidence, [], {}, (), ())
        found = diagnosed(result, group, state, plan)

        assert Cause(int(found.cause)) is Cause.BACKWARD
        assert (int(found.bad_replica), int(found.bad_variable)) == (0, place)
        assert (int(found.inf_count), int(found.nan_count)) == (1, 0)


def test_no_variable_stays_no_variable():
    """A bad loss names no variable."""
    plan = plan_of(Pair())
    table = NonfiniteTable(tf.ones([1]), tf.constant([[0.0, 3.0]]), tf.zeros([1]))
    good = [tf.constant(1.0), tf.constant(1.0)]
    evidence = Evidence(table, tf.constant(value=True), good, good)
    result = ReplicaResult(outcome(), evidence, [], {}, (), ())
    found = diagnosed(result, plan.groups[0], scaling.NoLossScale().initial_state(), plan)

    assert Cause(int(found.cause)) is Cause.FORWARD
    assert (int(found.bad_variable), int(found.nan_count)) == (-1, 3)


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


def test_an_unmeasured_magnitude_stays_unmeasured():
    """NaN stands for a magnitude that was not measured, also in the combined outcome."""
    unmeasured = outcome(max_magnitude=math.nan)

    assert np.isnan(combined(unmeasured, unmeasured).max_magnitude)


@pytest.mark.parametrize("replicas", [1, 3])
def test_on_first_replica(mirrored, replicas):
    """The first replica's values are taken, in the same structure."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        number = tf.cast(tf.convert_to_tensor(index), tf.float32)
        return Outcome(*[number + place for place, _ in enumerate(Outcome._fields)])

    found = tf.function(lambda: on_first_replica(strategy.run(replica), strategy))()

    assert [float(field) for field in found] == list(range(len(Outcome._fields)))


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
