"""An estimate of the memory that a replica needs during a step."""

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import strategies
from trainer.log.model_table import total_size, variable_rows
from trainer.log.summary import format_bytes
from trainer.run.protocol import RunnableTrainer
from trainer.run.slots import optimizers_by_item
from trainer.step.plan import ones
from trainer.step.types import Batch

# Types of operations whose outputs are not computed, only read or reshaped.
NOT_COUNTED = {"Const", "Placeholder", "ReadVariableOp", "Identity", "Reshape"}


class Memory(NamedTuple):
    """The memory that a replica needs during a step, in bytes."""

    weights: int  # all variables of the model
    slots: int  # variables of the optimizers
    gradients: int  # in float32
    activations: int  # outputs in the forward pass over one microbatch; a rough estimate

    def __str__(self) -> str:
        """Returns for example "about 3.0 MB a replica: weights 605.6 kB, ..."."""
        parts = ", ".join(f"{name} {format_bytes(value)}" for name, value in self._asdict().items())
        return f"about {format_bytes(sum(self))} a replica: {parts}"


def memory_of(trainer: RunnableTrainer, batch: Batch) -> Memory:
    """Estimates the memory that a replica needs during a step.

    Args:
        trainer: a trainer that has started.
        batch: a global batch.
    """
    optimizers = optimizers_by_item(trainer.optimizer).values()
    slots = [variable for optimizer in optimizers for variable in optimizer.variables]
    trainable = sum(math.prod(weight.shape) for weight in trainer.model.trainable_variables)
    return Memory(
        weights=total_size(variable_rows(trainer.model))[1],
        slots=sum(math.prod(slot.shape) * tf.as_dtype(slot.dtype).size for slot in slots),
        gradients=4 * trainable,
        activations=activation_bytes(trainer, batch),
    )


def activation_bytes(trainer: RunnableTrainer, batch: Batch) -> int:
    """Returns the size of all tensors that the forward pass over a microbatch computes.

    This is an upper bound: not all of these tensors are kept for the backward pass, and XLA fuses
    some of the operations.
    """
    shares = trainer.strategy.num_replicas_in_sync * trainer.num_microbatches
    share = strategies.take(strategies.whole(batch, ones(batch)), 0, shares).batch

    def forward(share: Batch) -> Any:
        with keras.StatelessScope():  # keeps assignments out of the graph
            return trainer.compute_loss(share, training=True)

    specs = tf.nest.map_structure(
        lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf), share
    )
    graph = tf.function(forward).get_concrete_function(specs).graph
    tensors = [
        tensor
        for operation in graph.get_operations()
        if operation.type not in NOT_COUNTED
        for tensor in operation.outputs
        if tensor.shape.is_fully_defined() and tensor.dtype.is_floating
    ]
    return sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors)
