"""Which pipelines can be resumed exactly, and how they are told apart, read from their graphs."""

import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import tensorflow as tf

Node: TypeAlias = tf.compat.v1.NodeDef  # an operation in the graph of a pipeline


def pipeline_graph(dataset: tf.data.Dataset) -> tf.compat.v1.GraphDef | None:
    """Returns the graph of a pipeline; None if it is too large to serialize.

    Serializing temporarily takes as much additional memory as the tensors that the pipeline holds.

    Raises:
        ValueError: if an operation keeps state outside the pipeline.
    """
    try:
        variant = tf.data.experimental.to_variant(dataset)
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant,
            external_state_policy=2,  # FAIL: a stateful operation is an error
        )
        return tf.compat.v1.GraphDef.FromString(serialized.numpy())
    except tf.errors.FailedPreconditionError as error:
        found = re.search(r"(\w+) is stateful", error.message)
        raise not_exact(f"the stateful operation {found[1] if found else error.message}") from None
    except tf.errors.OpError:
        return None


def description(graph: tf.compat.v1.GraphDef) -> str:
    """Returns a description of a pipeline, including seeds.

    Raises:
        ValueError: if an operation draws random numbers without a seed, or if the pipeline could
            be resumed exactly in one pass only.
    """
    for nodes in [graph.node, *(function.node_def for function in graph.library.function)]:
        if name := first_unseeded(nodes):
            raise not_exact(f"{name} without a seed")
    check_later_passes(graph.node)
    return f": {' '.join(transformations(graph.node))}"


def transformations(nodes: Iterable[Node]) -> list[str]:
    """Returns the transformations of a pipeline, with the sizes and seeds that order its data."""
    numbers = int64_constants(nodes)
    found = []
    for node in nodes:
        if node.op.startswith(ORDERING):
            known = [str(numbers[name]) for name in node.input if name in numbers]
            found.append(f"{node.op}({', '.join(known)})")
        elif "Dataset" in node.op:
            found.append(node.op)
    return found


SEEDED = ("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset")
ORDERING = (*SEEDED, "RangeDataset", "BatchDataset", "TakeDataset", "SkipDataset", "ShardDataset")


def not_exact(what: str) -> ValueError:
    """Returns the error for a pipeline whose position cannot be saved."""
    return ValueError(
        f"`train_data` must have a position that can be saved; got a pipeline with {what}. Pass "
        'data_resume="skip" or "restart" for it.'
    )


def first_unseeded(nodes: Iterable[Node]) -> str | None:
    """Returns the name of the first operation that draws a new seed in every process, or None."""
    numbers = int64_constants(nodes)
    for node in nodes:
        if node.op.startswith(SEEDED):
            known = [numbers.get(name.split(":")[0]) for name in node.input]
            if known.count(0) >= 2:  # both seeds are 0, which means "none"
                return str(node.op)
    return None


def check_later_passes(nodes: Iterable[Node]) -> None:
    """Raises ValueError if a pipeline could be resumed exactly in one pass, but not later.

    There are two such cases. First, an operation may use a new order in each pass but not be
    started at the beginning of a pass, so that `DataPosition`'s second iterator does not hold its
    count of starts. Second, a pipeline may take from several datasets in turn: once one of them
    has ended, an iterator restored by TensorFlow 2.21 does not notice the end of the others.
    """
    by_name = {node.name: node for node in nodes}
    [last] = [node.input[0] for node in nodes if node.op == "_Retval"]
    started = started_with(last, by_name, shuffles=False)
    for node in nodes:
        reshuffles = any(node.attr[name].b for name in RESHUFFLING if name in node.attr)
        if reshuffles and node.name not in started:
            if node.name in started_with(last, by_name, shuffles=True):
                raise not_exact(f"{node.op} before another shuffle")
            raise not_exact(f"{node.op} in a part that starts in the middle of a pass")
        if node.op == INTERLEAVE and not node.attr["stop_on_empty_dataset"].b:
            parts = [by_name[name.split(":")[0]] for name in node.input[1:]]
            if any(may_end(part, by_name) for part in parts):
                raise not_exact(f"{INTERLEAVE} of datasets that end")


# Attributes of operations that use a new order, or new random numbers, in each pass.
RESHUFFLING = ("reshuffle_each_iteration", "rerandomize_each_iteration")
INTERLEAVE = "DirectedInterleaveDataset"


def started_with(name: str, by_name: Mapping[str, Node], *, shuffles: bool) -> set[str]:
    """Returns the names of the nodes whose iterators are created together with a node's iterator.

    Args:
        name: the name of the node whose iterator is created.
        by_name: all nodes of the pipeline, keyed by name.
        shuffles: whether to include nodes whose iterators are created only when a shuffle fills
            its buffer.
    """
    node = by_name[name.partition(":")[0]]
    inputs = node.input if node.op in ("ZipDataset", INTERLEAVE) else node.input[:1]
    if node.op.startswith("Shuffle") and not shuffles:
        inputs = []
    return {node.name}.union(*(started_with(one, by_name, shuffles=shuffles) for one in inputs))


def may_end(node: Node, by_name: Mapping[str, Node]) -> bool:
    """Returns whether a part of a pipeline may end, judging by its graph."""
    inputs = [by_name[name.partition(":")[0]] for name in node.input]
    if node.op.startswith("Repeat"):
        return bool(inputs[1].attr["value"].tensor.int64_val[:] != [-1])  # -1 repeats forever
    if node.op.startswith("Random"):
        return False
    return not inputs or node.op.startswith("Take") or may_end(inputs[0], by_name)


def int64_constants(nodes: Iterable[Node]) -> dict[str, int]:
    """Returns the values of the scalar int64 constants in a graph, keyed by name."""
    tensors = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
    return {
        name: int(tf.make_ndarray(tensor))
        for name, tensor in tensors.items()
        if tensor.dtype == tf.int64.as_datatype_enum and not tensor.tensor_shape.dim
    }
