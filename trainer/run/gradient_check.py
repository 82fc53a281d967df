"""Compares a step's gradients with those of a plain TensorFlow loop, in a dry run.

The step runs a Keras model inside a scope that holds back assignments, with layers that were made
faster or more accurate. None of that may change which variables are trained, or how. So a few
examples of the first batch go through both the step's forward and backward pass and an ordinary
`tf.GradientTape`. Nothing of this remains in the step itself.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import keras
import tensorflow as tf
from absl import logging

import scaling
import strategies
from strategies.division import cut_rows
from trainer.base.autograph import call_user
from trainer.base.warn_once import listed
from trainer.data.errors import reason_of
from trainer.keras_compat import all_layers, differentiable_moments
from trainer.step.added_losses import added_entries, added_loss
from trainer.step.checks import SIGNIFICANT_BITS
from trainer.step.gradients import gradient_values
from trainer.step.held_back import HoldBack, read_values, tensorflow_variable
from trainer.step.losses import losses_and_aux, weighted_mean
from trainer.step.microbatch import GlobalBatchSize, Microbatch, PassInputs
from trainer.step.plan import StepPlan, UpdateGroup, compiled_as
from trainer.step.randomness import make_keys
from trainer.step.replica import given_positions
from trainer.step.rollback import read_copies, write_copies
from trainer.step.types import Batch, Gradient, Model, ScaleState, Variable

Result = TypeVar("Result")

# Number of examples to compare on, where the data allows batches of any size. Which gradients exist
# does not depend on the number of examples.
EXAMPLES = 8

# The largest accepted difference between the two gradients of a variable, as a fraction of their
# norm, or of FLOOR times the global norm if that is larger: small gradients may be rounding alone.
# Both are computed in the same precision, and differ by the order of operations.
IN_FLOAT32, IN_HALF = 1e-3, 0.1
FLOOR = 0.1


class Compared(NamedTuple):
    """The two gradients of a variable."""

    name: str
    step: Gradient  # as the training step computes it
    plain: Gradient  # as a plain `tf.GradientTape` computes it


def check_gradients(plan: StepPlan, batch: Batch, scale_state: ScaleState) -> str:
    """Checks that every variable gets the gradient that a plain loop would compute.

    All variables are restored afterwards. Under parameter servers, and on a TPU, nothing is
    compared: a pass outside of the strategy would have to copy all variables to the chief or host.

    Args:
        plan: the run's constants.
        batch: the first global batch.
        scale_state: the loss-scale rule's state.

    Returns:
        The result in words, for a dry run.

    Raises:
        ValueError: if a gradient is missing or different in the step.
    """
    found = strategies.capabilities(plan.strategy)
    if found.asynchronous or found.decides_in_replica:
        return "not compared: not on the devices of this strategy"
    inputs = pass_inputs(first_examples(batch, plan), plan, scale_state)
    without: list[str] = []
    for group in compiled_as(plan, jit_compile=False).groups:
        try:
            pairs = compared(group, inputs, plan)
        except Exception as error:  # noqa: BLE001  # a check must not end a run
            # Whatever is wrong, the step itself will raise it, if it is not this small batch.
            logging.warning("The step's gradients were not compared: %s", error)
            return f"not compared: {reason_of(str(error))}"
        check_same(pairs, IN_FLOAT32 if computes_in_float32(plan.model) else IN_HALF)
        without += [pair.name for pair in pairs if pair.step is None]
    return f"those of a plain loop{f'; none for {listed(without)}' if without else ''}"


def first_examples(batch: Batch, plan: StepPlan) -> strategies.Share:
    """Returns a few examples of a batch; all of a replica's share if the model's inputs need them.

    Args:
        batch: the first global batch.
        plan: the run's constants.
    """
    weights = tf.cast(call_user(plan.example_weights, batch), tf.float32)
    parts = plan.strategy.num_replicas_in_sync * plan.num_microbatches
    share = strategies.take(strategies.whole(batch, weights), 0, parts)
    sizes = [tensor.shape[0] for tensor in getattr(plan.model, "inputs", None) or []]
    # The model may accept a single batch size, and a global loss may read rows together.
    if not sizes or any(sizes) or plan.global_loss:
        return share
    few = min(EXAMPLES, int(share.examples))
    return strategies.Share(cut_rows(share.batch, 0, few), share.weights[:few], tf.constant(few))


def pass_inputs(share: strategies.Share, plan: StepPlan, scale_state: ScaleState) -> PassInputs:
    """Returns the inputs of a forward and backward pass over a share, as if it were the batch."""
    weight = tf.maximum(tf.reduce_sum(share.weights), 1.0)
    return PassInputs(
        share=share,
        global_batch=GlobalBatchSize(weight, share.examples),
        scale_state=scale_state,
        values=read_values(plan.held_back, given_positions(plan)),
        keys=make_keys(tf.constant([0, 0], tf.int64), 0, 1, 1, len(plan.seeds))[0],
    )


def compared(group: UpdateGroup, inputs: PassInputs, plan: StepPlan) -> list[Compared]:
    """Returns the gradients of a group's variables, computed in both ways."""
    assigned: list[Variable] = [*plan.undo, *plan.seeds]
    step = functools.partial(group.differentiate.python_function, inputs)
    result: Microbatch = restoring(assigned, plan.strategy, step)
    assigned += plan.held_back
    plain = restoring(assigned, plan.strategy, lambda: plain_gradients(group, inputs, plan))
    pairs = zip(group.positions, result.contribution.gradients, plain, strict=True)
    return [
        Compared(plan.variable_names[position], *gradients)
        for position, *gradients in pairs
        if str(position) not in result.replaced
    ]


