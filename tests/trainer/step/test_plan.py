"""The constants of a step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import imitate_servers
from plans import Pair, keras_model, plan_of

from scaling import Cause
from trainer import Updates
from trainer.step.plan import compiled_as, ones


def two_optimizers():
    """An optimizer for each part of a pair."""
    return {"first": keras.optimizers.SGD(), "second": keras.optimizers.Adam()}


def test_defaults():
    """By default a step attempts once, weights all examples alike, clips nothing and halts on bad
    weights.
    """
    plan = plan_of(Pair())

    assert plan.example_weights(tf.ones([3, 2])).numpy().tolist() == [1.0] * 3
    assert plan.update_metrics((), ()) is None
    assert (plan.num_microbatches, plan.jit_compile, plan.recorded) == (1, False, 0)
    assert (plan.updates.bounds, plan.skips.retries) == ({}, 0)
    assert (plan.skips.halting_causes, plan.skips.max_skips) == ((Cause.WEIGHTS,), 100)
    assert len(plan.groups) == len(plan.objectives) == 1


@pytest.mark.parametrize(
    ("replicas", "num_microbatches", "single"),
    [(1, 1, True), (1, 2, False), (2, 1, False), (2, 2, False)],
)
def test_single_pass(mirrored, replicas, num_microbatches, single):
    """A step is a single pass only with one microbatch on one replica."""
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        model = Pair()

    assert (
        plan_of(model, strategy=strategy, num_microbatches=num_microbatches).single_pass == single
    )


@pytest.mark.parametrize(("alternate", "groups"), [(False, [[0, 1]]), (True, [[0], [1]])])
def test_update_groups(alternate, groups):
    """Objectives form one group, or one each if they alternate."""
    plan = plan_of(
        Pair(), optimizer=two_optimizers(), updates=Updates(alternate_optimizers=alternate)
    )

    assert [group.positions for group in plan.groups] == groups
    assert [objective.name for objective in plan.objectives] == ["first", "second"]


def test_what_may_be_restored_after_a_skip():
    """Nothing of a Keras model, because it is held back; given variables and those of a module; if
    groups alternate, the slots of their optimizers.
    """
    kept = plan_of(keras_model())
    free = tf.Variable(1.0)
    assert kept.declared == ()
    assert [id(variable) for variable in plan_of(keras_model(), others=[free]).declared] == [
        id(free)
    ]

    model = Pair()
    model.statistic = tf.Variable(0.0, trainable=False)
    plan = plan_of(model, optimizer=two_optimizers(), updates=Updates(alternate_optimizers=True))
    updated = {id(variable) for variable in plan.updated}
    slots = [v for objective in plan.objectives for v in objective.optimizer.variables]

    assert id(model.statistic) in {id(variable) for variable in plan.declared}
    assert {id(variable) for variable in slots} <= updated


def test_optimizers_are_built_with_an_average():
    """`ema_momentum` makes the optimizer keep an average of each weight."""
    plan = plan_of(Pair(), updates=Updates(ema_momentum=0.9))
    optimizer = plan.objectives[0].optimizer

    assert optimizer.built
    assert (optimizer.use_ema, optimizer.ema_momentum) == (True, 0.9)
    assert sum("average" in variable.path for variable in optimizer.variables) == 2


@pytest.mark.parametrize("scheduled", [False, True])
def test_has_schedule(scheduled):
    """A learning rate may change with the updates."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9) if scheduled else 0.1

    assert plan_of(Pair(), optimizer=keras.optimizers.SGD(rate)).has_schedule == scheduled


def test_names_and_recorded_variables():
    """Variables are named in the order of the model, and all of them are recorded."""
    plan = plan_of(Pair(), record_gradients=True)

    assert [name.split(":")[0] for name in plan.variable_names] == ["first", "second"]
    assert plan.recorded == 2


def test_compiled_as():
    """A plan in another mode has the same objectives and constants."""
    plan = plan_of(Pair(), num_microbatches=2)
    other = compiled_as(plan, jit_compile=True)

    assert (plan.jit_compile, other.jit_compile) == (False, True)
    assert other.objectives == plan.objectives
    assert other.groups[0].differentiate is not plan.groups[0].differentiate
    assert (other.num_microbatches, other.rule) == (2, plan.rule)


@pytest.mark.parametrize("batch", [tf.zeros([3]), {"a": tf.zeros([3, 2])}, (np.zeros([3]), 1)])
def test_ones(batch):
    """There is a weight of 1 for each row of the batch's first tensor."""
    assert ones(batch).numpy().tolist() == [1.0, 1.0, 1.0]


def test_a_bad_argument_is_refused_before_the_optimizer_is_built():
    """A plan that cannot work leaves its optimizer as it was."""
    optimizer = keras.optimizers.SGD()
    with pytest.raises(ValueError, match="`num_microbatches` must be"):
        plan_of(Pair(), optimizer=optimizer, num_microbatches=0)

    assert not optimizer.built


def test_optimizers_do_not_take_turns_on_parameter_servers(monkeypatch):
    """The undoing of the first update would undo those of other workers."""
    imitate_servers(monkeypatch)
    with pytest.raises(ValueError, match="`alternate_optimizers`"):
        plan_of(Pair(), optimizer=two_optimizers(), updates=Updates(alternate_optimizers=True))
