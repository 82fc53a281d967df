"""The check for inf and NaN in a whole structure of gradients."""

import tensorflow as tf

from scaling.base.argument_checks import as_tensor
from scaling.base.types import Structure


def all_finite(structure: Structure) -> tf.Tensor:
    """Returns whether every element of a structure is finite. Does not wait for the device.

    The result covers the calling replica only; `strategies.agree` combines all replicas.

    Args:
        structure: any structure of tensors, of any shape and dtype. Integers, None and an empty
            structure count as finite. For `tf.IndexedSlices`, the values are checked.

    Returns:
        Shape (), bool.

    Raises:
        TypeError: if a leaf cannot be converted to a tensor.

    Example:
        >>> bool(all_finite([tf.constant([1.0, 2.0]), None]))
        True
        >>> bool(all_finite({"kernel": tf.constant(float("nan"), tf.float16)}))
        False
    """
    flags = [tf.constant(True)]
    for leaf in tf.nest.flatten(structure):
        if leaf is None:
            continue
        tensor = as_tensor("structure", leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf)
        if tensor.dtype.is_floating or tensor.dtype.is_complex:
            flags.append(is_finite(tensor))
    return tf.reduce_all(tf.stack(flags))


def is_finite(tensor: tf.Tensor) -> tf.Tensor:
    """Returns whether every element of one float or complex tensor is finite: shape (), bool."""
    if tensor.dtype.size == 1:  # float8, of which TensorFlow has no kernel
        tensor = tf.cast(tensor, tf.float32)
    parts = [tf.math.real(tensor), tf.math.imag(tensor)] if tensor.dtype.is_complex else [tensor]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in parts])
