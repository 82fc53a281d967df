"""The slots of optimizers whose variables are frozen and unfrozen."""

import keras
import numpy as np
import pytest
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


class Dictionary(keras.optimizers.SGD):
    """An optimizer with its slots in a dict."""

    def build(self, variables):
        """Adds a slot for each variable."""
        if not self.built:
            super().build(variables)
            self.own = {variable.path: self.add_variable([], name="own") for variable in variables}


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


@pytest.mark.thorough
def test_slots_that_are_not_found_are_refused():
    """An optimizer whose slots the trainer cannot move is not built again; frozen layers are no problem."""
    trainer = trainer_of(lambda: Dictionary(0.125))
    train(trainer, 1, ["one"])
    assert train(trainer, 2, ["one", "two"]) == ["three"]
    with pytest.raises(ValueError, match="`optimizer`"):
        train(trainer, 3, [])


@pytest.mark.thorough
@pytest.mark.parametrize("first", [lambda: keras.optimizers.SGD(0.125, momentum=0.5), multi])
def test_a_refused_optimizer_stays_as_it_was(first):
    """The same call is refused again; with the layers frozen again, nothing is lost. That includes
    optimizers that were built again before the one that is refused.
    """

    class Both(Trainer):
        def compute_loss(self, batch, training):
            loss = (self.model(batch[0], training=training) - batch[1])[:, 0] ** 2
            return {"one": loss, "two": loss}

    def trainer_of_two():
        return Both(
            model=Pair,
            optimizer=lambda: {"one": first(), "two": Dictionary(0.125, momentum=0.5)},
            verbose=False,
            jit_compile=False,
            seed=1,
        )

    def continued(*, tried):
        trainer = trainer_of_two()
        trainer.model(X)
        for part in (trainer.model.one, trainer.model.two):
            part.layers[0].trainable = False
        trainer.train((X, 3 * X), steps=2, global_batch=2)
        before = [
            id(variable) for each in trainer.optimizer.values() for variable in each.variables
        ]
        for _ in range(2 if tried else 0):
            for part in (trainer.model.one, trainer.model.two):
                part.layers[0].trainable = True
            with pytest.raises(ValueError, match="slots in lists"):
                trainer.train((X, 3 * X), steps=4, global_batch=2)
            for part in (trainer.model.one, trainer.model.two):
                part.layers[0].trainable = False
        trainer.train((X, 3 * X), steps=4, global_batch=2)
        after = [id(variable) for each in trainer.optimizer.values() for variable in each.variables]
        assert after == before
        return [variable.numpy().tobytes() for variable in trainer.model.variables]

    assert continued(tried=True) == continued(tried=False)


class Pair(keras.Model):
    """Two stacks of two layers."""

    def __init__(self):
        """Makes them."""
        super().__init__()
        self.one, self.two = three(), three()

    def call(self, x):
        """Adds them."""
        return self.one(x) + self.two(x)
