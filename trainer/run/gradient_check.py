"""Compares a step's gradients with those of a plain TensorFlow loop, on request (L19, L8).

The step runs a Keras model inside a scope that holds back assignments, and divides batches into
shares. So a few examples of the first batch go through an ordinary `tf.GradientTape`, through the
step's forward and backward pass, and through the step as the run divides it. Nothing of this
remains in the step itself.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from absl import logging

import scaling
import strategies
from strategies.division import cut_rows
from trainer.base.autograph import call_user
from trainer.base.tracking import read_copies, tensorflow_variable, write_copies
from trainer.base.warn_once import listed
from trainer.data.errors import reason_of
from trainer.keras_compat import all_layers, differentiable_moments
from trainer.step.attempt import on_first_replica, positions_by_value, replica_step, run_share
from trainer.step.checks import SIGNIFICANT_BITS
from trainer.step.diagnose import ReplicaResult
from trainer.step.held_back import HoldBack, read_values
from trainer.step.losses import (
    added_entries,
    added_loss,
    losses_and_aux,
    recorded_losses,
    weighted_mean,
)
from trainer.step.plan import StepPlan, UpdateGroup, compiled_as
from trainer.step.randomness import make_keys
from trainer.step.trace import written_variables
from trainer.step.types import (
    Batch,
    ComputeLoss,
    GlobalBatchSize,
    Gradient,
    Microbatch,
    PassInputs,
    ScaleState,
    StepInputs,
    Values,
)

# Gradients of the scaled losses, and what a forward pass would assign, by the variable's name.
Results: TypeAlias = dict[str, Gradient]

EXAMPLES = 8  # in each share: which gradients exist does not depend on their number
# The largest accepted difference of a variable's two gradients, as a fraction of their norm, or of
# FLOOR times the global norm if that is larger: small gradients may be rounding alone. Both are
# computed in the same precision, and differ by the order of operations.
IN_FLOAT32, IN_HALF = 1e-3, 0.1
FLOOR = 0.1


def check_gradients(plan: StepPlan, batch: Batch, scale_state: ScaleState) -> str:
    """Checks that every variable gets the gradient that a plain loop would compute.

    If the run divides batches, and its gradients depend on that, a warning names the variables. A
    model with random layers is divided in inference mode: shares draw other numbers than a batch.
    All variables are restored. With several processes, and on a TPU, nothing is compared.

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
    if found.several_processes or found.decides_in_replica:
        return "not compared: not on the devices of this strategy"
    plan = compiled_as(plan, jit_compile=False)
    divided = plan
    if plan.seeds:
        infer = functools.partial(call_in_inference, plan.compute_loss)
        divided = compiled_as(dataclasses.replace(plan, compute_loss=infer), jit_compile=False)
    parts = plan.strategy.num_replicas_in_sync * plan.num_microbatches
    sizes = [tensor.shape[0] for tensor in getattr(plan.model, "inputs", None) or []]
    weights = tf.cast(call_user(plan.example_weights, batch), tf.float32)
    if any(sizes):  # the model accepts a share of this size alone
        batch, weights = strategies.take(strategies.whole(batch, weights), 0, parts)[:2]
    elif not plan.global_loss:  # such a loss may read rows together
        few = min(EXAMPLES * parts, weights.shape[0])
        batch, weights = cut_rows(batch, 0, few), weights[:few]
    share, size = strategies.whole(batch, weights), GlobalBatchSize.of(weights)
    inputs = StepInputs(share, size, scale_state, tf.zeros([2], tf.int64), None)
    missing: list[str] = []
    dependent: list[str] = []
    for group, in_shares in zip(plan.groups, divided.groups, strict=True):
        try:
            plain = restoring(plain_gradients, group, inputs, plan)
            step = restoring(results_of_pass, group, inputs, plan)
            if parts > 1 and not any(sizes):
                whole = restoring(results_of_pass, in_shares, inputs, divided)
                summed = restoring(results_of_shares, in_shares, inputs, divided)
                dependent += differing(summed, whole, plan)
        except Exception as error:  # noqa: BLE001  # the step itself will raise what is wrong
            logging.warning("The step's gradients were not compared: %s", error)
            return f"not compared: {reason_of(str(error))}"
        for name in differing(step, plain, plan):
            raise ValueError(
                f"`compute_loss` must have the gradient of a plain tf.GradientTape; {name!r} has "
                f"{'none' if step[name] is None else 'another'} in the step."
            )
        missing += [name for name, gradient in plain.items() if gradient is None]
    result = "those of a plain loop" + (f"; none for {listed(missing)}" if missing else "")
    if not dependent:
        return result
    logging.warning(
        "The gradients or new values of %s depend on how a batch is divided into %d shares: the "
        "loss or a layer uses several examples at once. See docs/numerics.md.",
        *(listed(dependent), parts),
    )
    return f"{result}; {listed(dependent)} depend on how a batch is divided"


def call_in_inference(compute_loss: ComputeLoss, batch: Batch, training: bool) -> Any:  # noqa: ARG001
    """Calls `compute_loss` with training=False."""
    return compute_loss(batch, training=False)