def restoring(
    variables: list[Variable], strategy: tf.distribute.Strategy, function: Callable[[], Result]
) -> Result:
    """Returns a function's result, and restores the variables that it assigns.

    The function is called eagerly, which takes far less time than tracing it. It is traced if that
    fails: Keras's float8 layers, for one, have gradients in graphs only.
    """
    before = read_copies(variables, strategy)
    try:
        return function()
    except Exception:  # noqa: BLE001  # layers raise all kinds of errors
        write_copies(variables, before, strategy)
        result: Result = tf.function(function, autograph=False).get_concrete_function()()
        return result
    finally:
        write_copies(variables, before, strategy)


@differentiable_moments()  # Keras's own second derivatives are wrong: see docs/keras_faults.md
def plain_gradients(group: UpdateGroup, inputs: PassInputs, plan: StepPlan) -> list[Gradient]:
    """Returns the gradients of a plain loop, in which the model reads and assigns its variables.

    They are in the order of `group.positions`.
    """
    for seed, key in zip(plan.seeds, tf.unstack(inputs.keys, num=len(plan.seeds)), strict=True):
        seed.assign(key)
    share, size = inputs.share, inputs.global_batch
    with tf.GradientTape(persistent=True) as tape:
        result = call_user(plan.compute_loss, share.batch, training=True)
        losses, _ = losses_and_aux(
            result, share.batch, group.objectives, global_loss=plan.global_loss
        )
        model = plan.model
        entries = added_entries(model, model.losses) if isinstance(model, keras.Layer) else []
        added = added_loss(entries, share, size)
        scaled = {
            name: scaling.scale_loss(
                (each if plan.global_loss else weighted_mean(each, share, size.weight)) + added,
                inputs.scale_state,
            )
            for name, each in losses.items()
        }
    gradients: list[Gradient] = []
    for objective in group.objectives:
        # Not `keras.Variable`: its value is what the scope below holds.
        variables = [tensorflow_variable(plan.weights[at]) for at in objective.positions]
        # Rematerialized layers read and draw the same numbers again, as in the step.
        given = [(plan.held_back[int(at)], value) for at, value in inputs.values.items()]
        given += zip(plan.seeds, tf.unstack(inputs.keys, num=len(plan.seeds)), strict=True)
        with HoldBack([*plan.held_back, *plan.seeds], given):
            gradients += tape.gradient(scaled[objective.name], variables)
    return [scaling.coalesce(gradient) for gradient in gradients]


def check_same(pairs: list[Compared], tolerance: float) -> None:
    """Raises ValueError if the step's gradient of a variable is missing or different.

    Args:
        pairs: the gradients.
        tolerance: the largest accepted difference: see `IN_FLOAT32`.
    """
    norms = [norm_of(pair.plain) for pair in pairs if pair.plain is not None]
    norms = [norm for norm in norms if tf.math.is_finite(norm)]  # others may have overflowed
    smallest = FLOOR * tf.norm(tf.stack([0.0, *norms]))
    for name, step, plain in pairs:
        if plain is None:
            continue
        if step is not None:
            size = tf.maximum(norm_of(step), norm_of(plain))
            allowed = tolerance * tf.maximum(size, smallest)
            # If one is inf or NaN, the step will be skipped, or both are.
            if not tf.math.is_finite(size) or norm_of_difference(step, plain) <= allowed:
                continue
        raise ValueError(
            "`compute_loss` must have the gradients of a plain tf.GradientTape; got "
            f"{'no' if step is None else 'a different'} gradient for {name!r}."
        )


def norm_of(gradient: Gradient) -> tf.Tensor:
    """Returns a coalesced gradient's norm: shape (), float32."""
    return tf.norm(tf.cast(gradient_values(gradient), tf.float32))


def norm_of_difference(one: Gradient, other: Gradient) -> tf.Tensor:
    """Returns the norm of the difference of two coalesced gradients: shape (), float32."""
    both = (one, other)
    if any(isinstance(each, tf.Tensor) for each in both):  # the step may have made its own dense
        both = tuple(tf.convert_to_tensor(each) for each in both)
    first, second = (tf.cast(gradient_values(each), tf.float32) for each in both)
    return tf.norm(first - second) if first.shape == second.shape else tf.constant(math.inf)


def computes_in_float32(model: Model) -> bool:
    """Returns whether a model is known to compute in float32; a `tf.Module` is not."""
    if not isinstance(model, keras.Layer):
        return False
    return not any(layer.compute_dtype in SIGNIFICANT_BITS for layer in all_layers(model))
