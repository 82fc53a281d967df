"""`Trainer` has everything that the functions of `trainer/run` need of a trainer."""

import functools
import inspect
import typing

import pytest
import tensorflow as tf
from helpers import Linear, slopes

import scaling
from trainer import Trainer
from trainer.run.protocol import Parts, RunnableTrainer

ATTRIBUTES = typing.get_type_hints(RunnableTrainer)
MEMBERS = {
    name: member
    for name, member in vars(RunnableTrainer).items()
    if isinstance(member, property) or (inspect.isfunction(member) and not name.startswith("_"))
}
METHODS = [name for name, member in MEMBERS.items() if not isinstance(member, property)]


@pytest.fixture(scope="module")
def trainer():
    """A trainer that has started."""
    started = Linear(verbose=False)
    started.evaluate(slopes(1.0), global_batch=1)
    return started


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_trainer_has_every_attribute(trainer, name):
    """Each attribute exists and has the type that the protocol says."""
    expected = ATTRIBUTES[name]
    value = getattr(trainer, name)
    choices = typing.get_args(expected) if isinstance(expected, type(int | str)) else (expected,)
    classes = tuple(typing.get_origin(choice) or choice for choice in choices)

    if expected is scaling.LossScaleRule:  # a protocol, which cannot be checked at run time
        assert callable(value.advance)
    else:
        assert isinstance(value, classes)


@pytest.mark.parametrize("name", METHODS)
def test_a_trainer_has_every_method(name):
    """Each method takes the arguments that the protocol says, in the same order."""
    method = inspect.signature(getattr(Trainer, name))

    assert list(method.parameters) == list(inspect.signature(MEMBERS[name]).parameters)


@pytest.mark.parametrize("name", sorted(set(MEMBERS) - set(METHODS)))
def test_a_trainer_has_every_property(trainer, name):
    """Each property is read like one, and can be read once the trainer has started."""
    assert isinstance(inspect.getattr_static(Trainer, name), (property, functools.cached_property))
    assert getattr(trainer, name) is not None


def test_the_parts_of_a_started_trainer(trainer):
    """Every part has the type that its field says; protocols are compared by their methods."""
    parts = trainer._parts
    assert isinstance(parts, Parts)
    assert parts.recorder is None
    for name in ("plan", "state", "metrics", "evaluator", "checkpoints"):
        assert isinstance(getattr(parts, name), Parts.__annotations__[name]), name
    assert isinstance(parts.stop, tf.Variable)
    assert callable(parts.run_steps)
    assert parts.run_steps.experimental_get_tracing_count() == 0
