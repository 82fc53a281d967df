"""The table of a model's variables, on the console and in TensorBoard."""

import io

import keras
import pytest
import tensorflow as tf
from rich.console import Console

from trainer.log.model_table import (
    build_table,
    frozen_parameters,
    total_size,
    variable_rows,
)


def lines_of(rows, *, detailed):
    """The words of each line of a table."""
    console = Console(width=120, file=io.StringIO())
    console.print(build_table(rows, detailed=detailed))
    return [line.split() for line in console.file.getvalue().splitlines()]


@pytest.fixture
def rows():
    """The rows of 34 layers with weights under a mixed policy, the last of them in float32."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        dense = [keras.layers.Dense(2, name=f"dense{place}") for place in range(33)]
        wide = keras.layers.Dense(4, dtype="float32", name="wide")
        dropout = keras.layers.Dropout(0.5, name="dropout")
        model = keras.Sequential([keras.Input([2]), *dense, dropout, wide], name="deep")
    finally:
        keras.config.set_dtype_policy("float32")
    return variable_rows(model)


def test_only_floating_point_variables_are_counted(rows):
    """The seed of a Dropout layer is not a parameter."""
    assert {row.layer for row in rows} == {"wide", *(f"dense{place}" for place in range(33))}
    assert total_size(rows) == (33 * 6 + 12, 4 * (33 * 6 + 12))


def test_the_table_by_layer(rows):
    """A layer's row has its dtypes and sizes; layers beyond the thirtieth are counted in one row."""
    lines = lines_of(rows, detailed=False)

    assert lines[1] == ["dense0", "Dense", "float32", "float16", "6", "24", "B"]
    assert lines[-1] == ["...", "4", "more", "30", "120", "B"]
    assert len(lines) == 1 + 30 + 1


def test_the_table_by_variable(rows):
    """The detailed table has a row for every variable, with its shape."""
    lines = lines_of(rows, detailed=True)

    assert lines[-2][0].endswith("wide/kernel")
    assert lines[-2][1:] == ["2", "x", "4", "float32", "float32", "8", "32", "B"]
    assert len(lines) == 1 + 2 * 34


def test_frozen_layers_and_sublayers_stand_apart():
    """A frozen block is marked, and layers of the same name in two blocks have rows of their own."""
    blocks = [
        keras.Sequential([keras.Input([2]), keras.layers.Dense(2, name="same")], name=name)
        for name in ("first", "second")
    ]
    blocks[0].trainable = False
    rows = variable_rows(keras.Sequential([keras.Input([2]), *blocks], name="outer"))
    lines = lines_of(rows, detailed=False)

    assert [line[0] for line in lines[1:]] == ["first/same", "second/same"]
    assert [line[-1] for line in lines[1:]] == ["frozen", "B"]
    assert [line[-1] for line in lines_of(rows, detailed=True)[1:]] == ["frozen"] * 2 + ["B"] * 2
    assert (frozen_parameters(rows), total_size(rows)[0]) == (6, 12)


def test_a_module_has_no_layers():
    """The rows of a `tf.Module` have names, and no layers; each variable has a line of its own."""
    module = tf.Module()
    module.weight = tf.Variable(tf.ones([2, 3]), name="weight")
    module.counter = tf.Variable(0, name="counter")
    [row] = variable_rows(module)

    assert (row.name, row.layer, row.compute_dtype) == ("weight:0", "", "")
    assert (row.shape, row.parameters, row.bytes) == ([2, 3], 6, 24)
    assert lines_of([row], detailed=False)[1] == ["weight:0", "float32", "6", "24", "B"]
