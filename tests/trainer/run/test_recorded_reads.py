"""What a run's traced code reads is the same when it is resumed, or the run is refused."""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Trainer
from trainer.run.identity import identity_of

pytestmark = pytest.mark.sampled

X = np.ones([4, 3], np.float32)
DATA = (X, X[:, :1])
MODULE = {"factor": 1.0}
ROOT = pathlib.Path(__file__).parents[3]


class Settings:
    """Settings of a loss."""

    def __init__(self, factor):
        """Holds a number."""
        self.factor = factor


class Linear(Trainer):
    """A linear model, whose loss has a factor."""

    shared = 1.0

    def __init__(self, factor=1.0, **arguments):
        """Keeps the factor in several forms; subclasses read one of them."""
        super().__init__(verbose=False, seed=0, **arguments)
        self._private, self.table, self.pair = factor, {"factor": factor}, (factor, 0)
        self.array = np.full(3, factor)
        self.settings, self.args = Settings(factor), argparse.Namespace(factor=factor)
        self.huber = keras.losses.Huber(delta=factor)
        self.scale = functools.partial(tf.multiply, factor)

    def build_model(self):
        """A product."""
        return keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])

    def build_optimizer(self):
        """SGD."""
        return keras.optimizers.SGD(0.1)

    def compute_loss(self, batch, training):
        """The squares times the factor."""
        outputs = tf.cast(self.model(batch[0], training=training), tf.float32)
        return self.weigh(tf.reduce_mean((outputs - batch[1]) ** 2, axis=1))

    def weigh(self, losses):
        """Multiplies."""
        raise NotImplementedError


def by_alias(self, losses):
    """Reads of local variables."""
    settings = self.settings
    table = self.table
    return losses * settings.factor * table["factor"]


FORMS = {
    "alias": by_alias,
    "private": lambda self, losses: losses * self._private,
    "class": lambda self, losses: losses * self.shared,
    "dict": lambda self, losses: losses * self.table["factor"],
    "tuple": lambda self, losses: losses * self.pair[0],
    "array": lambda self, losses: losses * self.array[0],
    "object": lambda self, losses: losses * self.settings.factor,
    "namespace": lambda self, losses: losses * self.args.factor,
    "loss of Keras": lambda self, losses: losses + self.huber(losses, 0 * losses),
    "partial": lambda self, losses: self.scale(losses),
    "module": lambda _, losses: losses * MODULE["factor"],
}


def of_form(name, factor, **arguments):
    """A trainer that reads the factor in one form."""
    cls = type("Own", (Linear,), {"weigh": FORMS[name], "shared": factor})
    MODULE["factor"] = factor
    return cls(factor, **arguments)


@pytest.mark.parametrize("name", FORMS)
def test_another_number_in_any_place_is_refused(name, tmp_path):
    """L12: the run would not end with the same bits. The same number is accepted."""
    of_form(name, 1.0, model_dir=tmp_path).train(DATA, steps=1, global_batch=4)
    of_form(name, 1.0, model_dir=tmp_path).train(DATA, steps=2, global_batch=4)
    with pytest.raises(ValueError, match="`loss_fn` must be the same") as error:
        of_form(name, 3.0, model_dir=tmp_path).train(DATA, steps=3, global_batch=4)
    assert "; got loss read." in str(error.value)
    changed = of_form(name, 3.0, model_dir=tmp_path, allow_changes=("loss",))
    assert changed.train(DATA, steps=3, global_batch=4).totals.applied == 3


class Weighted(keras.losses.Loss):
    """A loss without a configuration, as in Keras's guides."""

    def __init__(self, factor):
        """Holds the factor."""
        super().__init__()
        self.factor = factor

    def call(self, y_true, y_pred):
        """The squares times the factor."""
        return self.factor * tf.reduce_mean((y_true - y_pred) ** 2, axis=1)


class Penalty(keras.regularizers.Regularizer):
    """A regularizer with a private number."""

    def __init__(self, factor):
        """Holds the factor."""
        self._factor = factor

    def __call__(self, weight):
        """The squares times the factor."""
        return self._factor * tf.reduce_sum(weight**2)


class Shrink(keras.constraints.Constraint):
    """A constraint without a configuration."""

    def __init__(self, factor):
        """Holds the factor."""
        self.factor = factor

    def __call__(self, weight):
        """Multiplies."""
        return weight * self.factor


class Rule(keras.optimizers.Optimizer):
    """SGD with a private factor."""

    def __init__(self, factor):
        """Holds the factor."""
        super().__init__(0.1)
        self._factor = factor

    def update_step(self, gradient, variable, learning_rate):
        """One update."""
        variable.assign_sub(learning_rate * self._factor * gradient)


