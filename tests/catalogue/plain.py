"""A training step in plain TensorFlow, with nothing of halfstep's step in it."""

import numpy as np
import tensorflow as tf
from catalogue.models import EXAMPLES, losses
from catalogue.rows import DRAWS, WHOLE

LEARNING_RATE = 0.5


def parts_of(batch, configuration):
    """The shares of a batch, microbatch by microbatch: one list per replica."""
    size = EXAMPLES // configuration.replicas
    micro = size // configuration.num_microbatches
    starts = [range(first, first + size, micro) for first in range(0, EXAMPLES, size)]
    return [
        [tf.nest.map_structure(lambda x, at=at: x[at : at + micro], batch) for at in replica]
        for replica in starts
    ]


def plain_step(model, batch, case, configuration, keys, loss_scale):
    """Takes one SGD step, and returns the gradients.

    Args:
        model: computes what the class computes; its variables are assigned.
        batch: the whole batch.
        case: says whether the batch is divided.
        configuration: how it is divided.
        keys: the seed generators' states for each replica: shape (microbatches, generators, 2).
        loss_scale: the loss scale at which halfstep applied the step.
    """
    replaced = [getattr(v, "overwrite_with_gradient", False) for v in model.trainable_variables]
    differentiate = gradients_of
    if any(replaced) or case.row.in_graph:
        differentiate = tf.function(gradients_of)
    if not any(replaced):  # float8 remembers the scaled gradients
        # The whole batch's gradients are larger than a share's, and must not overflow either.
        loss_scale = max(1.0, loss_scale / 2.0**8)
    if case.row.compared_with == DRAWS and configuration.with_xla:
        differentiate = tf.function(gradients_of, jit_compile=True)
    whole = case.row.compared_with == WHOLE
    parts = [[batch]] if whole else parts_of(batch, configuration)
    seeds = [v for v in model.variables if "seed_generator_state" in v.path]
    others = [v for v in model.non_trainable_variables if not any(v is s for s in seeds)]
    before, after, total = [v.numpy() for v in others], [], None
    for replica, microbatches in enumerate(parts):
        for place, part in enumerate(microbatches):
            assign(others, before)
            if not whole:
                assign(seeds, keys[replica][place])
            share = len(part[1]) / EXAMPLES
            gradients = differentiate(model, part, tf.constant(share * loss_scale))
            gradients = [
                each if value else each / loss_scale
                for each, value in zip(gradients, replaced, strict=True)
            ]
            total = (
                gradients
                if total is None
                else [
                    tf.maximum(a, b) if value else a + b  # float8 remembers the largest value
                    for a, b, value in zip(total, gradients, replaced, strict=True)
                ]
            )
            after.append([v.numpy() for v in others])
    assign(
        others, [np.stack(values).mean(0, values[0].dtype) for values in zip(*after, strict=True)]
    )
    for variable, gradient, value in zip(model.trainable_variables, total, replaced, strict=True):
        variable.assign(gradient if value else variable - LEARNING_RATE * gradient)
        if variable.constraint:
            variable.assign(variable.constraint(variable))
    return total


def assign(variables, values):
    """Assigns each variable its value."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def gradients_of(model, part, factor):
    """The gradients of a part of the batch, as float32 tensors."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(losses(model, part, training=True))
        loss = factor * (loss + sum(tf.cast(each, tf.float32) for each in model.losses))
    # Of Keras's own variables, eager TensorFlow cannot make the zeros of one that is not reached.
    variables = [variable.value for variable in model.trainable_variables]
    found = tape.gradient(loss, variables, unconnected_gradients="zero")
    return [tf.convert_to_tensor(each) for each in found]
