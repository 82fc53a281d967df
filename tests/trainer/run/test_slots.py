"""The slots of optimizers whose variables are frozen and unfrozen."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import needs_multi_optimizer

from trainer import Trainer
from trainer.run.slots import facts_of, slots_from, slots_now

X = np.float32([[1.0], [2.0]])


def three():
    """Three layers of one weight each."""
    layers = [keras.layers.Dense(1, use_bias=False, name=name) for name in ("one", "two", "three")]
    return keras.Sequential([keras.Input([1]), *layers], name="net")


def trainer_of(optimizer):
    """A trainer of `three`."""
    return Trainer(
        model=three, optimizer=optimizer, loss_fn="mse", verbose=False, jit_compile=False, seed=1
    )


def train(trainer, steps, frozen):
    """Freezes some layers, and trains up to a step; returns the layers whose weight moved."""
    before = trainer.model.get_weights()
    for layer in trainer.model.layers:
        layer.trainable = layer.name not in frozen
    trainer.train((X, 3 * X), steps=steps, global_batch=2)
    after = trainer.model.get_weights()
    names = [layer.name for layer in trainer.model.layers]
    return [name for name, old, new in zip(names, before, after, strict=True) if old != new]


def multi():
    """Adam for the first layer, SGD for the others."""
    rates = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.125, momentum=0.5))
    rates["net/one/.*"] = keras.optimizers.Adam(0.125)
    return keras.optimizers.MultiOptimizer(rates)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(multi, marks=needs_multi_optimizer),
        lambda: keras.optimizers.Adafactor(0.125),
    ],
)
def test_missed_updates_are_counted(make):
    """Each variable has missed the updates of its optimizer while it was frozen; what `run.json` says
    about it comes back.
    """
    trainer = trainer_of(make)
    assert train(trainer, 2, ["one", "two"]) == ["three"]
    slots = [old.numpy() for old in trainer.optimizer.variables]
    assert train(trainer, 3, ["two"]) == ["one", "three"]
    assert train(trainer, 4, ["one", "three"]) == ["two"]
    facts = facts_of(trainer._parts.slots, trainer)

    single = make is not multi
    missed = {0: 3, 1: 3, 2: 1} if single else {0: 0, 1: 3, 2: 1}
    assert dict(facts["slots"]["optimizer"]) == missed
    assert facts["trained"] == [1]
    again = slots_now(trainer, slots_from(facts, trainer))
    assert facts_of(again, trainer) == facts
    assert len(slots) < len(trainer.optimizer.variables)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
@pytest.mark.thorough
def test_a_model_without_a_trained_variable_is_refused():
    """Before a step, with the name of the variable: its slots and its checkpoints would be lost."""
    trainer = trainer_of(lambda: keras.optimizers.Adam(0.125))
    train(trainer, 2, ())
    trainer.model.get_layer("two").quantize("int8")
    with pytest.raises(ValueError, match="`model`"):
        trainer.train((X, 3 * X), steps=4, global_batch=2)

    assert trainer.totals.attempted == 2


class Own(keras.optimizers.SGD):
    """Has a setting that `get_config()` leaves out, and slots in a dict."""

    def __init__(self, learning_rate, factor=1.0, **arguments):
        """Keeps the setting."""
        super().__init__(learning_rate, **arguments)
        self.factor = factor

    def build(self, variables):
        """Adds a slot for each variable."""
        super().build(variables)
        self.own = {one.path: self.add_variable([], name="own") for one in variables}

    def update_step(self, gradient, variable, learning_rate):
        """Multiplies the gradient."""
        super().update_step(self.factor * gradient, variable, learning_rate)


@pytest.mark.parametrize(
    "rate", [0.125, keras.optimizers.schedules.ExponentialDecay(0.125, 1, 1.0)]
)
def test_an_optimizer_keeps_its_settings(rate):
    """L19: what an optimizer's configuration leaves out holds after it was built for more variables:
    a setting, an exclusion from weight decay, and an attribute that was set later. It stays the same
    object, and keeps the values of its slots.
    """

    def make():
        made = Own(rate, factor=0.0, momentum=0.5, weight_decay=0.5)
        made.exclude_from_weight_decay(var_names=["kernel"])
        return made

    trainer = trainer_of(make)
    optimizer = trainer.optimizer
    assert train(trainer, 1, ["one"]) == []
    optimizer.factor, optimizer.clipnorm = 1.0, 2.0**-10
    assert train(trainer, 2, ["one"]) == ["two", "three"]
    momentum = optimizer.momentums[1].numpy()
    assert len(optimizer.own) == 2
    optimizer.factor = 0.0
    before = trainer.model.get_weights()
    train(trainer, 3, [])

    assert trainer.optimizer is optimizer
    assert len(optimizer.own) == len(optimizer.momentums) == 3
    assert optimizer.momentums[1].numpy() == 0.5 * momentum
    assert (optimizer.factor, optimizer.clipnorm) == (0.0, 2.0**-10)
    assert trainer.model.get_weights()[0] == before[0]  # neither updated nor decayed
    assert int(optimizer.iterations.numpy()) == 3


class Late(keras.optimizers.SGD):
    """Makes a variable in its first update."""

    def apply(self, grads, trainable_variables=None):
        """Makes the variable."""
        if not hasattr(self, "late"):
            with tf.init_scope():
                self.late = self.add_variable([], name="late")
        super().apply(grads, trainable_variables)


class Unknown(keras.optimizers.SGD):
    """Needs an argument that its configuration does not have."""

    def __init__(self, rate, needed):
        """Ignores it."""
        super().__init__(rate)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [lambda: Late(0.125), lambda: Unknown(0.125, 1)])
def test_an_optimizer_that_cannot_be_built_again_stays_as_it_was(make):
    """Before a step; with the layers frozen again, the run goes on."""
    trainer = trainer_of(make)
    train(trainer, 1, ["one"])
    before = list(map(id, trainer.optimizer.variables))
    for _ in range(2):
        with pytest.raises((ValueError, TypeError)):  # one is Python's
            train(trainer, 3, [])
        assert list(map(id, trainer.optimizer.variables)) == before
    assert train(trainer, 3, ["one"]) == ["two", "three"]
