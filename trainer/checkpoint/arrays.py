"""Saves states that hold NumPy arrays: the arrays in a file, the rest as JSON in `run.json`."""

import io
import pathlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

FILE = "callbacks.npz"
PLACE, DTYPE, SHAPE = "array", "dtype", "shape"  # keys of what stands for an array


def split(state: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Returns a state with its arrays replaced by their places, and adds them to `arrays`.

    Raises:
        TypeError: if the state holds a value that JSON has no type for.

    Example:
        >>> arrays = {}
        >>> split({"best": 0.5, "weights": [np.ones(2, np.float32)]}, arrays)
        {'best': 0.5, 'weights': [{'array': '0', 'dtype': 'float32', 'shape': [2]}]}
        >>> joined([{"array": "0", "dtype": "float32", "shape": [2]}], arrays)
        [array([1., 1.], dtype=float32)]
    """
    if isinstance(state, Mapping):
        return {name: split(value, arrays) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [split(value, arrays) for value in state]
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, np.ndarray):
        place, dtype = str(len(arrays)), keras.backend.standardize_dtype(state.dtype)
        # NumPy's files do not know bfloat16 and float8, so the bytes are saved.
        arrays[place] = np.frombuffer(np.ascontiguousarray(state).tobytes(), np.uint8)
        return {PLACE: place, DTYPE: dtype, SHAPE: list(state.shape)}
    if not isinstance(state, (str, int, float, type(None))):
        raise TypeError(
            f"`state_dict` must return JSON types and NumPy arrays; got a {type(state).__name__}"
        )
    return state


def joined(state: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns the state from which `split` made its arguments; tuples are lists."""
    if isinstance(state, Mapping):
        if set(state) == {PLACE, DTYPE, SHAPE}:
            dtype = tf.as_dtype(state[DTYPE]).as_numpy_dtype
            return np.frombuffer(arrays[state[PLACE]].tobytes(), dtype).reshape(state[SHAPE]).copy()
        return {name: joined(value, arrays) for name, value in state.items()}
    if isinstance(state, list):
        return [joined(value, arrays) for value in state]
    return state


def write_arrays(folder: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays into a folder, on any file system that TensorFlow supports."""
    if arrays:
        contents = io.BytesIO()
        np.savez(contents, **arrays)  # type: ignore[arg-type]  # the names are keyword arguments
        with tf.io.gfile.GFile(f"{folder}/{FILE}", "wb") as file:
            file.write(contents.getvalue())


def read_arrays(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays that `write_arrays` wrote into a folder; none if there is no file."""
    if not (folder / FILE).is_file():
        return {}
    with np.load(folder / FILE, allow_pickle=False) as found:
        return dict(found)
