"""Settings, Keras objects and functions as plain values."""

import functools
import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.base.describe import describe, describe_function, plain_attributes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (float("inf"), "inf"),
        (tf.float16, "float16"),
        (tf.TensorShape([None, 2]), [None, 2]),
        ({"b": None, 1: (2, "x")}, {"1": [2, "x"]}),
        ({3, 1}, [1, 3]),
        (np.array([1, 2]), [1, 2]),
        (tf.constant([1.5]), [1.5]),
        (keras.losses.Huber, "Huber"),
        (keras.losses.mean_squared_error, "mean_squared_error"),
        (
            keras.losses.CosineSimilarity(axis=1),
            {"class": "CosineSimilarity", "reduction": "sum_over_batch_size", "axis": 1},
        ),
    ],
)  # fmt: skip
def test_plain_values(value, expected):
    """Every description is a plain value that JSON keeps; None is left out of dicts."""
    assert describe(value) == expected
    assert json.loads(json.dumps(describe(value))) == describe(value)


def test_long_values_are_hashed():
    """Long lists and large arrays are described by a hash, which depends on every item."""
    words = [str(number) for number in range(100)]
    assert describe(words) == describe(tuple(words))
    assert describe(words) != describe([*words[:-1], "x"])
    array = np.zeros(1000)
    assert describe(array).startswith("float64 (1000,), hash ")
    assert describe(array) != describe(np.eye(1, 1000, 7)[0])


def test_what_does_not_change_a_result_is_left_out():
    """Names and initializers are left out; a dtype policy is described by its name."""
    found = describe(
        keras.layers.Dense(3, name="head", kernel_initializer="zeros", dtype="float16")
    )
    assert found == {
        "class": "Dense",
        "trainable": True,
        "dtype": "float16",
        "units": 3,
        "activation": "linear",
        "use_bias": True,
    }


FACTOR = 2.0


def squared(y, predictions):
    """A loss."""
    return FACTOR * (y - predictions) ** 2


def test_functions():
    """A function is described by its code, and by the numbers in closure, module and defaults."""

    def make(power, factor=1.0):
        return lambda y, p, scale=factor: scale * (y - p) ** power

    one = describe_function(make(2))
    assert one == describe_function(make(2))
    assert one["power"] == 2
    assert one["default 0"] == 1.0
    assert {key for key in one if one[key] != describe_function(make(3))[key]} == {"power"}
    assert {key for key in one if one[key] != describe_function(make(2, 0.5))[key]} == {"default 0"}
    assert describe_function(squared)["FACTOR"] == 2.0
    assert one["code"] != describe_function(lambda y, p, scale=1.0: scale * abs(y - p))["code"]
    assert describe_function(tf.function(squared)) == describe_function(squared)
    partial = functools.partial(make, factor=3.0)
    assert describe_function(partial)["arguments"] == [{"factor": 3.0}]
    assert describe_function(len) == "len"


def test_methods():
    """Of a method's owner, the numbers that the method uses are described, and no others."""

    class Owner:
        def __init__(self):
            self.rate, self.calls, self._hidden = 0.5, 3, 1

        def loss(self, y):
            return y * self.rate

    found = describe_function(Owner().loss)
    assert {key: found[key] for key in found if key != "code"} == {"function": "loss", "rate": 0.5}
    assert plain_attributes(Owner()) == {"rate": 0.5, "calls": 3}


@pytest.mark.slow
def test_a_docstring_is_not_code():
    """Docstrings and lines do not count; a set of strings is the same in every process."""

    def documented(x):
        """Says something."""
        return x in {"a", "b", "c"}

    def bare(x):
        return x in {"a", "b", "c"}

    bare.__name__ = "documented"
    assert describe_function(documented) == describe_function(bare)
    program = (
        "from trainer.base.describe import describe_function\n"
        "def bare(x):\n    return x in {'a', 'b', 'c'}\n"
        "print(describe_function(bare)['code'])"
    )
    again = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert again.stdout.strip() == describe_function(bare)["code"]
