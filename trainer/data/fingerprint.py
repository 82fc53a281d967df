"""Fingerprints of training data, by which a resumed run notices that it is given other data.

Reading all the data would take too long. Of arrays, and of tensors that a pipeline holds, up to a
million elements in evenly spaced rows are summed with fixed random factors, so that the result
depends on their order. Sums are compared with a tolerance: another processor may round differently
when it prepares the same data. What a pipeline reads from files is not looked at.
"""

import math
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.base.describe import digest

# A fingerprint: of each tensor, its "kind", and "norm" and "projection", or a "hash".
Fingerprint = list[dict[str, Any]]

MAX_ELEMENTS = 2**20  # how many elements of a tensor are read
LARGEST = 1e150  # larger numbers are taken for this one: the sum of their squares may overflow
TOLERANCE = 1e-5  # of a projection, as a fraction of the norm


def of_arrays(arrays: Any) -> Fingerprint:
    """Returns the fingerprint of arrays in any structure, with one entry for each array.

    Example:
        >>> of_arrays({"x": np.zeros([8, 2], np.float32)})
        [{'kind': 'float32 (8, 2)', 'norm': 0.0, 'projection': 0.0}]
    """
    return [of_tensor(leaf) for leaf in tf.nest.flatten(arrays) if leaf is not None]


def of_tensor(tensor: Any) -> dict[str, Any]:
    """Returns the fingerprint of one array: a NumPy array, a tensor, or a column of pandas."""
    shape = tuple(np.shape(tensor))
    values = np.asarray(some_rows(tensor, shape))
    kind = f"{values.dtype.name if values.dtype.kind in 'biufc' else 'string'} {shape}"
    if values.dtype.kind not in "biuf":
        return {"kind": kind, "hash": digest(repr(values.tolist()))}
    numbers = np.nan_to_num(values.astype(np.float64), posinf=2.0, neginf=-2.0).ravel()
    numbers = np.clip(numbers, -LARGEST, LARGEST)
    factors = np.random.default_rng(0).random(numbers.size) - 0.5
    return {
        "kind": kind,
        "norm": float(np.linalg.norm(numbers)),
        "projection": float(numbers @ factors),
    }


def some_rows(tensor: Any, shape: tuple[int, ...]) -> Any:
    """Returns evenly spaced rows with at most `MAX_ELEMENTS` elements, but at least one row."""
    if not shape or math.prod(shape) <= MAX_ELEMENTS:
        return tensor
    count = max(1, MAX_ELEMENTS // max(1, math.prod(shape[1:])))
    rows = np.linspace(0, shape[0] - 1, count).astype(np.int64)
    if tf.is_tensor(tensor):
        return tf.gather(tensor, rows)
    if hasattr(tensor, "iloc"):
        return tensor.iloc[rows]
    return np.asarray(tensor)[rows]


def of_pipeline(graph: tf.compat.v1.GraphDef) -> Fingerprint:
    """Returns the fingerprint of a pipeline of `tf.data`: of its tensors, and of its functions.

    Args:
        graph: the pipeline's graph. Its functions are those passed to `map`, `filter` and others.
    """
    tensors = [
        node.attr["value"].tensor
        for node in graph.node
        if node.op == "Const" and node.attr["value"].tensor.tensor_shape.dim
    ]
    functions = sorted(
        digest(repr([(node.op, constant_in(node)) for node in function.node_def]))
        for function in graph.library.function
    )
    found = [of_constant(tensor) for tensor in tensors]
    return [*found, {"kind": f"{len(functions)} functions", "hash": digest(repr(functions))}]


def of_constant(tensor: Any) -> dict[str, Any]:
    """Returns the entry of a constant tensor, given as its protocol buffer."""
    if tensor.dtype == tf.variant.as_datatype_enum:  # sparse tensors, one for each element
        return {"kind": "sparse", "hash": digest(tensor.SerializeToString(deterministic=True))}
    return of_tensor(file_names(value_of(tensor)))


def constant_in(node: tf.compat.v1.NodeDef) -> str:
    """Returns a hash of the number that an operation returns, if it is a constant."""
    tensor = node.attr["value"].tensor if node.op == "Const" else None
    if tensor is None or tensor.dtype == tf.string.as_datatype_enum:
        return ""
    if tensor.dtype == tf.variant.as_datatype_enum:
        return digest(tensor.SerializeToString(deterministic=True))
    return digest(value_of(tensor).tobytes())


def value_of(tensor: Any) -> np.ndarray:
    """Returns the value of a constant. `tf.make_ndarray` fails for some constants of strings."""
    value: np.ndarray = tf.io.parse_tensor(
        tensor.SerializeToString(), tf.as_dtype(tensor.dtype)
    ).numpy()
    return value


def file_names(values: np.ndarray) -> np.ndarray:
    """Returns strings without what is before their last slash: data may move to another folder."""
    if values.dtype.kind != "O":
        return values
    last = [bytes(value).rpartition(b"/")[2] for value in values.ravel()]
    return np.array(last, object).reshape(values.shape)


def text_of(entry: dict[str, Any] | None) -> str:
    """Returns one entry of a fingerprint in words."""
    if entry is None:
        return "nothing"
    numbers = [f"{name} {entry[name]:.5g}" for name in ("norm", "projection") if name in entry]
    hashes = [f"hash {entry[name]}" for name in ("hash",) if name in entry]
    return ", ".join([entry["kind"], *numbers, *hashes])


def first_change(was: Fingerprint, now: Fingerprint) -> tuple[int, str, str] | None:
    """Returns the first difference of two fingerprints: its position, and both entries in words.

    Returns None if the fingerprints are of the same data, as far as they can tell.
    """
    for place in range(max(len(was), len(now))):
        before, after = (side[place] if place < len(side) else None for side in (was, now))
        if before is None or after is None or not is_same(before, after):
            return place, text_of(before), text_of(after)
    return None


def is_same(was: dict[str, Any], now: dict[str, Any]) -> bool:
    """Returns whether two entries are of the same values, up to rounding."""
    if was["kind"] != now["kind"] or was.get("hash") != now.get("hash"):
        return False
    if "norm" not in was or "norm" not in now:
        return ("norm" in was) == ("norm" in now)
    bound = TOLERANCE * max(abs(was["norm"]), 1e-30)
    return all(abs(was[name] - now[name]) <= bound for name in ("norm", "projection"))
