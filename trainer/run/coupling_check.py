"""Finds what couples the examples of a batch, before the first step of a run that divides batches.

Replicas and microbatches compute on their own shares of a batch. A loss or a layer in which the
result of one example depends on the others, such as a contrastive loss or BatchNormalization, then
computes something else than on the whole batch. That may be wanted, but it must not go unnoticed.
So a few examples are sent through the forward pass together and in two halves, and what differs is
named in a warning.
"""

import collections
import dataclasses
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from absl import logging

import strategies
from strategies.division import cut_rows
from trainer.base.warn_once import listed
from trainer.keras_compat import all_layers, layer_that_added, owners_of
from trainer.run.gradient_check import EXAMPLES, computes_in_float32, first_examples, restoring
from trainer.run.gradient_check import pass_inputs as inputs_of
from trainer.step.added_losses import (
    describe_added_loss,
    kinds_of_added_losses,
    may_be_per_example,
)
from trainer.step.differentiate import gathers, part_of_loss
from trainer.step.forward import forward, written_by
from trainer.step.gather import RowsError
from trainer.step.held_back import read_values
from trainer.step.microbatch import MicrobatchPlan, PassInputs
from trainer.step.plan import StepPlan, microbatch_plan, ones
from trainer.step.replica import given_positions, my_share, pass_inputs
from trainer.step.types import Batch, ScaleState, StepInputs, Values

# The largest accepted difference between two losses, as a fraction of the largest loss.
IN_FLOAT32, IN_HALF = 1e-4, 0.05
AMONG_RANDOM = 1e6  # of scalars that random numbers move: only a sum is told from a mean


class Outputs(NamedTuple):
    """What a forward pass returned for some examples."""

    # The sum of all objectives' losses: float32, shape (examples, ...); () if the loss is global.
    losses: tf.Tensor
    written: Values  # what the forward pass would have assigned
    added: list[tf.Tensor]  # the scalars in `model.losses`
    adders: list[keras.Layer | None]  # the layers that added them; None if not known
    random: bool  # whether it drew from a generator in `plan.seeds`


def what_couples(plan: StepPlan, batch: Batch, scale_state: ScaleState) -> list[str]:
    """Returns a sentence for everything in a step that depends on how batches are divided.

    Nothing is compared if batches are not divided, under parameter servers, and on a TPU. All
    variables are restored.

    Args:
        plan: the run's constants.
        batch: the first global batch.
        scale_state: the loss-scale rule's state.
    """
    found = strategies.capabilities(plan.strategy)
    if plan.gathers:
        return global_loss_differs(plan, batch, scale_state)
    if plan.single_pass or found.asynchronous or found.decides_in_replica:
        return []
    whole = inputs_of(first_examples(batch, plan), plan, scale_state)
    half = whole._replace(share=strategies.take(whole.share, 0, 2))
    if int(whole.share.examples) < 2:
        return []
    # With the same key, Dropout draws the same numbers for the first examples, on a CPU.
    comparable = found.on_cpu or not plan.seeds
    try:
        loss = differs(whole, half, plan, training=False)
        layers = not loss and comparable and differs(whole, half, plan, training=True)
        trained = outputs_of(whole, plan, training=True)
        added = kinds_of_scalars(whole, trained, plan)
        written = assigned_by_users(trained.written, plan)
    except Exception as error:  # noqa: BLE001  # a check must not end a run
        logging.warning("Whether examples depend on each other was not checked: %s", error)
        return []
    shares = f"{plan.strategy.num_replicas_in_sync} replicas x {plan.num_microbatches} microbatches"
    texts = []
    if loss:
        texts.append(
            "The loss of an example depends on the other examples in `compute_loss`. With "
            f"{shares}, each share of a batch is coupled by itself, which is another loss than on "
            'the whole batch. Pass loss_reduction="global" to couple whole batches: on several '
            "replicas by self.all_gather, on one without microbatches."
        )
    texts += added
    if layers:
        texts.append(
            f"In training, {coupling_layers(plan.model)} on all examples of a share. With "
            f"{shares}, each share of a batch is normalized by itself, as usual with replicas; "
            "statistics become the mean over the shares."
        )
    if written:
        texts.append(
            f"The forward pass assigns {listed(written)}. With {shares}, a float becomes the mean "
            "over the shares of a batch, weighted by their numbers of examples, and an integer the "
            "value of the first share. So count or sum nothing over examples in the forward pass."
        )
    return texts


