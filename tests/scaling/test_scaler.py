"""`LossScaler`: the rule's state in variables."""

import generators
import oracle
import pytest
import tensorflow as tf
from hypothesis import given

import scaling
from scaling import Cause, DynamicLossScale, LossScaler, Verdict


@given(generators.rules(), generators.histories(max_size=15))
def test_update_follows_the_rule(rule, history):
    """L4: after any history, every variable holds what the oracle says."""
    scaler = LossScaler(rule)
    expected = oracle.start(rule)
    for finite in history:
        scaler.update(finite)
        expected = oracle.advance(*expected, finite, rule)

        assert expected == tuple(field.numpy().item() for field in scaler.state)


def test_the_token_unscales_by_the_scale_that_scaled():
    """L2: a token taken before the scale moved still divides by the old scale."""
    scaler = LossScaler(DynamicLossScale(initial_scale=8.0, growth_interval=1))
    scaled, token = scaler.scale(tf.constant(3.0))
    scaler.update(True)

    assert float(scaler.loss_scale) == 16.0
    assert float(scaler.unscale(scaled, token)) == 3.0


@pytest.mark.parametrize("replicas", [2, 3])
def test_one_veto_counts_on_every_replica(mirrored, on_replicas, replicas):
    """L5: an overflow on the last replica alone backs off every copy of the scale."""
    strategy = mirrored(replicas)
    with strategy.scope():
        scaler = LossScaler(DynamicLossScale(initial_scale=8.0))

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        scaler.update(index < replicas - 1)
        return scaler.loss_scale

    assert [4.0] * replicas == [float(scale) for scale in on_replicas(strategy, replica)]


def test_an_incurable_cause_on_one_replica_keeps_the_scale(mirrored, on_replicas):
    """L17: replica 0 overflowed backward, replica 1 forward: no scale would have helped."""
    strategy = mirrored(2)
    with strategy.scope():
        scaler = LossScaler(DynamicLossScale(initial_scale=8.0))

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        cause = tf.where(index == 0, int(Cause.BACKWARD), int(Cause.FORWARD))
        scaler.update(Verdict(tf.constant(False), cause))
        return scaler.loss_scale

    assert [float(scale) for scale in on_replicas(strategy, replica)] == [8.0, 8.0]


def test_a_checkpoint_keeps_every_field(tmp_path):
    """Every field, away from its default, comes back."""
    rule = DynamicLossScale(growth_interval=10, hysteresis=3)
    before = LossScaler(rule)
    for finite in [False, True, True]:
        before.update(finite)
    path = tf.train.Checkpoint(scaler=before).write(str(tmp_path / "scaler"))
    after = LossScaler(rule)
    tf.train.Checkpoint(scaler=after).read(path).assert_consumed()

    expected = tuple(field.numpy() for field in before.state)
    assert expected == tuple(field.numpy() for field in after.state)
    assert expected == (2.0**15, 2, 2)


def test_a_rule_of_ones_own_needs_only_the_two_methods():
    """Any NamedTuple of tensors will do as state."""

    class Halving:
        needs_magnitude = False

        def initial_state(self):
            return scaling.FixedLossScaleState(tf.constant(64.0))

        def advance(self, state, verdict):
            del verdict
            return state._replace(loss_scale=state.loss_scale / 2)

    scaler = LossScaler(Halving())
    scaler.update(True)

    assert float(scaler.loss_scale) == 32.0
