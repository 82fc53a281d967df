"""Turns what users pass as arrays, or yield as a batch, into the structures that tf.data takes.

tf.data knows tuples and dicts. It would stack a list into one tensor, and knows neither pandas nor
PyTorch. It would also drop the mask of a masked array, which is the one kind that is refused.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from strategies.division import shapes_in


class BatchError(ValueError):
    """Raised for something that is not a batch, or whose structure differs from earlier ones."""


def is_array(value: Any) -> bool:
    """Returns whether a value is an array: of NumPy, TensorFlow, pandas, PyTorch, JAX or alike."""
    return hasattr(value, "shape") or hasattr(value, "__array__")


def is_torch(value: Any) -> bool:
    """Returns whether a value is a PyTorch tensor. Does not import PyTorch."""
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach")


def holds_arrays(value: Any) -> bool:
    """Returns whether a list, tuple or dict holds nothing but arrays, at any depth."""
    if isinstance(value, Mapping):
        return bool(value) and all(map(holds_arrays, value.values()))
    if isinstance(value, list | tuple):
        return bool(value) and all(map(holds_arrays, value))
    return is_array(value)


def as_arrays(value: Any, argument: str = "data") -> Any:
    """Returns arrays in a structure of tuples and dicts.

    A list of numbers, or of lists of numbers, becomes an array: Keras's `floatx`, int64, bool or
    text. Another list becomes a tuple: PyTorch's DataLoader yields `[x, y]`.

    Args:
        value: arrays in any structure of tuples, lists and dicts, or a part of it.
        argument: name of the user's argument, for errors.

    Raises:
        TypeError: if an element is neither an array nor a number or text; or a masked array.
        ValueError: if a list of lists is not rectangular.
    """
    if isinstance(value, Mapping):
        return {key: as_arrays(item, argument) for key, item in value.items()}
    if isinstance(value, list) and not any(map(is_structure, value)):
        array = np.asarray(value)
        return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array
    if isinstance(value, list | tuple):
        parts = [as_arrays(item, argument) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return as_array(value, argument)


def as_array(value: Any, argument: str) -> Any:
    """Returns a leaf of `as_arrays` as an array or a tensor."""
    if type(value).__module__.split(".")[0] == "pandas" and hasattr(value, "to_numpy"):
        return from_pandas(value)
    if is_torch(value):
        return from_torch(value)
    if isinstance(value, tf.Variable | keras.Variable):
        return tf.convert_to_tensor(value).numpy()
    if type(value) is np.ndarray or isinstance(value, tf.Tensor):
        return value
    if isinstance(value, np.ma.MaskedArray):  # the one kind whose values would be others
        raise TypeError(f"`{argument}` must not be masked, as the mask is lost; pass x.filled(0)")
    composite = isinstance(value, tf.RaggedTensor | tf.SparseTensor)
    if not composite and (isinstance(value, bool | int | float | str | bytes) or is_array(value)):
        return np.asarray(value)
    raise TypeError(f"`{argument}` must consist of dense arrays; got {type(value).__name__}")


def from_pandas(data: Any) -> np.ndarray:
    """Returns a DataFrame or a Series as Keras's `fit` takes it.

    Args:
        data: a DataFrame of shape (examples, columns), or a Series of shape (examples,).

    Returns:
        Shape (examples, columns), for a Series (examples, 1). Floats have Keras's `floatx`.
    """
    array = data.to_numpy()
    if array.dtype == object:  # columns of several dtypes, or that pandas stores with a mask
        array = data.to_numpy(dtype=np.float64)
    if array.dtype.kind == "f":
        array = array.astype(keras.config.floatx(), copy=False)
    return np.asarray(array if array.ndim > 1 else array[:, None])


def from_torch(tensor: Any) -> np.ndarray:
    """Returns a PyTorch tensor as a NumPy array, which shares its memory if it is on the CPU."""
    import torch  # noqa: PLC0415  # a tensor has been passed, so PyTorch is installed

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # NumPy's own types do not include it
        return np.asarray(tensor.view(torch.int16).numpy().view(tf.bfloat16.as_numpy_dtype))
    return np.asarray(tensor.numpy())


def as_global_batch(batch: Any, *, whole: bool = False) -> Any:
    """Returns a batch that a user passed, as tensors in a structure of tuples and dicts.

    Args:
        batch: arrays or tensors in any structure. Lists of numbers become arrays, and lists of
            arrays tuples, as in the batches of a Python source.
        whole: as for `rows_in`.

    Raises:
        TypeError, ValueError: if it is not a batch, or if it has no examples.
    """
    composite = (tf.RaggedTensor, tf.SparseTensor)
    if not any(isinstance(leaf, composite) for leaf in tf.nest.flatten(batch)):
        batch = tf.nest.map_structure(tf.convert_to_tensor, as_arrays(batch, "batch"))
    rows_in(batch, "batch", whole=whole)
    return batch


def is_structure(value: Any) -> bool:
    """Returns whether an item of a list makes the list a tuple of components."""
    if isinstance(value, list):
        return any(map(is_structure, value))
    return isinstance(value, tuple | Mapping) or (
        is_array(value) and not isinstance(value, np.generic)
    )


def spec_of(batches: list[Any]) -> Any:
    """Returns the element spec of batches: dimensions in which they differ are unknown.

    Args:
        batches: results of `as_arrays` of one structure. Each leaf has shape (examples, ...).
    """

    def leaf_spec(*leaves: Any) -> tf.TensorSpec:
        shapes = [np.shape(leaf) for leaf in leaves]
        dtype = dtype_of(leaves[0].dtype)
        if len({len(shape) for shape in shapes}) > 1:
            return tf.TensorSpec(None, dtype)
        sizes = [set(dimension) for dimension in zip(*shapes, strict=True)]
        known = [size.pop() if len(size) == 1 else None for size in sizes]
        return tf.TensorSpec([None, *known[1:]] if known else [], dtype)

    arrays = [tf.nest.map_structure(np.asarray, batch) for batch in batches]
    return tf.nest.map_structure(leaf_spec, *arrays)


def dtype_of(dtype: Any) -> tf.DType:
    """Returns the dtype of the tensor that an array of a dtype becomes. Objects count as text."""
    return tf.string if getattr(dtype, "kind", "") in ("U", "O") else tf.as_dtype(dtype)


def difference(batch: Any, spec: Any) -> str | None:
    """Returns in words how a batch differs from an element spec; None if it does not.

    Args:
        batch: a result of `as_arrays`.
        spec: a result of `spec_of`.
    """
    try:
        tf.nest.assert_same_structure(batch, spec)
    except (ValueError, TypeError):
        return f"{shapes_in(batch)} instead of {shapes_in(spec)}"
    for leaf, expected in zip(tf.nest.flatten(batch), tf.nest.flatten(spec), strict=True):
        dtype = dtype_of(leaf.dtype)  # tf.data would cast another one without a word
        if dtype != expected.dtype or not expected.shape.is_compatible_with(leaf.shape):
            return (
                f"{dtype.name} of shape {tuple(leaf.shape)} instead of {expected.dtype.name} of "
                f"shape {tuple(expected.shape)}"
            )
    return None


def rows_in(batch: Any, argument: str, *, whole: bool = False) -> int:
    """Returns the number of examples in a batch.

    Args:
        batch: arrays or tensors in any structure.
        argument: name of the user's argument, for errors.
        whole: whether the batch is not divided, so that its tensors may have any shapes. The first
            one that is no scalar counts then.

    Raises:
        BatchError: if there is no example; or not one row per example in each tensor of a batch
            that is divided.
    """
    rows = [leaf.shape[0] if len(leaf.shape) else None for leaf in tf.nest.flatten(batch)]
    examples = next((int(count) for count in rows if count is not None), 1 if rows else 0)
    if not examples:
        raise BatchError(f"`{argument}` must hold examples; got shapes {shapes_in(batch)}")
    if not whole and set(rows) != {examples}:
        raise BatchError(
            f"`{argument}` must have one row per example in every tensor; got shapes "
            f"{shapes_in(batch)}"
        )
    return examples


def fingerprint(batch: Any) -> int:
    """Returns a checksum of a sample of a batch's numbers, which costs microseconds.

    Args:
        batch: a result of `as_arrays`.
    """
    found = 0
    for leaf in tf.nest.flatten(batch):
        flat = np.ravel(np.asarray(leaf))
        sample = flat[:: max(1, flat.size // 1024)]
        content = repr(sample.tolist()).encode() if sample.dtype.kind in "UO" else sample.tobytes()
        found = zlib.crc32(content, zlib.crc32(repr(np.shape(leaf)).encode(), found))
    return found
