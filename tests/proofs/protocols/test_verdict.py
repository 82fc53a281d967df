"""Replicas agree on their verdict, wherever it is decided: in the model as in the code."""

import contextlib
from unittest import mock

import fake_tpu
import plans
import pytest
import tensorflow as tf

import scaling
from proofs.protocols import verdict
from proofs.protocols.search import search
from trainer.step import TrainState, apply, attempt, attempt_step


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_claims_hold_for_every_order_and_fault(replicas, inside):
    """L23: no replica applies alone, no collective is met by some only, and nothing that is not finite is
    applied.
    """
    found = search(verdict.model(replicas, verdict.Protocol(inside=inside)))

    assert found.broken == "", "\n".join(found.story)
    assert found.states > 100 * replicas


@pytest.mark.parametrize("fault", verdict.FAULTS)
def test_a_fault_is_found(fault):
    """A protocol with a fault breaks a claim, and there is a story of how."""
    found = search(verdict.FAULTS[fault]())

    assert found.broken == "nothing that is not finite is applied"
    assert any(line.endswith("judges: finite") for line in found.story)


def test_replicas_that_decide_differently_wait_for_ever():
    """Were it allowed to apply what is not finite, a replica would wait for the others in a
    collective that they never reach.
    """
    protocol = verdict.Protocol(inside=True, judges="own")
    model = verdict.model(2, protocol)
    claims = {"no replica applies alone": model.claims["no replica applies alone"]}
    found = search(model._replace(claims=claims))

    assert found.broken == "everybody can go on until all is done"
    assert any("will apply" in line for line in found.story)
    assert any("skips" in line for line in found.story)


@contextlib.contextmanager
def events():
    """Notes, while a step is traced, which functions each replica calls, and when it meets others."""
    noted = []

    def noting(name, function):
        def call(*arguments, **named):
            context = tf.distribute.get_replica_context()
            where = None if context is None else str(context.replica_id_in_sync_group)
            noted.append((name, where))
            return function(*arguments, **named)

        return call

    places = [
        (attempt, "run_model"),
        (attempt, "sum_over_replicas"),
        (attempt.scaling, "unscale_gradients"),
        (attempt, "judge"),
        (attempt, "apply_on_all"),
        (apply, "apply_in_replica"),
        (attempt, "apply_in_replica"),
        (apply, "average_unsynchronized"),
        (attempt, "diagnose"),
        (tf, "cond"),
    ]
    with contextlib.ExitStack() as stack:
        for module, name in places:
            patch = mock.patch.object(module, name, noting(name, getattr(module, name)))
            stack.enter_context(patch)
        reduced = noting("all_reduce", tf.distribute.ReplicaContext.all_reduce)
        stack.enter_context(mock.patch.object(tf.distribute.ReplicaContext, "all_reduce", reduced))
        yield noted


def traced(strategy):
    """What happens while a step is traced, in order, without conditions that are not the decision."""
    with strategy.scope():
        plan = plans.plan_of(plans.Pair(), strategy=strategy)
        run = TrainState(plan.rule, seed=0)

    def step(batch):
        with strategy.scope():
            return attempt_step(batch, plan, run)

    with events() as noted:
        tf.function(step).get_concrete_function(tf.TensorSpec([8], tf.float32))
    return noted


@pytest.mark.thorough
def test_the_code_decides_outside_of_the_replicas_in_this_order(mirrored):
    """On replicas of one process, each replica does what the model says, then one condition stands
    in cross-replica context, and only behind it is anything applied.
    """
    noted = traced(mirrored(2))
    decided = noted.index(("cond", None))
    first = [name for name, where in noted[:decided] if where and name != "cond"]
    names = [*dict.fromkeys(each for each in first if each != "all_reduce")]

    assert names == list(verdict.PASSES)
    # Each replica's pass is traced once; the step calls the trace.
    assert all(first.count(name) == 2 for name in verdict.PASSES[:1])
    assert first.index("all_reduce") > first.index("sum_over_replicas")
    assert "all_reduce" not in first[first.index("judge") + 2 :]
    assert {"apply_in_replica", "apply_on_all"} <= {name for name, _ in noted[decided:]}
    assert not {"apply_in_replica", "apply_on_all"} & {name for name, _ in noted[:decided]}


@pytest.mark.thorough
def test_the_code_decides_inside_of_the_replicas_in_this_order():
    """On a TPU, the one program of the replicas does what the model says, decides, and applies."""
    noted = [
        name
        for name, where in traced(fake_tpu.strategy())
        if where is not None and name != "all_reduce"
    ]
    decided = len(noted) - 1 - noted[::-1].index("judge") + 1

    assert [*dict.fromkeys(noted[:decided])][:4] == list(verdict.PASSES)
    assert noted[decided] == "cond"
    assert "apply_in_replica" in noted[decided:]
    assert "apply_in_replica" not in noted[:decided]


def test_unscaling_the_same_sums_gives_the_same_bits():
    """What the model assumes of replicas: equal sums are unscaled to equal bits, inf included."""
    state = scaling.DynamicLossScale(initial_scale=2.0**-10).initial_state()
    sums = [tf.constant([1e38, 3.0, float("inf"), -0.0])]
    one, other = (scaling.unscale_gradients(sums, state)[0].numpy() for _ in range(2))

    assert one.tobytes() == other.tobytes()
