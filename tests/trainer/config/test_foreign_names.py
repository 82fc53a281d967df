"""Errors that know where people come from, and the migration pages that say the same."""

import pathlib
import re

import numpy as np
import pytest
from helpers import Linear, slopes

from trainer import Trainer
from trainer.config.foreign_names import (
    ARGUMENTS,
    DATA_ARGUMENTS,
    METHODS,
    OVERRIDDEN,
    TRAIN_ARGUMENTS,
)

DOCS = pathlib.Path(__file__).parents[3] / "docs"
ROWS = [
    line.split(" | ")
    for page in sorted(DOCS.glob("from-*.md"))
    for line in page.read_text().splitlines()
    if line.startswith("| `")
]
# Names of halfstep that are given in the wrong place.
OWN = {"epochs", "eval_data", "eval_interval", "eval_steps", "global_batch", "steps", "train_data"}
OWN |= {"x", "y"}


@pytest.mark.parametrize("table", [ARGUMENTS, TRAIN_ARGUMENTS, DATA_ARGUMENTS, METHODS, OVERRIDDEN])
def test_the_pages_say_what_the_errors_say(table):
    """Every name is in a row of a migration page, beside a name that the error gives too."""
    for name, answer in sorted(table.items()):
        if name in OWN:
            continue
        cells = [ours for theirs, ours in ROWS if re.search(rf"`[^`]*\b{name}\b[^`]*`", theirs)]
        given = set(re.findall(r"\w+", answer)) - {"Pass", "Call", "Override", "to", "or", "and"}
        assert any(given & set(re.findall(r"\w+", cell)) for cell in cells), name


@pytest.mark.parametrize("name", [*ARGUMENTS, "los_fn"])
def test_an_argument_of_another_library_is_answered(name):
    """The error of the constructor ends with halfstep's name for it."""
    with pytest.raises(TypeError) as error:
        Trainer(**{name: 1})

    answer = ARGUMENTS.get(name, "Did you mean 'loss_fn'?")
    assert str(error.value) == (
        f"`{name}` must be an argument of Trainer; got an unknown name. The argument would have no "
        f"effect. {answer}"
    )


@pytest.mark.parametrize("name", [*TRAIN_ARGUMENTS, "eval_dat"])
def test_an_argument_of_fit_is_answered_by_train(name):
    """The error of `train` ends with halfstep's name for it."""
    data = {} if name == "x" else {"train_data": slopes(1.0)}
    with pytest.raises(TypeError) as error:
        Trainer().train(**{"train_data": None} | data, **{name: 1})

    answer = TRAIN_ARGUMENTS.get(name, "Did you mean 'eval_data'?")
    assert str(error.value) == (
        f"`{name}` must be an argument of train; got an unknown name. The argument would have no "
        f"effect. {answer}"
    )


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("name", [*DATA_ARGUMENTS, "averagd"])
def test_an_argument_of_keras_is_answered_by_evaluate_and_predict(method, name):
    """The errors end with halfstep's name for it."""
    with pytest.raises(TypeError) as error:
        getattr(Trainer(), method)(slopes(1.0), **{name: 1})

    answer = DATA_ARGUMENTS.get(name, "Did you mean 'averaged'?")
    assert str(error.value) == (
        f"`{name}` must be an argument of {method}; got an unknown name. The argument would have "
        f"no effect. {answer}"
    )


def test_inputs_and_labels_as_two_arguments_are_refused():
    """`train(x, y)` would take the labels for the number of steps."""
    with pytest.raises(TypeError) as error:
        Trainer().train(np.ones([4, 1]), np.ones([4]), epochs=1)

    assert str(error.value) == (
        "`train_data` must hold inputs and labels together; got labels as a second argument, which "
        "is the number of steps. Shuffling and batching keep them together. Pass train((x, y), "
        "epochs=5, global_batch=64), for example."
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_another_library_is_answered(name):
    """Calling it is an AttributeError that says what to call; `hasattr` stays False."""
    trainer = Linear(verbose=False)
    assert not hasattr(trainer, name)
    with pytest.raises(AttributeError) as error:
        getattr(trainer, name)

    assert str(error.value) == f"Linear has no method {name!r}. {METHODS[name]}"


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_that_no_trainer_calls_is_refused(name):
    """A subclass that defines it is refused when a trainer is made."""
    other = type("Other", (Linear,), {name: len})
    with pytest.raises(TypeError) as error:
        other()

    assert str(error.value) == (
        f"`{name}` must not be defined by a Trainer; got a method of Other. The trainer would "
        f"never call it. {OVERRIDDEN[name]} A method that you call yourself needs another name."
    )


def test_an_error_in_a_property_is_not_hidden():
    """An AttributeError of `build_model` is the user's own, not one about the trainer."""

    class Broken(Linear):
        def build_model(self):
            return self.network  # never set

    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'network'"):
        _ = Broken().model
