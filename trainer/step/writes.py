"""Finds what a traced function writes, so that a step writes only what a skip can restore.

TensorFlow's graph is asked, not Python: whatever a function assigns, however deeply it is hidden,
becomes an operation on a resource that the graph captured from outside.
"""

import contextlib
import gc
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import strategies
from trainer.step.inner_graphs import called_functions
from trainer.step.rollback import copies_of
from trainer.step.types import Variable

# Operations that change a resource. Reading a tf.random.Generator changes it, and reading an
# iterator or a queue moves its position.
WRITERS = re.compile(
    r"Assign(Add|Sub)?Variable(Op|XlaConcatND)"
    r"|Resource(Apply|SparseApply|Scatter|StridedSliceAssign|CountUpTo|Accumulator)\w*"
    r"|Stateful(Uniform|StandardNormal|TruncatedNormal|Random)\w*|Rng(Read\w*|Skip)"
    r"|LookupTable(Insert|Import|Remove)V2|InitializeTable\w*"
    r"|(MultiDevice)?IteratorGetNext\w*|Queue(Dequeue|Enqueue)\w*|Stack(Push|Pop)V2"
    r"|Barrier\w*|DestroyResourceOp"
)
# Operations that return one of their inputs.
PASSES = re.compile(r"Identity(N)?|Switch|RefSwitch|Merge|Enter|Exit|NextIteration|StopGradient")


class Write(NamedTuple):
    """An operation that changes a resource from outside the traced function."""

    kind: str  # type of the operation
    name: str  # name of the operation
    resource: Any  # the captured handle


class Written(NamedTuple):
    """An operation of a function's body that changes one of its arguments."""

    kind: str
    name: str
    argument: int  # index of the argument


@contextlib.contextmanager
def undoable(
    variables: Sequence[Variable], strategy: tf.distribute.Strategy, assigned: set[int]
) -> Iterator[None]:
    """Context manager: refuses to trace what a skipped step could not undo.

    The writes of asynchronous strategies and of TPUs are not checked: their graphs do not tell
    which variable a resource belongs to.

    Args:
        variables: those that the step restores if it is skipped.
        strategy: the step's strategy.
        assigned: gets the ids of those that are written.

    Raises:
        ValueError: if anything else is written.
    """
    found = strategies.capabilities(strategy)
    if tf.executing_eagerly() or found.asynchronous or found.decides_in_replica:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    start = len(graph.get_operations())
    yield
    writes = writes_since(start, graph)
    if writes:
        allowed = {
            id(copy.handle): each for each in variables for copy in copies_of(each, strategy)
        }
        for write in writes:
            if id(write.resource) not in allowed:
                raise ValueError(explanation(write))
            assigned.add(id(allowed[id(write.resource)]))


def explanation(write: Write) -> str:
    """Returns why a write in `compute_loss` is refused, and what to do."""
    name = name_of(write.resource)
    if name is None:
        return (
            "`compute_loss` must not change what a skipped step cannot restore; got "
            f"{write.kind} at {write.name!r}. Only variables can go back to an earlier state, not "
            "lookup tables, queues or iterators. Write a table or a queue in update_metrics(), "
            "which runs on applied steps only, and zip further data into train_data."
        )
    return (
        "`compute_loss` must assign only variables that a skipped step can restore; got an "
        f"assignment to {name!r} ({write.kind} at {write.name!r}). When the step was built, the "
        "model, the trainer and the closures of its methods did not hold this variable, or it "
        "belongs to a keras.Variable whose value was assigned directly. Hold it as an attribute "
        "of the model or the trainer before the first step, or in others= of plan_step(); assign "
        "a keras.Variable itself, not its value."
    )


class NoWrites(keras.StatelessScope):
    """A scope in which no Keras variable may be assigned."""

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Refuses an assignment. Keras calls this method."""
        raise ValueError(explanation_of_weights(f"an assignment to {update[0].path!r}"))


@contextlib.contextmanager
def nothing_written() -> Iterator[None]:
    """Context manager: refuses to trace an `example_weights` that changes anything.

    Raises:
        ValueError: if anything is written.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    start = len(graph.get_operations()) if graph else 0
    with NoWrites():
        yield
    for write in writes_since(start, graph) if graph else ():
        name = name_of(write.resource)
        what = "a table, a queue or an iterator" if name is None else repr(name)
        raise ValueError(explanation_of_weights(f"{write.kind} on {what}"))