def global_loss_differs(plan: StepPlan, batch: Batch, scale_state: ScaleState) -> list[str]:
    """Returns a sentence if a global loss is not the same on several replicas as on one device.

    All variables are restored. Nothing is compared if the loss draws random numbers, which differ
    between replicas. The difference is no error: a loss near 0 may be rounding alone.

    Args:
        plan: the run's constants; replicas exchange rows.
        batch: the first global batch.
        scale_state: the loss-scale rule's state.
    """
    replicas = plan.strategy.num_replicas_in_sync
    share = strategies.whole(batch, ones(batch))
    if not any(tensor.shape[0] for tensor in getattr(plan.model, "inputs", None) or []):
        few = min(EXAMPLES * replicas, int(share.examples))
        share = strategies.whole(cut_rows(batch, 0, few), tf.ones([few]))
    try:
        whole = inputs_of(share, plan, scale_state)
        outputs = outputs_of(whole, plan, training=False)
        if outputs.random:
            return []
        divided = restoring(
            [*plan.undo, *plan.seeds],
            plan.strategy,
            tf.function(
                lambda: global_loss_of(share, plan, scale_state), autograph=False
            ).get_concrete_function(),
        )
    except RowsError:  # in the step the number of rows may not be static
        raise
    except Exception as error:  # noqa: BLE001  # a check must not end a run
        logging.warning("The loss on replicas was not compared with one device's: %s", error)
        return []
    one, several = float(outputs.losses), float(divided)
    tolerance = IN_FLOAT32 if computes_in_float32(plan.model) else IN_HALF
    if abs(one - several) > tolerance * max(abs(one), abs(several)):  # False for NaN
        text = f"`compute_loss` returns {several:.6g} on {replicas} replicas, and {one:.6g} on one."
        return [f"{text} Gather what a global loss compares or counts with self.all_gather."]
    return []


def global_loss_of(share: strategies.Share, plan: StepPlan, scale_state: ScaleState) -> tf.Tensor:
    """Returns the loss of some examples, computed by all replicas: shape (), float32.

    Args:
        share: the examples, as if they were a global batch.
        plan: the run's constants.
        scale_state: the loss-scale rule's state.
    """
    constants = constants_of(plan, training=False)
    random = tf.constant([0, 0], tf.int64)
    inputs = StepInputs(share.batch, share.weights, scale_state, random, None)

    def replica() -> tf.Tensor:
        values = read_values(plan.held_back, given_positions(plan))
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        all_keys = pass_inputs(inputs, my_share(*inputs[:2]), values, index, plan)
        own = all_keys._replace(keys=all_keys.keys[0])
        with gathers(own, constants):
            passed = forward(own.share.batch, values, own.keys, constants)
        losses = [part_of_loss(loss, own, constants) for loss in passed.losses.values()]
        return tf.add_n(losses)

    return plan.strategy.reduce(tf.distribute.ReduceOp.SUM, plan.strategy.run(replica), axis=None)


def differs(whole: PassInputs, half: PassInputs, plan: StepPlan, *, training: bool) -> bool:
    """Returns whether the losses of the first half depend on the second half.

    Args:
        whole: inputs with all examples.
        half: inputs with the first half of the examples.
        plan: the run's constants.
        training: whether layers run in training mode.
    """
    one, other = (outputs_of(inputs, plan, training=training).losses for inputs in (whole, half))
    together = one[: other.shape[0]]
    largest = tf.reduce_max(tf.abs(together))
    tolerance = IN_FLOAT32 if computes_in_float32(plan.model) else IN_HALF
    # inf and NaN are no evidence: the step will be skipped.
    return bool(tf.reduce_max(tf.abs(together - other)) > tolerance * largest)


