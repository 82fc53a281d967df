"""A table of a model's variables: shape, dtype, compute dtype, and size."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from rich.table import Table

from trainer.keras_compat import owners_of
from trainer.log.summary import format_bytes

MAX_LAYERS = 30  # rows of the table by layer


class VariableRow(NamedTuple):
    """A variable of the model, as a row of the table."""

    name: str
    layer: str  # name of the innermost layer that holds the variable, after those of the layers
    # around it; "" in a `tf.Module`
    kind: str  # class name of that layer
    shape: list[int]
    dtype: str  # dtype of the variable itself (the master weights)
    compute_dtype: str  # compute dtype of the layer
    parameters: int
    bytes: int
    frozen: bool = False  # whether the layer has trainable=False


def variable_rows(model: keras.Layer | tf.Module) -> list[VariableRow]:
    """Returns a row for each weight of a model, trained or not; see `is_weight`.

    Example:
        >>> import keras
        >>> dense = keras.layers.Dense(2, dtype="mixed_float16", name="dense")
        >>> [kernel, bias] = variable_rows(keras.Sequential([keras.Input([3]), dense]))
        >>> kernel.shape, kernel.dtype, kernel.compute_dtype, kernel.bytes
        ([3, 2], 'float32', 'float16', 24)
    """
    variables = [variable for variable in model.variables if is_weight(variable)]
    if not isinstance(model, keras.Layer):
        return [variable_row(each, each.name, "", "", "") for each in variables]
    owners = owners_of(model)
    return [
        variable_row(
            each,
            each.path,
            each.path.rpartition("/")[0].removeprefix(f"{model.name}/") or layer.name,
            type(layer).__name__,
            layer.compute_dtype,
        )._replace(frozen=not layer.trainable)
        for each in variables
        for layer in [owners.get(id(each), model)]
    ]


def is_weight(variable: keras.Variable | tf.Variable) -> bool:
    """Returns whether a variable holds floats or quantized weights, and not a seed or a count."""
    dtype = tf.as_dtype(variable.dtype)
    return bool(dtype.is_floating or dtype in (tf.int8, tf.uint8))


def variable_row(
    variable: keras.Variable | tf.Variable, name: str, layer: str, kind: str, compute_dtype: str
) -> VariableRow:
    """Returns the row of one variable."""
    dtype, parameters = tf.as_dtype(variable.dtype), math.prod(variable.shape)
    size = parameters * dtype.size
    shape = list(variable.shape)
    return VariableRow(name, layer, kind, shape, dtype.name, compute_dtype, parameters, size)


def build_table(rows: Sequence[VariableRow], *, detailed: bool) -> Table:
    """Returns a console table with one row per layer or, if detailed, one per variable."""
    table = Table(box=None, pad_edge=False)
    table.add_column("variable" if detailed else "layer", overflow="fold")
    for heading in ("shape" if detailed else "kind", "dtype", "computes in"):
        table.add_column(heading)
    for heading in ("parameters", "bytes"):
        table.add_column(heading, justify="right")
    if any(row.frozen for row in rows):
        table.add_column("")
    if detailed:
        for row in rows:
            shape = " x ".join(map(str, row.shape))
            sizes = (f"{row.parameters:,}", format_bytes(row.bytes))
            table.add_row(row.name, shape, row.dtype, row.compute_dtype, *sizes, *frozen_cell(row))
        return table
    layers: dict[str, list[VariableRow]] = {}
    for row in rows:
        layers.setdefault(row.layer or row.name, []).append(row)
    for name, of_layer in list(layers.items())[:MAX_LAYERS]:
        dtypes = ", ".join(sorted({row.dtype for row in of_layer}))
        first = of_layer[0]
        cells = (*size_cells(of_layer), *frozen_cell(first))
        table.add_row(name, first.kind, dtypes, first.compute_dtype, *cells)
    if len(layers) > MAX_LAYERS:
        omitted = [row for of_layer in list(layers.values())[MAX_LAYERS:] for row in of_layer]
        more = f"... {len(layers) - MAX_LAYERS} more"
        table.add_row(more, "", "", "", *size_cells(omitted))
    return table


def frozen_cell(row: VariableRow) -> tuple[str, ...]:
    """Returns the cell that marks a frozen layer, if it is one."""
    return ("frozen",) if row.frozen else ()


def frozen_parameters(rows: Sequence[VariableRow]) -> int:
    """Returns the number of parameters in frozen layers."""
    return sum(row.parameters for row in rows if row.frozen)


def size_cells(rows: Sequence[VariableRow]) -> tuple[str, str]:
    """Returns the table cells with the total parameters and bytes of the given variables."""
    parameters, size = total_size(rows)
    return f"{parameters:,}", format_bytes(size)


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings as one dict.

    Example:
        >>> flattened({"seed": 1, "optimizer": {"class": "SGD", "learning_rate": 0.5}})
        {'seed': 1, 'optimizer.class': 'SGD', 'optimizer.learning_rate': 0.5}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and value
        flat |= flattened(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def total_size(rows: Sequence[VariableRow]) -> tuple[int, int]:
    """Returns the total numbers of parameters and bytes of the given variables."""
    return sum(row.parameters for row in rows), sum(row.bytes for row in rows)
