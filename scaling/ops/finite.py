"""One bool for a whole structure of gradients."""

from typing import Any

import tensorflow as tf

from scaling.base.argument_checks import as_tensor


def all_finite(structure: Any) -> tf.Tensor:
    """Returns whether no element of a structure is inf or NaN. Does not wait for the device.

    The answer is local to the replica that asks: `strategies.agree` makes it everybody's.

    Args:
        structure: any structure of tensors, of any shape and dtype; integers are always
            finite. `tf.IndexedSlices` count by their values, None and an empty structure
            as finite.

    Returns:
        Shape (), bool.

    Raises:
        TypeError: if something in it is no tensor and cannot become one.

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
    parts = [tf.math.real(tensor), tf.math.imag(tensor)] if tensor.dtype.is_complex else [tensor]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in parts])