def outputs_of(inputs: PassInputs, plan: StepPlan, *, training: bool) -> Outputs:
    """Returns the results of a forward pass, and restores what it assigned."""
    constants = constants_of(plan, training=training)
    passed = restoring(
        [*plan.undo, *plan.seeds],
        plan.strategy,
        lambda: forward(inputs.share.batch, inputs.values, inputs.keys, constants),
    )
    losses = tf.add_n(list(passed.losses.values()))
    scalars = [
        entry for entry in passed.added if not may_be_per_example(entry, inputs.share.weights)
    ]
    adders = [layer_that_added(plan.model, entry) for entry in scalars]
    written = written_by(inputs.values, passed.after)
    random = any(passed.assigned[len(plan.held_back) :])
    return Outputs(losses, written, scalars, adders, random)


def constants_of(plan: StepPlan, *, training: bool) -> MicrobatchPlan:
    """Returns the constants of a pass in which layers run in training mode, or not."""

    def compute_loss(batch: Batch, training: bool) -> Any:  # noqa: ARG001  # as asked for here
        return plan.compute_loss(batch, training=mode)

    mode = training
    constants = microbatch_plan(plan, plan.objectives, dense=True, fuse=False)
    return dataclasses.replace(constants, compute_loss=compute_loss)


def kinds_of_scalars(whole: PassInputs, trained: Outputs, plan: StepPlan) -> list[str]:
    """Returns a sentence for each scalar in `model.losses` that is not a mean over the examples.

    Scalars are compared without randomness; those that a layer adds only in training, as routers of
    experts do, in training mode.

    Args:
        whole: inputs with all examples.
        trained: what a pass in training mode returned for them.
        plan: the run's constants.
    """
    halves = [whole._replace(share=strategies.take(whole.share, index, 2)) for index in (0, 1)]
    first, second = (int(half.share.examples) for half in halves)
    evaluated = outputs_of(whole, plan, training=False)
    usual = collections.Counter(map(id, evaluated.adders))
    often = collections.Counter(map(id, trained.adders))
    texts: dict[str | None, None] = {}  # as an ordered set
    for outputs, training in ((evaluated, False), (trained, True)):
        adders = enumerate(outputs.adders)
        chosen = [at for at, one in adders if not training or often[id(one)] > usual[id(one)]]
        if not chosen:
            continue
        passes = [outputs, *(outputs_of(half, plan, training=training) for half in halves)]
        values = [[float(tf.reduce_sum(each.added[at])) for at in chosen] for each in passes]
        rtol = 1e-3 if computes_in_float32(plan.model) else IN_HALF
        rtol = AMONG_RANDOM if outputs.random else rtol
        kinds = kinds_of_added_losses(values[0], (values[1], values[2]), (first, second), rtol=rtol)
        found = [outputs.adders[at] for at in chosen]
        texts |= {describe_added_loss(*pair): None for pair in zip(kinds, found, strict=True)}
    return [text for text in texts if text]


def assigned_by_users(written: Values, plan: StepPlan) -> list[str]:
    """Returns the names of assigned variables that do not belong to one of Keras's own layers."""
    if not isinstance(plan.model, keras.Layer):
        return []
    owners = owners_of(plan.model)
    ids = {id(variable) for variable in plan.model.weights}
    variables = [plan.held_back[int(position)] for position in written]
    return [
        variable.path
        for variable in variables
        if id(variable) in ids and not type(owners[id(variable)]).__module__.startswith("keras.")
    ]


def coupling_layers(model: Any) -> str:
    """Returns the names of layers that are known to use statistics of a batch, in words."""
    norms = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)
    layers = all_layers(model) if isinstance(model, keras.Layer) else []
    names = [layer.name for layer in layers if isinstance(layer, norms)]
    return f"the layers {listed(names)} depend" if names else "a layer depends"
