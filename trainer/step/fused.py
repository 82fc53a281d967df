"""Optimizer updates by TensorFlow's fused kernels: one pass over memory for each variable.

A Keras optimizer runs about a dozen operations for each variable, and each of them reads and
writes the whole variable. TensorFlow has kernels that compute the whole update rule of Adam, SGD
and SGD with momentum. Keras still does everything around the rule (schedules, weight decay, moving
averages, constraints, counting).

The kernels of SGD give the bits of Keras's operations. Adam's kernel rounds differently: at
beta_2=0.999 its first update differs from Keras's by up to 6.9e-6 of the learning rate, and is the
closer one to float64 (1.4e-6 against 6.9e-6). Keras computes 1 - beta_2 in float64 for the second
moment but in float32 for the bias correction; the kernel rounds both the same way, so that these
errors cancel.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import keras
import tensorflow as tf

from trainer.keras_compat import slot_variables

# (gradient, variable, learning_rate) -> None, as `keras.optimizers.Optimizer.update_step`.
UpdateRule: TypeAlias = Callable[[tf.Tensor, tf.Variable, tf.Tensor], None]


PLAIN = keras.optimizers.Optimizer  # the class whose ways to assign the kernels replace


@contextlib.contextmanager
def fused_updates(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes `optimizer.apply` use fused kernels where possible, inside the `with` block.

    Sparse gradients, dtypes other than float32, other rules and `amsgrad` still use Keras's
    operations.
    """
    fused = fused_rule(optimizer)
    if fused is None:
        yield
        return
    keras_rule = optimizer.update_step

    def update_step(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        dense = isinstance(gradient, tf.Tensor) and gradient.dtype == tf.float32
        rule = fused if dense and variable.dtype == tf.float32 else keras_rule
        rule(gradient, variable, learning_rate)

    optimizer.update_step = update_step
    try:
        yield
    finally:
        del optimizer.update_step


def fused_rule(optimizer: keras.optimizers.Optimizer) -> UpdateRule | None:
    """Returns a function that updates one variable with one kernel, or None if there is no kernel.

    Subclasses, such as AdamW, are included as long as they inherit the rule unchanged, and the
    methods by which it assigns.
    """
    kind = type(optimizer)
    assigns = ("assign", "assign_add", "assign_sub")
    changed = [name for name in assigns if getattr(kind, name) is not getattr(PLAIN, name)]
    if changed or not {"update_step", *assigns}.isdisjoint(vars(optimizer)):
        return None
    rule = kind.update_step
    if rule is keras.optimizers.Adam.update_step and not optimizer.amsgrad:
        constants = (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon)
        return adam(optimizer) if all(isinstance(each, float) for each in constants) else None
    if rule is keras.optimizers.SGD.update_step:
        return momentum(optimizer) if optimizer.momentum else sgd
    return None


def adam(optimizer: keras.optimizers.Adam) -> UpdateRule:
    """Returns Adam's update rule.

    Source:
        Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, in the order of
        operations given in the last paragraph of section 2.
    """
    # beta_1^step and beta_2^step, keyed by the count of updates that they were computed from. It is
    # the same for all variables but those that `own_update_counts` was given.
    known: dict[int, tuple[tf.Tensor, ...]] = {}

    def rule(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        count = optimizer.iterations
        if id(count) not in known:
            step = tf.cast(count + 1, tf.float32)
            known[id(count)] = tuple(
                tf.pow(float(beta), step) for beta in (optimizer.beta_1, optimizer.beta_2)
            )
        powers = known[id(count)]
        first_moment, second_moment = slot_variables(optimizer, variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=first_moment.handle,
            v=second_moment.handle,
            beta1_power=powers[0],
            beta2_power=powers[1],
            lr=tf.cast(learning_rate, tf.float32),
            beta1=optimizer.beta_1,
            beta2=optimizer.beta_2,
            epsilon=optimizer.epsilon,
            grad=gradient,
        )

    return rule


def momentum(optimizer: keras.optimizers.SGD) -> UpdateRule:
    """Returns the update rule of SGD with momentum, with or without Nesterov's variant."""

    def rule(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        [velocity] = slot_variables(optimizer, variable)
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=velocity.handle,
            lr=tf.cast(learning_rate, tf.float32),
            grad=gradient,
            momentum=optimizer.momentum,
            use_nesterov=optimizer.nesterov,
        )

    return rule


def sgd(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
    """Updates a variable by SGD without momentum."""
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=tf.cast(learning_rate, tf.float32), delta=gradient
    )
