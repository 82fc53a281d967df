"""What a run declares, as text at places, and how two fingerprints differ."""

import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import fingerprint as module
from trainer.data.iterator_state import pipeline_graph
from trainer.fingerprint import (
    check_resumable,
    diff,
    entries,
    fingerprint,
    same,
    text_of_array,
    texts_of_arrays,
    texts_of_pipeline,
    version,
)

L = keras.layers
PATH = pathlib.Path("ckpt-1")


def sequential(rate=0.25, activation="relu", **dense):
    """A small model with the layers that tests change."""
    hidden = L.Dense(3, activation=activation, **dense)
    return keras.Sequential([keras.Input([2]), hidden, L.Dropout(rate), L.Dense(1)])


def functional(factor=2.0):
    """A small functional model with an operation that is no layer."""
    inputs = keras.Input([2])
    one = L.Dense(3, "relu")(inputs)
    return keras.Model(inputs, L.Subtract()([one, L.Dense(3)(one)]) * factor)


class Scaled(L.Layer):
    """A layer that Keras cannot describe if it is given an array."""

    def __init__(self, factor, table=None):
        """Takes an array."""
        super().__init__()
        self.factor, self.table = factor, table

    def call(self, x):
        """Scales its input."""
        return x * self.factor


class Subclassed(keras.Model):
    """A model of its own class."""

    def __init__(self, rate=0.25, table=None):
        """Has layers."""
        super().__init__()
        self.inner = [sequential(rate), Scaled(rate, table)]

    def call(self, x):
        """Calls them."""
        return self.inner[1](self.inner[0](x))


def of_model(model, policy="float32"):
    """The entries of a model."""
    return fingerprint(model, {}, policy)


def places(one, other):
    """Where two models differ, with both values."""
    return diff(of_model(one), of_model(other))


@pytest.mark.parametrize("make", [sequential, functional, Subclassed])
def test_the_same_model_made_again_is_the_same(make):
    """Keras numbers the names of layers anew; names and initializers do not count."""
    assert places(make(), make()) == {}
    assert json.loads(json.dumps(of_model(make()))) == of_model(make())
    assert places(sequential(), sequential(kernel_initializer="ones", name="first")) == {}


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (sequential, lambda: sequential(activation="gelu"), {"layers[0].activation": ("relu", "gelu")}),
        (sequential, lambda: sequential(0.5), {"layers[1].rate": ("0.25", "0.5")}),
        (functional, lambda: functional(3.0), {"operations[4].called_with[0].args[1]": ("2", "3")}),
        (Subclassed, lambda: Subclassed(0.5), {"layers[2].rate": ("0.25", "0.5"), "layers[4].factor": ("0.25", "0.5")}),
        (
            lambda: Subclassed(table=np.ones(3)),
            lambda: Subclassed(0.5, np.ones(3)),
            {"layers[2].rate": ("0.25", "0.5")},
        ),
        (tf.Module, tf.Module, {}),
    ],
)  # fmt: skip
def test_what_differs_is_named(one, other, found):
    """L12: a difference has the layer's position, the setting, and both values."""
    assert places(one(), other()) == {f"model.{place}": values for place, values in found.items()}


class Head(keras.Model):
    """A functional model with a constructor of its own, as all of KerasHub's are."""

    def __init__(self, units, config):
        """Keeps what `get_config` returns."""
        x = keras.Input([3])
        super().__init__(inputs=x, outputs=L.Dense(units)(x))
        self.config = config

    def get_config(self):
        """Returns what a user likes, or raises."""
        if self.config is None:
            raise NotImplementedError
        return self.config


@pytest.mark.parametrize(
    "config", [{"units": 1}, {"layers": [16, 32]}, {"output_layers": 3}, None, 5]
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_configuration_that_says_nothing_is_no_error(config, nested):
    """The layers of a model are described, whatever its own configuration is."""

    def make(units):
        model = Head(units, config)
        return keras.Sequential([keras.Input([3]), model]) if nested else model

    place = f"model.layers[{int(nested)}].units"
    assert places(make(1), make(2)) == {place: ("1", "2")}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, {}),
        (np.float32(0.1), {"": "0.1"}),
        (0.1 + 2.0**-50, {"": "0.1000000000000009"}),
        (np.int64(3), {"": "3"}),
        (3.0, {"": "3"}),
        (float("inf"), {"": "inf"}),
        (1e300, {"": "1e+300"}),
        (tf.float16, {"": "float16"}),
        ({"b": None, 1: (2, "x")}, {".1[0]": "2", ".1[1]": "x"}),
        ({3, 1}, {"[0]": "1", "[1]": "3"}),
        (keras.losses.mean_squared_error, {"": "mean_squared_error"}),
        (
            keras.losses.CosineSimilarity(axis=1),
            {"": "CosineSimilarity", ".reduction": "sum_over_batch_size", ".axis": "1"},
        ),
    ],
)
def test_values(value, found):
    """None is left out of dicts; a float of 32 bits is written as in a program."""
    assert entries("x", value) == {f"x{place}": text for place, text in found.items()}