class Rates(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule with a private dict."""

    def __init__(self, factor):
        """Holds the factor."""
        self._rates = {"factor": 0.1 * factor}

    def __call__(self, step):
        """The rate."""
        return self._rates["factor"] * tf.ones_like(step, tf.float32)


def whole(loss_fn=None, optimizer=None, **dense):
    """The arguments of a trainer."""
    return {
        "model": lambda: keras.Sequential([keras.Input([3]), keras.layers.Dense(1, **dense)]),
        "optimizer": (lambda: optimizer) if optimizer else "sgd",
        "loss_fn": loss_fn or "mse",
    }


OBJECTS = {
    "loss": ("loss_fn", lambda factor: whole(Weighted(factor))),
    "method": ("loss_fn", lambda factor: whole(Weighted(factor).call)),
    "regularizer": ("loss_fn", lambda factor: whole(kernel_regularizer=Penalty(factor))),
    "constraint": ("loss_fn", lambda factor: whole(kernel_constraint=Shrink(factor))),
    "optimizer": ("optimizer", lambda factor: whole(optimizer=Rule(factor))),
    "schedule": (
        "optimizer",
        lambda factor: whole(optimizer=keras.optimizers.SGD(Rates(factor))),
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_another_number_in_an_object_is_refused(name, tmp_path):
    """In a loss, a regularizer, a constraint, an optimizer or a schedule of the user's."""
    argument, make = OBJECTS[name]
    settings = {"model_dir": tmp_path, "verbose": False, "seed": 0}
    for steps in (1, 2):
        Trainer(**make(0.5), **settings).train(DATA, steps=steps, global_batch=4)
    with pytest.raises(ValueError, match=f"`{argument}` must be the same"):
        Trainer(**make(0.25), **settings).train(DATA, steps=3, global_batch=4)


@dataclasses.dataclass
class Run:
    """Settings, and what belongs to one run alone."""

    factor: float
    name: str


def of_run(name, **arguments):
    """A trainer whose loss reads one of several attributes, and one key of a dict."""

    class Reading(Linear):
        def weigh(self, losses):
            return losses * self.run.factor * self.options.factor * self.table["factor"]

    trainer = Reading(**arguments)
    trainer.run = Run(1.0, name)
    trainer.options = argparse.Namespace(factor=1.0, folder=name, key=name)
    trainer.table["name"] = name
    return trainer


def test_what_no_code_reads_may_differ(tmp_path):
    """Names, folders and keys of a run are neither compared nor written."""
    of_run("alpha-run", model_dir=tmp_path).train(DATA, steps=1, global_batch=4)
    of_run("beta-run", model_dir=tmp_path).train(DATA, steps=2, global_batch=4)
    texts = [path.read_text() for path in tmp_path.rglob("*.json*")]
    assert texts
    assert not any("alpha-run" in text or "beta-run" in text for text in texts)


def recorded():
    """What is recorded of a trainer that reads sets, objects and functions."""

    class Reading(Linear):
        names, twice = {"b", "a", "c"}, staticmethod(lambda x: 2 * x)
        held = {Settings(1.0): 1.0, "plain": Settings(2.0)}  # noqa: RUF012

        def weigh(self, losses):
            known = "a" in self.names and len(self.held)
            return self.twice(losses) * known * self.settings.factor

    trainer = Reading()
    trainer.train(DATA, steps=1, global_batch=4)
    return json.dumps(identity_of(trainer, {}, {})["loss"]["read"], sort_keys=True)


@pytest.mark.thorough
def test_the_record_is_the_same_in_every_process():
    """No address of an object and no order of a set is in it."""
    found = []
    for seed in ("1", "2"):
        paths = [ROOT, ROOT / "tests", pathlib.Path(__file__).parent]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONHASHSEED": seed,
        }
        program = "import test_recorded_reads as here; print(here.recorded())"
        result = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        found.append(json.loads(result.stdout.splitlines()[-1]))
    assert found[0] == found[1]
    assert found[0]["settings"] == {"factor": 1.0}
    assert found[0]["names"] == {"0": "'a'", "1": "'b'", "2": "'c'"}


@pytest.mark.thorough
def test_a_record_of_an_older_version_is_not_compared(tmp_path, monkeypatch):
    """It does not have these entries."""

    def without(*arguments):
        facts = identity_of(*arguments)
        facts["loss"].pop("read")
        return facts

    with monkeypatch.context() as older:
        older.setattr("trainer.run.build.identity_of", without)
        of_form("dict", 1.0, model_dir=tmp_path).train(DATA, steps=1, global_batch=4)
    trainer = of_form("dict", 3.0, model_dir=tmp_path)
    assert trainer.train(DATA, steps=2, global_batch=4).totals.applied == 2
