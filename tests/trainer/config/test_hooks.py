"""The names and arguments of hooks, and the errors for methods that are none."""

import inspect

import pytest

from trainer import Trainer
from trainer.config.hooks import HOOKS, check_hooks


def class_with(**members):
    """A subclass of `Trainer` with these members, called Run."""
    return type("Run", (Trainer,), members)


def test_the_hooks_are_those_of_a_trainer():
    """The table has every hook of `Trainer` with its arguments, and refuses none of them."""
    own = {name: value for name, value in inspect.getmembers(Trainer) if name.startswith("on_")}
    found = {name: tuple(inspect.signature(own[name]).parameters)[1:] for name in own}

    assert found == HOOKS
    check_hooks(Trainer)


@pytest.mark.parametrize("name", ["on_evaluation_end", "on_train_batch_end", "on_click"])
def test_an_unknown_hook_is_an_error(name):
    """A method that looks like a hook, and would never be called, is refused."""
    with pytest.raises(TypeError, match=f"`{name}`"):
        class_with(**{name: print})(verbose=False)


def test_a_hook_with_other_arguments_is_an_error():
    """A hook that could not be called is refused when the trainer is made."""

    def without_step(self, values):
        return self, values

    with pytest.raises(TypeError, match="`on_log`"):
        class_with(on_log=without_step)(verbose=False)


@pytest.mark.parametrize(
    "member",
    [
        lambda *arguments: arguments,
        lambda self, epoch, logs=None: (self, epoch, logs),
        staticmethod(lambda epoch: epoch),
        classmethod(lambda cls, epoch: (cls, epoch)),
    ],
)
def test_a_hook_may_be_written_in_other_ways(member):
    """Default values, any number of arguments, static and class methods are accepted."""
    check_hooks(class_with(on_epoch_end=member, on_screen=True))