def test_long_lists_are_hashed():
    """A vocabulary, for example; every item counts."""
    words = [str(number) for number in range(100)]
    assert list(entries("x", words)) == ["x"]
    assert entries("x", words) == entries("x", tuple(words)) != entries("x", [*words[:-1], "x"])


def test_optimizers():
    """L12: class and constants count, schedules too; a rate is written as in the program."""
    schedule = keras.optimizers.schedules.CosineDecay(0.5, 100)
    optimizers = {"a": keras.optimizers.Adam(0.1), "b": keras.optimizers.SGD(schedule)}
    found = fingerprint(tf.Module(), optimizers, "float32")
    assert (found["a"], found["a.learning_rate"]) == ("Adam", "0.1")
    assert (found["b.learning_rate"], found["b.learning_rate.decay_steps"]) == (
        "CosineDecay",
        "100",
    )


def test_a_clone_that_is_not_installed_has_no_version():
    """A clone on PYTHONPATH has no package metadata, and trains all the same."""
    assert version("keras") == keras.__version__
    assert version("a-package-that-nobody-wrote") == "not installed"


@pytest.mark.parametrize(
    ("saved", "ours"),
    [
        ({}, {"global_batch": "4", "data.batch": "x"}),
        ({"data.batch": "x", "data.content[0]": "y"}, {"data.batch": "x"}),
        ({"versions.keras": "1", "model.layers[0].a": "1"}, {"versions.keras": "2"}),
    ],
)
def test_what_one_side_does_not_know_is_not_compared(saved, ours):
    """No data, no look into the data, or another version of Keras, which may describe more."""
    assert check_resumable(saved, ours, (), PATH) <= {"versions"}
    assert check_resumable(ours, saved, (), PATH) <= {"versions"}


def test_what_follows_from_a_change_is_not_compared():
    """From another global batch, the sizes; from another precision, the policy of a layer."""
    saved = {"global_batch": "4", "data.batch": "2 steps", "precision": "a", "model.dtype": "a"}
    ours = {"global_batch": "8", "data.batch": "1 step", "precision": "b"}
    allowed = ["global_batch", "precision"]
    assert check_resumable(saved, ours, allowed, PATH) == {*allowed}


X = np.arange(24, dtype=np.float32).reshape(8, 3)


def of(*tensors):
    """The fingerprint of a pipeline that scales the tensors."""
    return texts_of_pipeline(pipeline_graph(scaled(tensors, 2.0)))


def scaled(tensors, factor):
    """A pipeline with a function."""
    return tf.data.Dataset.from_tensor_slices(tensors).map(lambda *row: row[0] * factor).batch(2)


def test_the_same_values_have_the_same_fingerprint():
    """Whether they are arrays or tensors, and up to rounding."""
    assert texts_of_arrays((X, {"y": None})) == texts_of_arrays([tf.constant(X)])
    assert same(text_of_array(X), text_of_array(X * (1 + 1e-7)))
    assert of(X) == of(X.copy())


@pytest.mark.parametrize(
    "other",
    [X + 0.01, X[::-1], X[:7], X.astype(np.float64), np.where(X == 5, np.nan, X)],
    ids=["other values", "another order", "fewer rows", "another dtype", "a NaN"],
)
def test_other_values_have_another_fingerprint(other):
    """Of arrays, and of tensors in a pipeline."""
    assert not same(text_of_array(X), text_of_array(other))
    assert not same(of(X)[0], of(np.ascontiguousarray(other))[0])


def test_numbers_whose_squares_overflow():
    """Data of float64 are equal to themselves, however large their numbers."""
    large = np.array([1e200, -1e308, 1.0])
    assert text_of_array(large) == text_of_array(large.copy())
    assert not same(text_of_array(large), text_of_array(-large))


@pytest.mark.extras
def test_strings_and_tables():
    """Strings are hashed; a table of pandas is read like an array."""
    words = text_of_array(np.array(["a", "b"]))
    assert words.startswith("string (2,), hash ")
    assert words != text_of_array(np.array(["a", "c"]))
    pandas = pytest.importorskip("pandas")
    assert text_of_array(pandas.DataFrame(X)) == text_of_array(X)


def test_large_arrays_are_sampled(monkeypatch):
    """Evenly spaced rows are read, the first and the last among them."""
    monkeypatch.setattr(module, "MAX_ELEMENTS", 6)
    before = text_of_array(X)
    for row, seen in ((0, True), (7, True), (3, False)):
        other = X.copy()
        other[row] += 1
        assert same(before, text_of_array(other)) != seen
    assert text_of_array(tf.constant(X)) == before
