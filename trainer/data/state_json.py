"""Writes the state of a source as JSON, and reads it back. Reading cannot run code."""

import base64
import json
from typing import Any

import numpy as np

from trainer.data.structures import is_torch

KIND = "__kind__"  # marks what JSON has no type for


def dumps(state: Any) -> str:
    """Returns a state as JSON.

    Args:
        state: dicts, lists, tuples, numbers, text, bytes, None, NumPy arrays and PyTorch tensors.

    Raises:
        TypeError: if it holds something else.
    """
    return json.dumps(encode(state))


def loads(text: str) -> Any:
    """Returns the state that `dumps` has written.

    Example:
        >>> loads(dumps({"at": (1, b"x"), 2: None}))
        {'at': (1, b'x'), 2: None}
    """
    return decode(json.loads(text))


def encode(value: Any) -> Any:
    """Returns a value in types of JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, np.generic):
        return encode(value.item())
    return encode_marked(value)


def encode_marked(value: Any) -> dict[str, Any]:
    """Returns a value for which JSON has no type as a dict that names its kind."""
    if isinstance(value, tuple):
        return {KIND: "tuple", "items": [encode(item) for item in value]}
    if isinstance(value, dict):
        return {KIND: "dict", "items": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {KIND: "bytes", "base64": base64.b64encode(value).decode()}
    if is_torch(value):
        return encode_array(value.detach().cpu().numpy(), "tensor")
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return encode_array(value, "array")
    raise TypeError(f"its state holds a {type(value).__module__}.{type(value).__name__}")


def encode_array(array: np.ndarray, kind: str) -> dict[str, Any]:
    """Returns an array in types of JSON."""
    content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {KIND: kind, "dtype": array.dtype.str, "shape": list(array.shape), "base64": content}


def decode(value: Any) -> Any:
    """Returns the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    return decode_marked(value) if isinstance(value, dict) else value


def decode_marked(value: dict[str, Any]) -> Any:
    """Returns the value that `encode_marked` was given."""
    kind = value[KIND]
    if kind == "tuple":
        return tuple(decode(item) for item in value["items"])
    if kind == "dict":
        return {decode(k): decode(v) for k, v in value["items"]}
    content = base64.b64decode(value["base64"])
    if kind == "bytes":
        return content
    array = np.frombuffer(content, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if kind == "array":
        return array
    import torch  # noqa: PLC0415  # the source that wrote a tensor needs PyTorch

    return torch.from_numpy(array)
