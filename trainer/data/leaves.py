"""What a leaf of the data must be: a tensor of numbers, bools or text, and no masked array.

Arrays are checked as they are copied, pipelines by their element spec, and what Python yields on
its first batches: no step waits for a check.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from scaling.base.argument_checks import shown

# Specs whose tensors a step can take.
SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


class LeafError(TypeError):
    """Raised for a leaf that cannot be a tensor. It says what was found, why, and what to do."""


def as_tensors(data: Any, argument: str) -> Any:
    """Returns arrays as tensors, in their structure; None is kept.

    Args:
        data: arrays, in a structure of tuples and dicts.
        argument: name of the user's argument, for errors.

    Raises:
        TypeError: if an array cannot be a tensor of numbers, bools or text.
    """
    try:
        return tf.nest.map_structure(lambda leaf: None if leaf is None else as_tensor(leaf), data)
    except LeafError as error:
        raise refused(argument, "in every array", error) from error


def as_tensor(leaf: Any) -> tf.Tensor:
    """Returns an array as a tensor.

    Raises:
        LeafError: if it cannot be one.
    """
    check_no_mask(leaf)
    try:
        tensor = tf.convert_to_tensor(leaf)
    except Exception as error:  # TensorFlow raises many kinds
        raise no_tensor(leaf) from error
    if not tf.is_tensor(tensor) or not is_data(tensor.dtype):  # as of the class tf.Tensor
        raise no_tensor(leaf)
    return tensor


def check_no_mask(leaf: Any) -> None:
    """Raises LeafError for a masked array of NumPy."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise LeafError(
            f"a masked array of shape {leaf.shape}. The mask would be lost, and the values behind "
            "it would count. Pass x.filled(0), for example, and weights or a mask of your own."
        )


def no_tensor(leaf: Any) -> LeafError:
    """Returns the error for a value that is no tensor of numbers, bools or text."""
    dtype = getattr(leaf, "dtype", None)
    kind = f"{type(leaf).__name__} of dtype {shown(dtype)}" if dtype is not None else shown(leaf)
    return LeafError(
        f"{kind}. TensorFlow has no tensors of such values. Convert them to numbers, as "
        'x.astype("float32") does, or to text; pass each field of a record as an array of its own.'
    )


def is_data(dtype: tf.DType) -> bool:
    """Returns whether a batch may hold tensors of a dtype: numbers, bools and text."""
    numbers = dtype.is_floating or dtype.is_integer or dtype.is_complex
    return bool(numbers or dtype.is_bool or dtype == tf.string)


def refused(argument: str, where: str, error: LeafError) -> TypeError:
    """Returns the error about an argument that holds something else."""
    return TypeError(f"`{argument}` must hold numbers, bools or text {where}; got {error}")


def check_spec(spec: Any, argument: str) -> None:
    """Raises TypeError unless a pipeline yields tensors of numbers, bools or text.

    Args:
        spec: the element spec of a `tf.data.Dataset`. None in it is left to `batches`.
        argument: name of the user's argument, for errors.
    """
    for leaf in tf.nest.flatten(spec):
        empty = type(leaf).__name__ == "NoneTensorSpec"
        if not empty and not (isinstance(leaf, SPECS) and is_data(leaf.dtype)):
            raise TypeError(
                f"`{argument}` must yield tensors of numbers, bools or text; got {shown(leaf)}. A "
                "step takes tensors, and no datasets or other objects. Map the dataset to tensors: "
                "for windows, with ds.flat_map(lambda window: window.batch(size))."
            )


def dtype_of(leaf: np.ndarray | tf.Tensor) -> tf.DType:
    """Returns the dtype of the tensor that a leaf of a batch becomes.

    Raises:
        LeafError: if it becomes none.
    """
    kind = getattr(leaf.dtype, "kind", "")
    if kind == "U" or (kind == "O" and all(isinstance(x, str | bytes) for x in leaf.flat)):
        return tf.string
    try:
        dtype = tf.as_dtype(leaf.dtype)
    except TypeError as error:
        raise no_tensor(leaf) from error
    if kind == "O" or not is_data(dtype):
        raise no_tensor(leaf)
    return dtype
