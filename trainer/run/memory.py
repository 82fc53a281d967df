"""An estimate of the memory that a replica needs during a step."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

import strategies
from trainer.log.model_table import total_size, variable_rows
from trainer.log.summary import format_bytes
from trainer.run.slots import optimizers_by_item
from trainer.step.plan import ones
from trainer.step.trace import called_functions
from trainer.step.types import Batch

if TYPE_CHECKING:
    from trainer.trainer import Trainer

Node: TypeAlias = tf.compat.v1.NodeDef  # an operation in a graph

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


def memory_of(trainer: "Trainer", batch: Batch) -> Memory:
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


def activation_bytes(trainer: "Trainer", batch: Batch) -> int:
    """Returns the size of all tensors that the forward pass over a microbatch computes.

    Not all of these tensors are kept for the backward pass, and XLA fuses some of the operations. A
    loop counts as often as the lists of tensors that it reads and writes have elements, as in an
    RNN, and any other loop once.
    """
    shares = trainer.strategy.num_replicas_in_sync * trainer.num_microbatches
    share = strategies.take(strategies.whole(batch, ones(batch)), 0, shares).batch

    def forward(share: Batch) -> Any:
        with keras.StatelessScope():  # keeps assignments out of the graph
            return trainer.compute_loss(share, training=True)

    specs = tf.nest.map_structure(
        lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf), share
    )
    graph = tf.function(forward).get_concrete_function(specs).graph.as_graph_def(add_shapes=True)
    functions = {each.signature.name: each.node_def for each in graph.library.function}
    return bytes_of(graph.node, functions)


def bytes_of(nodes: Sequence[Node], functions: Mapping[str, Sequence[Node]]) -> int:
    """Returns the size of all floats that operations compute, in the functions they call, too.

    Args:
        nodes: the operations of a graph or a function.
        functions: the operations of all functions, by name.
    """
    by_name = {node.name: node for node in nodes}
    total = 0
    for node in nodes:
        called = [
            bytes_of(functions[name], functions)
            for name in called_functions(node.attr)
            if name in functions
        ]
        if called:
            total += turns_of(node, by_name) * max(called)
        elif node.op not in NOT_COUNTED:
            shapes = node.attr["_output_shapes"].list.shape
            total += sum(map(math.prod, map(dimensions, shapes))) * dtype_of(node).size
    return total


def dimensions(shape: Any) -> list[int]:
    """Returns the dimensions of a shape; [0] if not all of them are known."""
    sizes = [dimension.size for dimension in shape.dim]
    return [0] if shape.unknown_rank or -1 in sizes else sizes


def dtype_of(node: Node) -> tf.DType:
    """Returns the dtype of an operation's outputs if it is a float; otherwise one of no size."""
    kinds = [node.attr[key].type for key in ("DstT", "dtype", "T") if node.attr[key].type]
    found = tf.as_dtype(kinds[0]) if kinds else tf.variant
    return found if found.is_floating else tf.variant


def turns_of(node: Node, by_name: Mapping[str, Node]) -> int:
    """Returns how often a loop's body runs, as far as it is known; 1 for any other operation."""
    if node.op not in ("While", "StatelessWhile"):
        return 1
    lengths = [1]
    for name in node.input:
        found = by_name.get(name.partition(":")[0])
        if found is None or found.op not in ("TensorListFromTensor", "TensorListReserve"):
            continue
        source = by_name.get(found.input[found.op == "TensorListReserve"].partition(":")[0])
        if source is not None and source.op == "Const":
            lengths.append(int(tf.make_ndarray(source.attr["value"].tensor)))
        elif source is not None:
            lengths += [dimensions(shape)[0] for shape in source.attr["_output_shapes"].list.shape]
    return max(lengths)
