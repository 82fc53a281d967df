"""Attributes of a trainer: what may be assigned, and what the others say."""

import keras
import numpy as np
import pytest
from helpers import Linear, linear_model, slopes

from trainer import Trainer
from trainer.config.attributes import ARGUMENTS_ONLY, COMPUTED, FIXED

HEAD = "`{}` must not be assigned to a trainer that exists; got {}. The trainer has been set up "
TAIL = "with another value, and would not notice. {}"
RENAME = "If this is an attribute of your own subclass, give it another name."


@pytest.fixture(scope="module")
def started():
    """A trainer that has trained."""
    trainer = Linear(verbose=False, steps_per_loop=1)
    trainer.train(slopes(1.0, 2.0), steps=1, global_batch=2)
    return trainer


def refused(trainer, name, value):
    """The error of an assignment, which changes nothing."""
    before = getattr(trainer, name, None)
    with pytest.raises(AttributeError) as error:
        setattr(trainer, name, value)
    assert getattr(trainer, name, None) is before
    return str(error.value)


def test_what_is_built_is_fixed(started):
    """The model and the optimizer cannot be replaced; the errors say what can be done."""
    model = linear_model()
    assert refused(started, "model", model) == (HEAD + TAIL).format(
        "model",
        "a Sequential" if len(repr(model)) > 60 else repr(model),
        "Its optimizer, its step and its checkpoints belong to the variables of the model it was "
        "built with. Make a new trainer with model=, or copy weights into this model: "
        "trainer.model.set_weights(other.get_weights()).",
    )
    assert refused(started, "optimizer", None) == (HEAD + TAIL).format(
        "optimizer",
        None,
        "Its step and its checkpoints belong to the variables of the optimizer it was built with. "
        "For another learning rate, assign trainer.optimizer.learning_rate. For another optimizer, "
        "make a new trainer: Trainer(model=lambda: trainer.model, strategy=trainer.strategy, "
        "optimizer=..., ...).",
    )
    started.model = started.model  # the same object changes nothing


def test_settings_are_fixed_from_the_beginning():
    """What the constructor has resolved is fixed, also before anything is built."""
    trainer = Linear(verbose=False, seed=3)
    assert refused(trainer, "precision", "mixed_float16") == (HEAD + TAIL).format(
        "precision", "'mixed_float16'", f"Pass precision= to a new trainer. {RENAME}"
    )
    assert refused(trainer, "updates", 0.2).endswith(f"Pass updates= to a new trainer. {RENAME}")
    trainer.seed = 3  # as many constructors do
    for name in FIXED:
        refused(trainer, name, object())
    for name in ("metrics", "totals"):
        with pytest.raises(AttributeError, match=f"`{name}` must not be assigned"):
            setattr(trainer, name, {})
    assert {"metrics", "totals", "loss_scale"} == {*COMPUTED}


def test_methods_may_be_replaced():
    """Before the first call, and between two calls."""
    trainer = Linear(verbose=False)
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda batch, training: 2.0 * compute_loss(batch, training)
    trainer.train(slopes(1.0, 2.0), steps=1, global_batch=2)
    assert trainer.weight == 1 - 2 * 1.5
    trainer.compute_loss = lambda batch, training: 0.0 * compute_loss(batch, training)
    trainer.train(slopes(1.0, 2.0), steps=2, global_batch=2)
    assert trainer.weight == 1 - 2 * 1.5


def test_arguments_that_are_no_attributes():
    """An argument that a trainer keeps under another name would be ignored, so it is refused."""
    trainer = Trainer(verbose=False)
    for name in ARGUMENTS_ONLY:
        refused(trainer, name, 1)


@pytest.mark.parametrize(
    ("name", "wrong", "right"), [("steps_per_loop", -3, 7), ("log_interval", 0, 5)]
)
def test_what_may_change_is_checked_like_the_argument(started, name, wrong, right):
    """The error is that of the constructor."""
    with pytest.raises((TypeError, ValueError)) as expected:
        Linear(**{name: wrong})
    with pytest.raises((TypeError, ValueError)) as error:
        setattr(started, name, wrong)
    assert str(error.value) == str(expected.value)
    setattr(started, name, right)
    assert getattr(started, name) == right


def test_a_subclass_keeps_what_it_likes():
    """Its own attributes, its arguments under their names, and a model or an optimizer that it
    assigns before or after the constructor of `Trainer`.
    """

    class Own(Linear):
        def __init__(self, early, seed=1, **arguments):
            self.early = early
            if early:
                self.model, self.optimizer = linear_model(), keras.optimizers.SGD(0.5)
            super().__init__(seed=seed, verbose=False, **arguments)
            if not early:
                self.model, self.optimizer = linear_model(), keras.optimizers.SGD(0.5)
            self.seed, self.verbose, self.loss_fn = seed, True, "mine"
            self.alpha, self.state = 0.1, {}

        build_optimizer = Trainer.build_optimizer

    for early in (True, False):
        trainer = Own(early)
        assert trainer.has_optimizer
        trainer.train(slopes(1.0, 2.0), steps=1, global_batch=2)
        assert trainer.weight == 1 - 0.5 * 1.5
        trainer.alpha, trainer.verbose = 0.2, False
        assert (trainer.loss_fn, trainer.alpha) == ("mine", 0.2)


def test_a_model_assigned_in_build_model():
    """A subclass may assign self.model while it builds it."""

    class Assigns(Linear):
        def build_model(self):
            self.model = linear_model()
            return self.model

    trainer = Assigns(verbose=False)
    trainer.train(slopes(1.0), steps=1, global_batch=1)
    assert np.isclose(trainer.weight, 0.0)
