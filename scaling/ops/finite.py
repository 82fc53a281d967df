"""The check for inf and NaN in a whole structure of gradients."""

import tensorflow as tf

from scaling.base.types import Structure


def all_finite(structure: Structure) -> tf.Tensor:
    """Returns whether every element of a structure is finite. Does not wait for the device.

    The result covers the calling replica only; `strategies.agree` combines all replicas.

    Args:
        structure: any structure of tensors, of any shape and dtype. Integers, None and an empty
            structure count as finite. For `tf.IndexedSlices`, the values are checked.

    Returns:
        Shape (), bool.

    Example:
        >>> bool(all_finite([tf.constant([1.0, 2.0]), None]))
        True
        >>> bool(all_finite({"kernel": tf.constant(float("nan"), tf.float16)}))
        False
    """
    flags = []
    for leaf in tf.nest.flatten(structure):
        if leaf is None:
            continue
        tensor = tf.convert_to_tensor(leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf)
        if tensor.dtype.is_floating or tensor.dtype.is_complex:
            flags.append(is_finite(tensor))
    if len(flags) == 1:
        return flags[0]
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)


def is_finite(tensor: tf.Tensor) -> tf.Tensor:
    """Returns whether every element of one float or complex tensor is finite: shape (), bool."""
    if tensor.dtype.size == 1:  # float8, of which TensorFlow has no kernel
        tensor = tf.cast(tensor, tf.float32)
    if tensor.dtype.is_complex:
        return is_finite(tf.math.real(tensor)) & is_finite(tf.math.imag(tensor))
    return tf.reduce_all(tf.math.is_finite(tensor))
