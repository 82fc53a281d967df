"""The constants of a step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import imitate_servers
from plans import Pair, keras_model, plan_of

from trainer import Updates
from trainer.step.plan import ones


def two_optimizers():
    """An optimizer for each part of a pair."""
    return {"first": keras.optimizers.SGD(), "second": keras.optimizers.Adam()}


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
