"""Which operations XLA cannot compile is read from the traced graph."""

import access
import keras
import pytest
import tensorflow as tf
from generators import ONE_OF_EACH
from helpers import IMAGES, LABELS, SmallImages

from trainer import Updates
from trainer.step.xla_operations import (
    operations_on_int32_variables,
    operations_sized_by_values,
    operations_without_xla,
)


def test_an_operation_without_a_kernel_is_named_wherever_it_is_called():
    """Operations of functions inside the function count; those of unused results do not."""

    @tf.function
    def inner(x):
        with tf.name_scope("turn"):
            return tf.raw_ops.ImageProjectiveTransformV3(
                images=x,
                transforms=[[1.0] * 8],
                output_shape=[2, 2],
                fill_value=0.0,
                interpolation="NEAREST",
            )

    @tf.function(jit_compile=True)
    def outer(x):
        tf.strings.as_string(x)  # its result is not used
        return tf.cond(tf.reduce_sum(x) > 0, lambda: inner(x), lambda: x * 2.0)

    trace = outer.get_concrete_function(tf.TensorSpec([1, 2, 2, 1]))

    assert operations_without_xla(trace) == ["turn/ImageProjectiveTransformV3"]


@pytest.mark.parametrize("most", [None, 3])
def test_a_loop_of_unknown_length_is_named_if_it_is_differentiated(most):
    """Its values wait for the backward pass in lists, for which XLA must know the largest size."""

    @tf.function(autograph=False, jit_compile=True)
    def gradient(x):
        def looped(x):
            turn = lambda i, y: (i + 1, tf.tanh(y @ x))  # noqa: E731
            return tf.while_loop(lambda i, _: i < 3, turn, [0, x], maximum_iterations=most)[1]

        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(looped(x))
        return tape.gradient(loss, x)

    found = operations_without_xla(gradient.get_concrete_function(tf.TensorSpec([2, 2])))

    assert found == ([] if most else ["while (a loop that needs maximum_iterations)"])
    if most:
        gradient(tf.eye(2))
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="fixed tensor list size"):
            gradient(tf.eye(2))


def test_an_operation_with_an_effect_counts():
    """`tf.print` has no result, but it runs."""

    @tf.function(jit_compile=True)
    def printing(x):
        tf.print(x)
        return tf.nn.relu(x) @ x

    trace = printing.get_concrete_function(tf.TensorSpec([2, 2]))

    assert "PrintV2" in operations_without_xla(trace)


def test_what_xla_compiles_is_not_named():
    """Products, loops, conditions and variables are compiled."""
    weight = tf.Variable(tf.eye(2))

    @tf.function(autograph=False, jit_compile=True)
    def compiled(x):
        weight.assign_add(x)
        turn = lambda i, y: (i + 1, y @ weight)  # noqa: E731
        looped = tf.while_loop(lambda i, _: i < 3, turn, [0, x], maximum_iterations=3)[1]
        return tf.gradients(tf.linalg.norm(looped), x)[0]

    trace = compiled.get_concrete_function(tf.TensorSpec([2, 2]))

    assert operations_without_xla(trace) == []
    compiled(tf.eye(2))


def test_an_operation_whose_size_depends_on_values_is_named():
    """XLA compiles it, maybe with wrong numbers; `tf.where` with three arguments is none."""

    @tf.function(jit_compile=True)
    def sized(x):
        return tf.gather(x, tf.where(x > 0)[:, 0])

    @tf.function(jit_compile=True)
    def fixed(x):
        return tf.where(x > 0, x, 0.0)

    by_value, by_shape = (each.get_concrete_function(tf.TensorSpec([4])) for each in (sized, fixed))

    assert operations_without_xla(by_value) == operations_sized_by_values(by_shape) == []
    assert operations_sized_by_values(by_value) == ["Where"]


def test_an_operation_on_an_int32_variable_is_named():
    """On a GPU, XLA's programs cannot reach such a variable, to read it or to write it."""
    row = tf.Variable([0, 0])
    short, long = (tf.Variable(0, dtype=dtype, name=dtype) for dtype in ("int32", "int64"))

    @tf.function(jit_compile=True)
    def counting(x):
        with tf.name_scope("count"):
            short.assign_add(1)
            long.assign_add(1)
            row.scatter_nd_add([[0]], [1])
        return x * tf.cast(short.read_value() + tf.cast(long.read_value(), tf.int32), tf.float32)

    @tf.function
    def uncompiled():
        short.assign_add(1)

    assert operations_on_int32_variables(counting.get_concrete_function(tf.TensorSpec([]))) == [
        "Read/ReadVariableOp",
        "count/AssignAddVariableOp",
        "count/ResourceScatterNdAdd",
    ]
    assert operations_on_int32_variables(uncompiled.get_concrete_function()) == []


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=lambda rule: type(rule).__name__)
def test_a_step_that_is_one_program_uses_no_int32_variable(rule):
    """So a GPU can run it: neither the loss scale nor the counts, metrics, seeds and averages are
    int32 variables.
    """
    trainer = SmallImages(
        optimizer=keras.optimizers.Adam,
        precision="mixed_float16",
        loss_scale=rule,
        jit_compile="step",
        updates=Updates(ema_momentum=0.9),
        seed=1,
        verbose=False,
    )
    trainer.train((IMAGES, LABELS), steps=1, global_batch=8)

    [trace] = access.traces(access.steps(trainer))
    assert operations_on_int32_variables(trace) == []
