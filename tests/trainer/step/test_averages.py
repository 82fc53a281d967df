"""Moving averages of the weights: what an update makes of them, also on replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.keras_compat import gradients_already_reduced
from trainer.step.averages import assign_averages, averages_of, updating_averages

HALF = {"use_ema": True, "ema_momentum": 0.5}


def stepping(strategy, optimizer, variables, trained=None):
    """A function that applies gradients of 1 on every replica, as a step does."""
    trained = variables if trained is None else trained

    def apply():
        optimizer.apply([tf.constant(1.0)] * len(trained), trained)

    @tf.function(autograph=False)
    def step():
        averaging = updating_averages(optimizer, trained, strategy)
        with gradients_already_reduced(optimizer), averaging:
            strategy.run(apply)

    return step


def values(variable):
    """The values of all replicas' copies."""
    own = variable.value if isinstance(variable, keras.Variable) else variable
    return [float(copy) for copy in getattr(own, "values", [own])]


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", [keras.Variable, tf.Variable])
def test_an_average_follows_and_overwrites_its_weight(mirrored, kind, replicas):
    """It begins at the weight after the first update; every second update overwrites the weight with it,
    on every replica. Outside of the block, the optimizer is as it was.
    """
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        weight, frozen = kind(4.0), kind(8.0)
        optimizer = keras.optimizers.SGD(1.0, ema_overwrite_frequency=2, **HALF)
        optimizer.build([weight, frozen])
    before = dict(vars(optimizer))
    step = stepping(strategy, optimizer, [weight, frozen], trained=[weight])
    (one, average), (other, of_frozen) = averages_of(optimizer)
    assert (one, other) == (weight, frozen)

    seen = []
    for _ in range(3):
        step()
        seen.append((values(weight), values(average)))
    assert seen == [([value] * replicas, [mean] * replicas) for value, mean in EXPECTED]
    assert values(frozen) == values(of_frozen) == [8.0] * replicas
    assert {name: vars(optimizer)[name] for name in before} == before
    assert optimizer.use_ema
    assert "apply" not in vars(optimizer)


EXPECTED = [(3.0, 3.0), (2.5, 2.5), (1.5, 2.0)]


def test_an_average_is_of_the_weight_before_its_constraint():
    """L7: as in Keras, whose steps give the same numbers; the variable has its constraint again."""
    ours, plain = [], []
    for seen in (ours, plain):
        weight = keras.Variable(0.5)
        weight.constraint = keras.constraints.NonNeg()
        optimizer = keras.optimizers.SGD(1.0, ema_overwrite_frequency=2, **HALF)
        optimizer.build([weight])
        step = stepping(tf.distribute.get_strategy(), optimizer, [weight])
        for _ in range(3):
            step() if seen is ours else optimizer.apply([tf.constant(1.0)], [weight])
            seen.append((values(weight), values(averages_of(optimizer)[0][1])))
        assert weight.constraint is not None

    assert ours == plain
    assert ours[0] == ([0.0], [-0.5])


def test_an_optimizer_that_leaves_its_update_to_another_has_averages():
    """A wrapper's `apply` may not call that of Keras's class."""

    class Wrapper(keras.optimizers.Optimizer):
        def __init__(self, inner):
            super().__init__(learning_rate=0.1, **HALF)
            self.inner = inner

        def build(self, variables):
            super().build(variables)
            self.inner.build(variables)

        def apply(self, grads, trainable_variables=None):
            self.inner.apply(grads, trainable_variables)
            self.iterations.assign_add(1)

    weight, optimizer = keras.Variable(4.0), Wrapper(keras.optimizers.SGD(1.0))
    optimizer.build([weight])
    step = stepping(tf.distribute.get_strategy(), optimizer, [weight])
    step()
    step()
    [(_, average)] = averages_of(optimizer)
    assert (values(weight), values(average)) == ([2.0], [2.5])


@pytest.mark.parametrize("make", [keras.optimizers.Adam, keras.optimizers.RMSprop])
def test_averages_are_found_among_the_other_variables(make):
    """Whatever the weights are called, and without those of Keras that are no weights."""
    weights = [keras.Variable([float(at)] * 2, name=name) for at, name in enumerate(NAMES)]
    weights[1].overwrite_with_gradient = True
    optimizer = make(**HALF)
    assert averages_of(optimizer) == []
    optimizer.build(weights)
    pairs = averages_of(optimizer)
    assert [one.path for one, _ in pairs] == [weights[0].path, weights[2].path]
    assert [average.name for _, average in pairs] == ["a_average", "a_average_average"]
    assert averages_of(make()) == []


NAMES = ("a", "scale", "a_average")


def test_weights_are_overwritten_bit_for_bit(mirrored):
    """All copies become the average, also of a weight that is not trained now."""
    strategy = mirrored(3)
    with strategy.scope():
        weight = keras.Variable(np.float32(0.1))
        optimizer = keras.optimizers.SGD(1.0, **HALF)
        optimizer.build([weight])
    [(_, average)] = averages_of(optimizer)
    average.assign(np.float32(0.3))
    with strategy.scope():
        assign_averages(optimizer, strategy)
    assert [np.float32(value) for value in values(weight)] == [np.float32(0.3)] * 3
