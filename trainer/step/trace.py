"""What a traced step reads, writes, draws at random and calls.

TensorFlow's graph is asked, not Python: whatever a function assigns, however deeply it is hidden,
becomes an operation on a resource that the graph captured from outside.
"""

import contextlib
import contextvars
import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from scaling.base.traced_graphs import FUNCTION, LOOP, kind_of
from trainer.base.autograph import call_user, without_autograph
from trainer.base.tracking import tensorflow_variable
from trainer.keras_compat import owners_of
from trainer.step.report import StepReport

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
# Operations whose results do not depend on the values that they are given.
OF_SHAPES = ("OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")


class Write(NamedTuple):
    """An operation that changes a resource from outside the traced function."""

    kind: str  # type of the operation
    name: str  # name of the operation
    dtype: int  # what the operation says about the variable's dtype; 0 if nothing
    resource: Any  # the captured handle


class Written(NamedTuple):
    """An operation of a function's body that changes one of its arguments."""

    kind: str
    name: str
    dtype: int
    argument: int  # index of the argument


class ByHandle(NamedTuple):
    """A variable of which a trace knows no more than its handle, as in a raw operation."""

    handle: Any
    dtype: tf.DType

    def read_value(self) -> tf.Tensor:
        """Returns the value."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def assign(self, value: tf.Tensor) -> Any:
        """Assigns a value."""
        return tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)


def written_variables(
    traced: tf.types.experimental.ConcreteFunction, strategy: tf.distribute.Strategy
) -> tuple[list[tf.Variable | ByHandle], list[Write]]:
    """Returns the variables that a traced function writes, and its writes to anything else.

    Args:
        traced: the function.
        strategy: the strategy whose replicas run in it.

    Returns:
        The variables, each once, those of a strategy as a whole; and writes to lookup tables,
        queues and iterators.
    """
    copies = [
        copy for each in traced.variables for copy in strategy.experimental_local_results(each)
    ]
    known = {id(copy.handle): copy for copy in copies}
    found: dict[int, tf.Variable | ByHandle] = {}
    others = []
    for write in writes_since(0, traced.graph):
        handle = write.resource
        if id(handle) in known:
            variable = strategy.extended.value_container(known[id(handle)])
            found[id(variable)] = variable
        elif write.dtype and write.kind.startswith(("Assign", "Resource")):
            found[id(handle)] = ByHandle(handle, tf.as_dtype(write.dtype))
        else:
            others.append(write)
    return list(found.values()), others


class NoWrites(keras.StatelessScope):
    """A scope in which no Keras variable may be assigned."""

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Refuses an assignment. Keras calls this method."""
        raise ValueError(changed_in_weights(update[0].path))


