"""Says what the values of tensors in a graph depend on."""

from collections.abc import Iterable, Sequence

import tensorflow as tf

# Operations whose results do not depend on the values that they are given.
OF_SHAPES = ("OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike")


def operations_before(tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """Returns the operations of a graph on whose values tensors depend.

    Example:
        >>> with tf.Graph().as_default():
        ...     x, y = tf.constant(1.0), tf.constant(2.0)
        ...     found = operations_before([x * tf.ones_like(y)])
        >>> x.op in found, y.op in found
        (True, False)
    """
    todo, found = [tensor.op for tensor in tensors], set()
    while todo:
        operation = todo.pop()
        if operation not in found:
            found.add(operation)
            todo += [each.op for each in values_read(operation)]
    return found


def any_depends(results: Iterable[tf.Tensor], values: Iterable[tf.Tensor]) -> bool:
    """Returns whether one of some results depends on one of some values; True in eager mode.

    Example:
        >>> x = tf.constant(1.0)
        >>> tf.function(lambda y: any_depends([y * y], [x * y]), autograph=False)(x)
        <tf.Tensor: shape=(), dtype=bool, numpy=False>
    """
    if tf.executing_eagerly():  # there is no graph that tells
        return True
    before = operations_before(results)
    return any(value.op in before for value in values)


def values_read(operation: tf.Operation) -> Sequence[tf.Tensor]:
    """Returns the inputs of an operation, but none if it looks at their shapes alone.

    Keras's `Concatenate` makes a mask of ones of the shape of an input that has none.
    """
    return () if operation.type in OF_SHAPES else operation.inputs
