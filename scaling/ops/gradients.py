"""Scaling the loss, and unscaling its gradients: once each way, by the same value."""

from typing import Any

import tensorflow as tf

from scaling.base.argument_checks import as_tensor, loss_scale_of
from scaling.rules.constant import NoLossScaleState


def scale_loss(loss: Any, state: Any) -> tf.Tensor:
    """Multiplies a loss by the loss scale, in float32.

    The product is never taken in half precision: a scale of 2^16 or more is already
    infinite in float16. Under `NoLossScale` the loss comes back as it is.

    Args:
        loss: any shape, any float dtype.
        state: a rule's state. It is the token of this step: hand the same one to
            `unscale_gradients`, whatever has become of the scale since.

    Returns:
        The shape of `loss`; float32, or float64 if the loss was.

    Raises:
        TypeError: if the loss is not of a float dtype, or the state holds no scale.

    Source:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.

    Example:
        >>> import scaling
        >>> state = scaling.FixedLossScale(2.0**20).initial_state()
        >>> scaled = scaling.scale_loss(tf.constant(0.5, tf.float16), state)
        >>> scaled.dtype.name, float(scaled) == 2.0**19
        ('float32', True)
    """
    loss_scale = loss_scale_of(state)
    loss = as_tensor("loss", loss)
    if not loss.dtype.is_floating:
        raise TypeError(
            f"`loss` must be of a float dtype; got {loss.dtype.name}. Integers have no gradient. "
            "Cast what the loss is computed from to float32."
        )
    loss = at_least_float32(loss)
    if isinstance(state, NoLossScaleState):
        return loss
    return loss * tf.cast(loss_scale, loss.dtype)


def unscale_gradients(gradients: Any, state: Any) -> Any:
    """Divides gradients by the loss scale that their loss was multiplied by, in float32.

    Exact: the scale is a power of two, so the product with its reciprocal has the bits of
    the unscaled gradient unless one of them overflowed or underflowed. Rows of a sparse
    gradient that share an index are summed first: their sum can overflow where none of
    them did, and a norm over the parts is not the norm of the gradient.

    Args:
        gradients: any structure of gradients: tensors of any shape and float dtype,
            `tf.IndexedSlices`, or None for a variable that the loss does not reach.
        state: the state that was handed to `scale_loss`.

    Raises:
        TypeError: if a gradient is complex, or not of a float dtype, or the state holds no scale.

    Returns:
        The same structure; float32 (float64 stays float64). None stays None, and
        `tf.IndexedSlices` stay so, with each index once.

    Example:
        >>> import scaling
        >>> state = scaling.FixedLossScale(1024.0).initial_state()
        >>> [half, nothing] = scaling.unscale_gradients([tf.constant(2.0, tf.float16), None], state)
        >>> float(half), half.dtype.name, nothing
        (0.001953125, 'float32', None)
    """
    reciprocal = 1.0 / loss_scale_of(state)

    def unscale(gradient: Any) -> Any:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            gradient = coalesce(gradient)
            return tf.IndexedSlices(
                unscale(gradient.values), gradient.indices, gradient.dense_shape
            )
        gradient = at_least_float32(as_tensor("gradients", gradient))
        if isinstance(state, NoLossScaleState):
            return gradient
        return gradient * tf.cast(reciprocal, gradient.dtype)

    return tf.nest.map_structure(unscale, gradients)


def coalesce(gradient: Any) -> Any:
    """Sums the rows of a sparse gradient that share an index; anything else passes through.

    Args:
        gradient: `tf.IndexedSlices` with values of shape (rows, ...), any float dtype; or
            a tensor or None, returned as it is.

    Returns:
        `tf.IndexedSlices` in which each index occurs once; values at least float32, since
        a sum of halves can overflow where the gradient does not.

    Example:
        >>> slices = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([7, 7]))
        >>> float(coalesce(slices).values[0, 0])
        7.0
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, row_of = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(
        at_least_float32(gradient.values), row_of, tf.size(indices)
    )
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """Returns half-precision tensors in float32, float32 and float64 as they are.

    Raises:
        TypeError: for other dtypes; a cast would drop the imaginary part of a complex one.
    """
    if not tensor.dtype.is_floating:
        raise TypeError(
            f"`gradients` must be of float dtypes; got {tensor.dtype.name}. Half precision has no "
            "other numbers. Leave such variables out, or take their real and imaginary parts."
        )
    return tensor if tensor.dtype == tf.float64 else tf.cast(tensor, tf.float32)
