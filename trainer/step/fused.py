"""Updates in one pass over memory, by TensorFlow's own kernels, for the rules that have one.

An optimizer of Keras is a dozen operations for each variable, and each of them reads and
writes all of it. TensorFlow has kernels that do the whole rule of Adam, of SGD and of its
momentum at once, with the same operations in the same order. Everything around the rule
(schedules, weight decay, moving averages, constraints, counting) stays Keras's.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from trainer.base.keras_private import slot_variables

Rule = Callable[[Any, Any, Any], None]  # (gradient, variable, learning_rate)


@contextlib.contextmanager
def fused_updates(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Within, `optimizer.apply` moves dense float32 variables by one kernel each, if it has one.

    Others are moved as ever: another rule, another dtype, sparse gradients, `amsgrad`.
    """
    fused = fused_rule(optimizer)
    if fused is None:
        yield
        return
    general = optimizer.update_step

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        dense = isinstance(gradient, tf.Tensor) and gradient.dtype == tf.float32
        rule = fused if dense and variable.dtype == tf.float32 else general
        rule(gradient, variable, learning_rate)

    optimizer.update_step = update_step
    try:
        yield
    finally:
        del optimizer.update_step


def fused_rule(optimizer: keras.optimizers.Optimizer) -> Rule | None:
    """Returns how to move one variable by one kernel, or None.

    A subclass counts, as AdamW does, as long as it has not changed the rule.
    """
    rule = type(optimizer).update_step
    if rule is keras.optimizers.Adam.update_step and not optimizer.amsgrad:
        return adam(optimizer)
    if rule is keras.optimizers.SGD.update_step:
        return momentum(optimizer) if optimizer.momentum else sgd
    return None


def adam(optimizer: Any) -> Rule:
    """Returns Adam's rule: Kingma & Ba, ICLR 2015, section 2, its last paragraph's order."""
    powers: list[tf.Tensor] = []  # the same for all variables of an update

    def rule(gradient: tf.Tensor, variable: Any, learning_rate: Any) -> None:
        if not powers:
            step = tf.cast(optimizer.iterations + 1, tf.float32)
            powers.extend(
                tf.pow(float(beta), step) for beta in (optimizer.beta_1, optimizer.beta_2)
            )
        first, second = slot_variables(optimizer, variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=first.handle,
            v=second.handle,
            beta1_power=powers[0],
            beta2_power=powers[1],
            lr=tf.cast(learning_rate, tf.float32),
            beta1=optimizer.beta_1,
            beta2=optimizer.beta_2,
            epsilon=optimizer.epsilon,
            grad=gradient,
        )

    return rule


def momentum(optimizer: Any) -> Rule:
    """Returns the rule of SGD with momentum, Nesterov's or not."""

    def rule(gradient: tf.Tensor, variable: Any, learning_rate: Any) -> None:
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


def sgd(gradient: tf.Tensor, variable: Any, learning_rate: Any) -> None:
    """Takes a step of SGD."""
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=tf.cast(learning_rate, tf.float32), delta=gradient
    )
