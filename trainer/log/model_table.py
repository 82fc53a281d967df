"""What a model is made of, variable by variable: shapes, bytes, and in what each is computed."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from rich.table import Table

from trainer.base.keras_private import all_layers
from trainer.log.summary import size

MOST_LAYERS = 30  # in a table that is not to be detailed


class Row(NamedTuple):
    """One variable."""

    name: str
    layer: str  # the name of the innermost layer that holds it; "" in a `tf.Module`
    kind: str  # that layer's class
    shape: list[int]
    dtype: str  # of the variable itself: the master weights'
    compute_dtype: str  # of the layer
    parameters: int
    bytes: int


def rows_of(model: Any) -> list[Row]:
    """Returns a row for each variable of a Keras model or a `tf.Module` that holds real numbers.

    Example:
        >>> import keras
        >>> dense = keras.layers.Dense(2, dtype="mixed_float16", name="dense")
        >>> [kernel, bias] = rows_of(keras.Sequential([keras.Input([3]), dense]))
        >>> kernel.shape, kernel.dtype, kernel.compute_dtype, kernel.bytes
        ([3, 2], 'float32', 'float16', 24)
    """
    if not isinstance(model, keras.Model):
        return [row_of(each, each.name, "", "", "") for each in model.variables if is_real(each)]
    # The layers come from the outermost in; what is innermost has the last word.
    owners = {id(each): layer for layer in all_layers(model) for each in layer.variables}
    return [
        row_of(each, each.path, layer.name, type(layer).__name__, layer.compute_dtype)
        for each in model.variables
        if is_real(each) and (layer := owners.get(id(each), model))
    ]


def is_real(variable: Any) -> bool:
    """Returns whether a variable holds numbers that may be learned, and no seed or count."""
    return tf.as_dtype(variable.dtype).is_floating


def row_of(variable: Any, name: str, layer: str, kind: str, compute_dtype: str) -> Row:
    """Returns the row of one variable."""
    dtype, parameters = tf.as_dtype(variable.dtype), math.prod(variable.shape)
    size_in_bytes = parameters * dtype.size
    shape = list(variable.shape)
    return Row(name, layer, kind, shape, dtype.name, compute_dtype, parameters, size_in_bytes)


def table_of(rows: Sequence[Row], *, detailed: bool) -> Table:
    """Returns a table for a terminal: a row a layer, or, if detailed, a row a variable."""
    table = Table(box=None, pad_edge=False)
    table.add_column("variable" if detailed else "layer", overflow="fold")
    for heading in ["shape"] if detailed else ["kind"]:
        table.add_column(heading)
    for heading in ("dtype", "computes in"):
        table.add_column(heading)
    for heading in ("parameters", "bytes"):
        table.add_column(heading, justify="right")
    if detailed:
        for row in rows:
            shape = " x ".join(map(str, row.shape))
            numbers = (f"{row.parameters:,}", size(row.bytes))
            table.add_row(row.name, shape, row.dtype, row.compute_dtype, *numbers)
        return table
    layers: dict[str, list[Row]] = {}
    for row in rows:
        layers.setdefault(row.layer or row.name, []).append(row)
    for name, own in list(layers.items())[:MOST_LAYERS]:
        dtypes = ", ".join(sorted({row.dtype for row in own}))
        parameters, taken = total_of(own)
        table.add_row(
            name, own[0].kind, dtypes, own[0].compute_dtype, f"{parameters:,}", size(taken)
        )
    if len(layers) > MOST_LAYERS:
        rest = [row for own in list(layers.values())[MOST_LAYERS:] for row in own]
        parameters, taken = total_of(rest)
        more = f"... {len(layers) - MOST_LAYERS} more"
        table.add_row(more, "", "", "", f"{parameters:,}", size(taken))
    return table


def as_markdown(settings: dict[str, Any], rows: Sequence[Row]) -> str:
    """Returns settings and model as tables, for TensorBoard."""
    lines = ["| setting | value |", "|---|---|"]
    lines += [f"| {name} | `{value}` |" for name, value in settings.items()]
    lines += [
        "",
        "| variable | shape | dtype | computes in | parameters |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (f"`{row.name}`", row.shape, row.dtype, row.compute_dtype, f"{row.parameters:,}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def total_of(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns how many parameters some variables have, and how many bytes."""
    return sum(row.parameters for row in rows), sum(row.bytes for row in rows)