def explanation_of_weights(found: str) -> str:
    """Returns why a write in `example_weights` is refused, and what to do."""
    return (
        f"`example_weights` must not change anything; got {found}. The weights are computed once, "
        "before the attempts of a step, so a skipped step could not undo the change. Change it in "
        "compute_loss, or in update_metrics(), which runs on applied steps only."
    )


def name_of(handle: Any) -> str | None:
    """Returns the name of the variable with a handle, or None if it is no variable's."""
    for each in gc.get_objects():
        try:
            if issubclass(type(each), tf.Variable) and each.handle is handle:
                return str(each.name)
        except Exception:  # noqa: BLE001, S112  # a variable without a handle, or a broken object
            continue
    return None


def writes_since(start: int, graph: tf.Graph) -> list[Write]:
    """Returns what operations of a graph write to resources that it captured.

    Args:
        start: number of operations in the graph that are left out, the oldest.
        graph: the graph of a `tf.function` that is being traced.
    """
    new = graph.get_operations()[start:]
    library = Library(graph) if any(called_functions(op.node_def.attr) for op in new) else None
    found = []
    for op in new:
        inputs = list(op.inputs)
        if WRITERS.fullmatch(op.type):
            found += [(op.type, op.name, tensor) for tensor in inputs]
        for function in called_functions(op.node_def.attr):
            for kind, name, argument in library.written(function) if library else ():
                offset = len(inputs) - library.num_arguments(function)  # type: ignore[union-attr]
                found.append((kind, name, inputs[offset + argument]))
    written = []
    for kind, name, tensor in found:
        handle = captured(tensor, graph) if tensor.dtype == tf.resource else None
        if handle is not None:
            written.append(Write(kind, name, handle))
    return written


def captured(tensor: tf.Tensor, graph: tf.Graph) -> Any:
    """Returns the resource from outside that a tensor of a graph stands for, or None."""
    while PASSES.fullmatch(tensor.op.type):
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    for outside, inside in getattr(graph, "captures", ()):
        if inside is tensor:
            if isinstance(outside, tf.__internal__.EagerTensor):
                return outside
            return captured(outside, outside.graph)
    return None


class Library:
    """The functions that the operations of a graph call, by name.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: tf.Graph) -> None:
        """Reads the definitions of the functions."""
        library = graph.as_graph_def().library
        self._functions = {each.signature.name: each for each in library.function}
        self._written: dict[str, list[Written]] = {}

    def num_arguments(self, function: str) -> int:
        """Returns the number of a function's arguments."""
        return len(self._functions[function].signature.input_arg)

    def written(self, function: str) -> list[Written]:
        """Returns which of its arguments a function changes, directly or in functions it calls."""
        if function not in self._written:
            self._written[function] = []  # for a function that calls itself
            if function in self._functions:
                self._written[function] = list(self._find(function))
        return self._written[function]

    def _find(self, function: str) -> Iterator[Written]:
        definition = self._functions[function]
        arguments = {arg.name: index for index, arg in enumerate(definition.signature.input_arg)}
        nodes = {node.name: node for node in definition.node_def}

        def argument_of(source: str) -> int | None:
            name = source.partition(":")[0]
            while name in nodes and PASSES.fullmatch(nodes[name].op):
                inputs = nodes[name].input
                place = int(source.rpartition(":")[2]) if nodes[name].op == "IdentityN" else 0
                source = inputs[place]
                name = source.partition(":")[0]
            return arguments.get(name)

        for node in definition.node_def:
            inputs = [source for source in node.input if not source.startswith("^")]
            changed = [(node.op, node.name, source) for source in inputs]
            changed = changed if WRITERS.fullmatch(node.op) else []
            for inner in called_functions(node.attr):
                for kind, name, argument in self.written(inner):
                    source = inputs[len(inputs) - self.num_arguments(inner) + argument]
                    changed.append((kind, name, source))
            for kind, name, source in changed:
                place = argument_of(source)
                if place is not None:
                    yield Written(kind, name, place)
