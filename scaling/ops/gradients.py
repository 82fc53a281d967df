"""Scales a loss, unscales its gradients by the same value, and checks that they are finite."""

from typing import Any, TypeAlias

import tensorflow as tf

from scaling.base.traced_graphs import compiled_by_xla
from scaling.rules.constant import NoLossScaleState
from scaling.rules.rule import RuleState

# One variable's gradient: dense, sparse, or None if the loss does not depend on the variable.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

# Any nested lists, tuples and dicts that `tf.nest` accepts. Python has no type for them.
Structure: TypeAlias = Any


def scale_loss(loss: tf.Tensor | float, state: RuleState) -> tf.Tensor:
    """Multiplies a loss by the loss scale, in float32.

    The product is never computed in half precision: float16 cannot represent a scale of 2^16
    or more. With `NoLossScale` the loss is only cast, not multiplied.

    Args:
        loss: any shape, any float dtype.
        state: a rule's state. Pass the same state to `unscale_gradients`, even if the rule has
            moved the scale in the meantime.

    Returns:
        A tensor with the shape of `loss`: float64 if the loss is float64, and float32 otherwise.

    Raises:
        TypeError: if the loss does not have a float dtype.

    Source:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.

    Example:
        >>> import scaling
        >>> state = scaling.FixedLossScale(2.0**20).initial_state()
        >>> scaled = scaling.scale_loss(tf.constant(0.5, tf.float16), state)
        >>> scaled.dtype.name, float(scaled) == 2.0**19
        ('float32', True)
    """
    loss = at_least_float32("loss", tf.convert_to_tensor(loss))
    if isinstance(state, NoLossScaleState):
        return loss
    return loss * tf.cast(state.loss_scale, loss.dtype)


def unscale_gradients(gradients: Structure, state: RuleState) -> Structure:
    """Divides gradients, in float32, by the loss scale that their loss was multiplied by.

    Exact: the scale is a power of two, so multiplying by its reciprocal restores the bits of
    the unscaled gradient, unless a value overflows or underflows. Rows of a sparse gradient
    that share an index are summed first, because their sum can overflow even if no row does,
    and because the norm of the separate rows is not the norm of the gradient.

    Args:
        gradients: any structure of gradients: tensors of any shape and float dtype,
            `tf.IndexedSlices`, or None for a variable that the loss does not depend on.
        state: the state that was passed to `scale_loss`.

    Returns:
        The same structure; float32 (float64 stays float64). None stays None, and
        `tf.IndexedSlices` stay sparse, with each index once; for an exception see `coalesce`.

    Raises:
        TypeError: if a gradient does not have a float dtype.

    Example:
        >>> import scaling
        >>> state = scaling.FixedLossScale(1024.0).initial_state()
        >>> [half, nothing] = scaling.unscale_gradients([tf.constant(2.0, tf.float16), None], state)
        >>> float(half), half.dtype.name, nothing
        (0.001953125, 'float32', None)
    """
    # Of a scalar: TensorFlow's graphs only approximate the reciprocals of vectors.
    reciprocal = 1.0 / state.loss_scale

    def unscale(gradient: Gradient) -> Gradient:
        if gradient is None:
            return None
        gradient = coalesce(gradient)
        if isinstance(gradient, tf.IndexedSlices):
            values = unscale(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        gradient = at_least_float32("gradients", tf.convert_to_tensor(gradient))
        if isinstance(state, NoLossScaleState):
            return gradient
        return gradient * tf.cast(reciprocal, gradient.dtype)

    return tf.nest.map_structure(unscale, gradients)


def coalesce(gradient: Gradient) -> Gradient:
    """Sums the rows of a sparse gradient that share an index; returns anything else unchanged.

    XLA's `tf.unique` is wrong for indices of which only values tell how many there are, as of
    `tf.boolean_mask`. In a function with jit_compile=True such a gradient becomes dense. Call
    nothing there that was traced outside of it before: it is not traced again.

    Args:
        gradient: `tf.IndexedSlices` with values of shape (rows, ...), any float dtype; or
            a tensor or None, which is returned unchanged.

    Returns:
        `tf.IndexedSlices` in which each index occurs once, or a dense tensor: see above. The values
        are at least float32, because a sum in half precision can overflow.

    Raises:
        TypeError: if the values do not have a float dtype.

    Example:
        >>> slices = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([7, 7]))
        >>> float(coalesce(slices).values[0, 0])
        7.0
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    values = at_least_float32("gradients", gradient.values)
    gradient = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if are_unique(gradient.indices):
        return gradient
    if gradient.indices.shape.num_elements() is None and compiled_by_xla():
        return tf.convert_to_tensor(gradient)
    indices, row_of = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(values, row_of, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def are_unique(indices: tf.Tensor) -> bool:
    """Returns whether indices are known to be different: `tf.unique` has made them, in this graph.

    They must not go through `tf.unique` again. XLA computes its result, whose size it does not
    know, in a buffer as long as the input, and takes the rest of the buffer for input too.
    """
    if not tf.is_symbolic_tensor(indices):  # it has a value, also in a function that reads it
        return False
    while indices.op.type in ("Identity", "Reshape"):
        indices = indices.op.inputs[0]
    # The second output says where each element is among the different ones, and repeats itself.
    return indices.op.type in ("Unique", "UniqueV2") and indices.value_index == 0


def at_least_float32(name: str, tensor: tf.Tensor) -> tf.Tensor:
    """Casts half-precision tensors to float32; returns float32 and float64 as they are.

    Raises:
        TypeError: for other dtypes; a cast would drop the imaginary part of a complex number.
    """
    if not tensor.dtype.is_floating:
        raise TypeError(f"`{name}` must have a float dtype; got {tensor.dtype.name}")
    return tensor if tensor.dtype == tf.float64 else tf.cast(tensor, tf.float32)


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