def restoring(function: Callable[..., Results], *arguments: Any) -> Results:
    """Returns a function's results, computed in a graph; restores what it assigns."""
    plan: StepPlan = arguments[-1]
    traced = tf.function(lambda: function(*arguments), autograph=False).get_concrete_function()
    written, _ = written_variables(traced, plan.strategy)
    variables = [*plan.held_back, *plan.seeds, *plan.declared, *written]
    before = read_copies(variables, plan.strategy)
    try:
        results: Results = traced()
        return results
    finally:
        write_copies(variables, before, plan.strategy)


def inputs_of_pass(inputs: StepInputs, plan: StepPlan) -> PassInputs:
    """Returns the inputs of one forward and backward pass over the whole batch."""
    return PassInputs(
        share=inputs.share,
        global_batch=inputs.global_batch,
        scale_state=inputs.scale_state,
        values=read_values(plan.held_back, positions_by_value(plan)),
        keys=make_keys(inputs.random, 0, 1, 1, len(plan.seeds))[0],
    )


def results_of_pass(group: UpdateGroup, inputs: StepInputs, plan: StepPlan) -> Results:
    """Returns what the step's forward and backward pass computes of the whole batch."""
    result: Microbatch = group.differentiate.python_function(inputs_of_pass(inputs, plan))
    return by_name(group, result.contribution.gradients, result.written, plan)


def results_of_shares(group: UpdateGroup, inputs: StepInputs, plan: StepPlan) -> Results:
    """Returns the same, as the replicas and microbatches of the run compute it."""

    def replica(inputs: StepInputs) -> ReplicaResult:
        local = run_share(inputs, group=group, plan=plan)
        return replica_step(*local, inputs, group=group, plan=plan)

    shares = strategies.shares(inputs.share.batch, inputs.share.weights, plan.strategy)
    result = plan.strategy.run(replica, args=(inputs._replace(share=shares),))
    summed, written = on_first_replica((result.evidence.summed, result.written), plan.strategy)
    return by_name(group, summed, written, plan)


def by_name(
    group: UpdateGroup, gradients: list[Gradient], written: Values, plan: StepPlan
) -> Results:
    """Returns gradients, and what a forward pass would assign, by the names of the variables."""
    names = (plan.variable_names[position] for position in group.positions)
    assigned = {plan.held_back[int(at)].path: value for at, value in written.items()}
    return dict(zip(names, gradients, strict=True)) | assigned


@differentiable_moments()  # Keras's own second derivatives are wrong: see docs/keras_faults.md
def plain_gradients(group: UpdateGroup, inputs: StepInputs, plan: StepPlan) -> Results:
    """Returns the gradients of a plain loop, in which the model reads and assigns its variables."""
    values = inputs_of_pass(inputs, plan)
    for seed, key in zip(plan.seeds, tf.unstack(values.keys, num=len(plan.seeds)), strict=True):
        seed.assign(key)
    share, size, model = values.share, values.global_batch, plan.model
    with tf.GradientTape(persistent=True) as tape:
        with recorded_losses(model) as recorded:
            result = call_user(plan.compute_loss, share.batch, training=True)
        losses, _ = losses_and_aux(
            result, share.batch, group.objectives, global_loss=plan.global_loss
        )
        entries = added_entries(model.losses, recorded) if isinstance(model, keras.Layer) else []
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
        given = [(plan.held_back[int(at)], value) for at, value in values.values.items()]
        given += zip(plan.seeds, tf.unstack(values.keys, num=len(plan.seeds)), strict=True)
        with HoldBack([*plan.held_back, *plan.seeds], given, dropped=None):
            gradients += tape.gradient(scaled[objective.name], variables)
    # A value that replaces a variable is no gradient.
    replaced = (
        getattr(plan.weights[at], "overwrite_with_gradient", False) for at in group.positions
    )
    pairs = zip(gradients, replaced, strict=True)
    return by_name(group, [None if other else one for one, other in pairs], {}, plan)


def differing(some: Results, others: Results, plan: StepPlan) -> list[str]:
    """Returns the names of variables of which two results differ, by more than rounding."""
    layers = all_layers(plan.model) if isinstance(plan.model, keras.Layer) else []
    in_float32 = layers and not any(each.compute_dtype in SIGNIFICANT_BITS for each in layers)
    tolerance = IN_FLOAT32 if in_float32 else IN_HALF
    expected = {name: as_array(other) for name, other in others.items() if other is not None}
    norms = [np.linalg.norm(array) for array in expected.values()]
    smallest = FLOOR * np.linalg.norm([norm for norm in norms if np.isfinite(norm)])
    names = []
    for name, other in expected.items():
        one = some.get(name)
        if one is None:
            names.append(name)
            continue
        array = as_array(one)
        size = max(np.linalg.norm(array), np.linalg.norm(other), smallest)
        # If one is inf or NaN, the step will be skipped, or both are.
        if np.isfinite(size) and np.linalg.norm(array - other) > tolerance * size:
            names.append(name)
    return names


def as_array(value: Gradient) -> np.ndarray:
    """Returns a dense gradient, or an assigned value, in float32."""
    array: np.ndarray = tf.cast(tf.convert_to_tensor(value), tf.float32).numpy()
    return array