@contextlib.contextmanager
def forbid_writes() -> Iterator[None]:
    """Context manager: refuses to trace an `example_weights` that changes anything.

    The weights are computed once, before the attempts of a step, so a skip could not undo a change.

    Raises:
        ValueError: if anything is written.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    start = len(graph.get_operations()) if graph else 0
    with NoWrites():
        yield
    for write in writes_since(start, graph) if graph else ():
        raise ValueError(changed_in_weights(write.name))


def changed_in_weights(what: str) -> str:
    """Returns why a write in `example_weights` is refused."""
    return f"`example_weights` must not change anything: a skip cannot undo it; got {what!r}"


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
            found += [(op.type, op.name, dtype_of(op.node_def.attr), tensor) for tensor in inputs]
        for function in called_functions(op.node_def.attr):
            for kind, name, dtype, argument in library.written(function) if library else ():
                offset = len(inputs) - library.num_arguments(function)  # type: ignore[union-attr]
                found.append((kind, name, dtype, inputs[offset + argument]))
    written = []
    for kind, name, dtype, tensor in found:
        handle = captured(tensor, graph) if tensor.dtype == tf.resource else None
        if handle is not None:
            written.append(Write(kind, name, dtype, handle))
    return written


def dtype_of(attributes: Any) -> int:
    """Returns the dtype of the variable that an operation assigns, as a number; 0 if it has none.

    Args:
        attributes: the operation's attributes, the `attr` of a `NodeDef`.
    """
    found: int = attributes["dtype"].type or attributes["T"].type
    return found


def captured(tensor: tf.Tensor, graph: tf.Graph) -> Any:
    """Returns the resource from outside that a tensor of a graph stands for, or None."""
    while PASSES.fullmatch(tensor.op.type):
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    for outside, inside in getattr(graph, "captures", ()):
        if inside is tensor:
            if tf.is_tensor(outside) and not tf.is_symbolic_tensor(outside):
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
            dtype = dtype_of(node.attr)
            changed = [(node.op, node.name, dtype, source) for source in inputs]
            changed = changed if WRITERS.fullmatch(node.op) else []
            for inner in called_functions(node.attr):
                for kind, name, dtype, argument in self.written(inner):
                    source = inputs[len(inputs) - self.num_arguments(inner) + argument]
                    changed.append((kind, name, dtype, source))
            for kind, name, dtype, source in changed:
                place = argument_of(source)
                if place is not None:
                    yield Written(kind, name, dtype, place)


def inner_graphs(outer: tf.Graph) -> set[str]:
    """Returns what is being traced inside a graph: a "loop", a "condition", a "function"."""
    graph, found = tf.compat.v1.get_default_graph(), set()
    while graph is not outer and hasattr(graph, "outer_graph"):
        found.add(kind_of(graph))
        graph = graph.outer_graph
    return found


def graph_around_loops(outer: tf.Graph) -> tf.Graph | None:
    """Returns the graph around the loops that are being traced, or None if there is no loop.

    It is the graph in which all these loops run, also if one is in a branch of a condition. It lies
    in `outer` or is `outer`. What is computed there is computed once, and the loops can read it.
    """
    graph, found = tf.compat.v1.get_default_graph(), None
    while graph is not outer and kind_of(graph) != FUNCTION:
        if kind_of(graph) == LOOP:
            found = graph.outer_graph
        graph = graph.outer_graph
    return found


def called_functions(attributes: Any) -> list[str]:
    """Returns the names of the functions that an operation calls: bodies, branches, and so on.

    Args:
        attributes: the operation's attributes, the `attr` of a `NodeDef`.
    """
    return [
        each.name
        for value in attributes.values()
        for each in ([value.func] if value.func.name else value.list.func)
    ]


def operations_before(tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """Returns the operations of a graph on whose values tensors depend.

    Example:
        >>> with tf.Graph().as_default():
        ...     x, y = tf.constant(1.0), tf.constant(2.0)
        ...     found = operations_before([x * tf.ones_like(y)])
        >>> x.op in found, y.op in found
        (True, False)
    """
    todo, found = [tensor.op for tensor in tensors], set()
    while todo:
        operation = todo.pop()
        if operation not in found:
            found.add(operation)
            todo += [each.op for each in values_read(operation)]
    return found


def any_depends(results: Iterable[tf.Tensor], values: Iterable[tf.Tensor]) -> bool:
    """Returns whether one of some results depends on one of some values; True in eager mode.

    Example:
        >>> x = tf.constant(1.0)
        >>> tf.function(lambda y: any_depends([y * y], [x * y]), autograph=False)(x)
        <tf.Tensor: shape=(), dtype=bool, numpy=False>
    """
    if tf.executing_eagerly():  # there is no graph that tells
        return True
    before = operations_before(results)
    return any(value.op in before for value in values)


def values_read(operation: tf.Operation) -> Sequence[tf.Tensor]:
    """Returns the inputs of an operation, but none if it looks at their shapes alone.

    Keras's `Concatenate` makes a mask of ones of the shape of an input that has none.
    """
    return () if operation.type in OF_SHAPES else operation.inputs


# For each function of a model: the dtypes of the layers whose variables it reads, as they were when
# it was first called in a pass.
_SEEN: "weakref.WeakKeyDictionary[keras.Model, dict[str, frozenset[str]]]" = (
    weakref.WeakKeyDictionary()
)


@contextlib.contextmanager
def functions_of_one_precision(model: keras.Model) -> Iterator[None]:
    """Context manager: refuses functions that were traced while the layers had other dtypes.

    A `tf.function` keeps the trace that it makes when it is first called. The loss is traced
    several times, for steps in half precision and for evaluations in float32, and the dtypes in
    which Keras's layers compute are no argument of the function. So a helper `@tf.function` that
    calls the model would evaluate in half precision what was trained in it, or train in float32
    what was evaluated before. A function that is created anew in each pass, as in some layers of
    Keras, is traced anew. Functions that are called in a loop or a condition, or under a tape of
    the user's, are not seen.

    Args:
        model: the model whose pass is traced.

    Raises:
        ValueError: if such a function is called.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly():
        yield
        return
    before = len(graph.get_operations())
    yield
    calls = [each for each in graph.get_operations()[before:] if each.type in CALLS]
    owners = dtypes_of_handles(model) if calls else {}
    seen = _SEEN.setdefault(model, {})
    for operation in calls:
        held = (captured(each, graph) for each in operation.inputs if each.dtype == tf.resource)
        dtypes = frozenset(owners[id(each)] for each in held if id(each) in owners)
        name = operation.get_attr("f").name
        if dtypes and seen.setdefault(name, dtypes) != dtypes:
            called = re.sub(r"^__[a-z]+_|_\d+$", "", name)
            raise ValueError(
                f"`compute_loss` must not call a tf.function traced in another precision; got "
                f"{called!r}: leave out @tf.function"
            )


def dtypes_of_handles(model: keras.Model) -> dict[int, str]:
    """Returns the dtype in which a layer computes with each variable, by the id of its handle."""
    owners = owners_of(model)
    return {
        id(tensorflow_variable(variable).handle): owners[id(variable)].compute_dtype
        for variable in model.weights
    }


# The graphs in which the `train_step` that is being traced has attempted an update.
_ATTEMPTS: contextvars.ContextVar[list[tf.Graph] | None] = contextvars.ContextVar(
    "attempts", default=None
)


def note_attempt() -> None:
    """Notes that an update is attempted in the graph that is being traced."""
    attempts = _ATTEMPTS.get()
    if attempts is not None:
        attempts.append(tf.compat.v1.get_default_graph())


def require_single_attempt(step: Callable[[Any], StepReport]) -> Callable[[Any], StepReport]:
    """Returns a `train_step` that raises ValueError unless it attempts exactly one update.

    A run counts its steps by the attempts, and its loop by the calls of `train_step`. If the two
    differ, a resumed run ends at another step than the run that was not stopped.

    Args:
        step: takes a global batch, attempts an update, and returns a report.
    """

    @functools.wraps(step)
    @without_autograph
    def checked(batch: Any) -> StepReport:
        attempts: list[tf.Graph] = []
        token = _ATTEMPTS.set(attempts)
        try:
            report: StepReport = call_user(step, batch)
        finally:
            _ATTEMPTS.reset(token)
        if len(attempts) != 1:
            raise ValueError(f"{ONCE}; got {len(attempts)} calls")
        if attempts[0] is not tf.compat.v1.get_default_graph():
            raise ValueError(f"{ONCE}; got a call in one of these")
        return report

    return checked


ONCE = (
    "`train_step` must call super().train_step, or attempt_step, exactly once, outside of loops, "
    "conditions and tf.functions"
)
