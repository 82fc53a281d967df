"""The state of a run: the loss scale, the seed and the counts."""

from types import SimpleNamespace

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import scaling
from scaling import Cause
from trainer.step.state import TrainState

RULE = scaling.DynamicLossScale()


def plan(limit=0, halting_causes=(Cause.WEIGHTS,), max_skips=3):
    """The part of a plan that counting depends on."""
    skips = SimpleNamespace(retries=limit, halting_causes=halting_causes, max_skips=max_skips)
    return SimpleNamespace(skips=skips)


def count(state, cause, *, retries=0, in_float32=None, **settings):
    """Counts one step that ended with a cause."""
    outcome = SimpleNamespace(
        cause=tf.constant(int(cause)), grads_finite=tf.constant(cause is Cause.NONE)
    )
    state.count(outcome, tf.constant(retries), in_float32, plan(**settings))


def test_a_run_starts_at_step_0():
    """A new state has counted nothing and has the rule's first scale and the given seed."""
    state = TrainState(RULE, seed=7)

    assert int(state.step) == int(state.retries) == int(state.consecutive_skips) == 0
    assert not state.halted.numpy()
    assert (float(state.loss_scaler.loss_scale), int(state.random_seed)) == (2.0**15, 7)


def test_without_a_seed_each_run_has_its_own():
    """Two states without a seed have different ones, below 2^62."""
    seeds = [int(TrainState(RULE).random_seed) for _ in range(2)]

    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**62 for seed in seeds)


@given(st.lists(st.sampled_from([Cause.NONE, Cause.FORWARD, Cause.BACKWARD]), max_size=10))
def test_attempted_steps_are_applied_or_skipped(causes):
    """L10, L11: attempted = applied + skipped; consecutive skips start again after an applied step, and
    the run is halted exactly while they have reached the limit.
    """
    state, consecutive = TrainState(RULE, seed=0), 0
    for steps, cause in enumerate(causes, 1):
        count(state, cause, max_skips=3)
        consecutive = 0 if cause is Cause.NONE else consecutive + 1

        assert int(state.step) == steps
        assert int(state.consecutive_skips) == consecutive
        assert state.halted.numpy() == (consecutive >= 3)
    for cause in Cause:
        assert int(state.outcomes[cause]) == causes.count(cause)


@pytest.mark.sampled
@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("halting_causes", [(), (Cause.WEIGHTS,), (Cause.WEIGHTS, Cause.FORWARD)])
def test_a_halting_cause_ends_the_run_at_once(cause, halting_causes):
    """L11: one skip with a halting cause is enough, whatever the limit is."""
    state = TrainState(RULE, seed=0)
    count(state, cause, halting_causes=halting_causes, max_skips=100)

    assert state.halted.numpy() == (cause in halting_causes)


def test_retries_and_float32_steps_are_counted_separately():
    """L10: retries and steps in float32 are no steps of their own."""
    state = TrainState(RULE, seed=0)
    count(state, Cause.NONE, retries=2, limit=4)
    count(state, Cause.NONE, in_float32=tf.constant(True), limit=4)
    count(state, Cause.NONE, in_float32=tf.constant(False), limit=4)

    assert (int(state.step), int(state.retries), int(state.float32_steps)) == (3, 2, 1)


@pytest.mark.parametrize(("skips", "due"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_step_in_float32_is_due_after_consecutive_skips(skips, due):
    """L11: a step in float32 is due after the given number of consecutive skips, and never without."""
    state = TrainState(RULE, seed=0)
    for _ in range(skips):
        count(state, Cause.BACKWARD)

    assert state.due_in_float32(2).numpy() == due
    assert state.due_in_float32(None) is None
