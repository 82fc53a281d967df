"""Which operations XLA is to compile and cannot, read from the traced graph before the first step.

A layer may say that XLA cannot compile it (`supports_jit`), but `compute_loss` may use layers that
are no part of the model, `tf.print`, lookup tables or Python functions. TensorFlow would fail at
the first step, with an error of dozens of lines.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from trainer.keras_compat import has_xla_kernel
from trainer.step.trace import called_functions

# XLA turns these operations of TensorFlow 1's control flow into others before it compiles.
CONTROL_FLOW = frozenset({"Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond"})
# Operations whose number of outputs depends on the values of their inputs. XLA reserves memory for
# the largest number, and some values and gradients behind such operations are then wrong, without
# an error.
SIZED_BY_VALUES = frozenset(
    {"DynamicPartition", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "Where"}
)
# Operations that read or write a variable, and their attributes with its dtype.
VARIABLE_OPERATION = re.compile(
    r"(Read|Assign(Add|Sub)?)VariableOp|Resource(Gather|Scatter|StridedSliceAssign)\w*"
)
DTYPES = ("dtype", "T")
LOOP = re.compile(r"(?:gradient_tape/)?(.*?\bwhile(_\d+)?)/")  # what a loop's lists are named after
SHOWN = 3  # how many operations a message names


def operations_without_xla(function: Any) -> list[str]:
    """Returns the names of operations that XLA is to compile and cannot.

    Args:
        function: a trace of a `tf.function`. It is compiled itself, or it calls functions that are,
            or neither.

    Returns:
        Names with the scopes of layers, such as "turn_1/ImageProjectiveTransformV3". Empty if XLA
        can compile what it is to compile.
    """
    return compiled_operations(
        function,
        lambda node, others: not has_xla_kernel(node.op) or is_unbounded_list(node, others),
    )


def is_unbounded_list(node: Any, others: Mapping[str, Any]) -> bool:
    """Returns whether an operation creates a list that may grow without end.

    A loop that is differentiated keeps its values in such a list, unless TensorFlow knows how often
    it runs at most. XLA has no memory to reserve for it.

    Args:
        node: the operation.
        others: the operations of its function, by name.
    """
    if node.op != "EmptyTensorList":
        return False
    size = others.get(node.input[1].partition(":")[0])
    return (
        size is not None and size.op == "Const" and tf.make_ndarray(size.attr["value"].tensor) < 0
    )


def operations_sized_by_values(function: Any) -> list[str]:
    """Returns the names of operations behind which XLA may compute wrong numbers.

    Args:
        function: as for `operations_without_xla`.
    """
    return compiled_operations(function, lambda node, _: node.op in SIZED_BY_VALUES)


def operations_on_int32_variables(function: Any) -> list[str]:
    """Returns the names of operations that XLA is to compile and that use an int32 variable.

    TensorFlow keeps an int32 variable in the host's memory also where there is a GPU. XLA's
    programs for the GPU cannot reach it there.

    Args:
        function: as for `operations_without_xla`.
    """
    return compiled_operations(
        function,
        lambda node, _: (
            VARIABLE_OPERATION.fullmatch(node.op)
            and any(node.attr[name].type == tf.int32.as_datatype_enum for name in DTYPES)
        ),
    )


def compiled_operations(
    function: Any, wanted: Callable[[Any, Mapping[str, Any]], Any]
) -> list[str]:
    """Returns the names of wanted operations that XLA is to compile.

    Args:
        function: as for `operations_without_xla`.
        wanted: whether an operation, a `NodeDef`, is wanted, given those of its function by name.
    """
    found: dict[str, None] = {}  # as an ordered set
    definition, library = definitions(function)
    seen: set[str] = set()
    for name in compiled_functions(definition, library):
        for node, others in used_nodes(library.get(name, definition), library, seen):
            if node.op not in (*CONTROL_FLOW, *library) and wanted(node, others):
                found[text_of(node)] = None
    return list(found)


def definitions(trace: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the `FunctionDef` of a trace, and those of the functions it may call, by name."""
    library = trace.graph.as_graph_def().library.function
    return trace.function_def, {each.signature.name: each for each in library}


def text_of(node: Any) -> str:
    """Returns an operation's name and type for a message."""
    if node.op == "EmptyTensorList":
        loop = LOOP.match(node.name)
        return f"{loop[1] if loop else node.name} (a loop that needs maximum_iterations)"
    return str(node.name) if node.op in node.name else f"{node.name} ({node.op})"


def compiled_functions(definition: Any, library: dict[str, Any]) -> list[str]:
    """Returns the names of the functions with `jit_compile=True` among a function and its callees.

    Args:
        definition: a `FunctionDef`.
        library: the functions that it may call, keyed by name.
    """
    reached: set[str] = set()
    for _ in used_nodes(definition, library, reached):
        pass
    known = {definition.signature.name: definition, **library}
    return [name for name in sorted(reached) if known[name].attr["_XlaMustCompile"].b]


def used_nodes(
    definition: Any, library: dict[str, Any], seen: set[str]
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yields the operations of a function on which its results or its effects depend.

    With each comes a dict of all operations of its own function, by name.

    Args:
        definition: a `FunctionDef`.
        library: the functions that it may call, keyed by name.
        seen: the names of functions that were visited before; modified.
    """
    if definition.signature.name in seen:
        return
    seen.add(definition.signature.name)
    by_name = {node.name: node for node in definition.node_def}
    waiting = [*definition.ret.values(), *definition.control_ret.values()]
    used = set()
    while waiting:
        name = waiting.pop().removeprefix("^").partition(":")[0]
        if name in by_name and name not in used:
            used.add(name)
            waiting += by_name[name].input
    for name in sorted(used):
        node = by_name[name]
        yield node, by_name
        for called in called_functions(node.attr):
            if called in library:
                yield from used_nodes(library[called], library, seen)


def listed_operations(names: list[str]) -> str:
    """Returns the first names of a list for a message, quoted.

    Example:
        >>> listed_operations(["print/PrintV2", "a/A", "b/B", "c/C"])
        "'print/PrintV2', 'a/A', 'b/B' and 1 more"
    """
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


def not_compilable_error(jit_compile: bool | str, names: list[str]) -> ValueError:
    """Returns the error for a step that XLA was asked to compile and cannot."""
    of_layers = ", or apply such layers to the data, with Dataset.map"
    remedy = "" if jit_compile == "update" else of_layers
    return ValueError(
        f"`jit_compile` must not be {jit_compile!r} for a step with operations that XLA cannot "
        f"compile; got {listed_operations(names)}. TensorFlow would fail at the first step. Use "
        f'"elementwise" or False{remedy}.'
    )


def int32_variables_error(jit_compile: bool | str, names: list[str]) -> ValueError:
    """Returns the error for a step whose int32 variables XLA's programs cannot reach."""
    return ValueError(
        f"`jit_compile` must not be {jit_compile!r} on a GPU for a step with int32 variables; got "
        f"{listed_operations(names)}. TensorFlow keeps int32 variables in the host's memory, which "
        'XLA\'s programs for a GPU cannot reach. Create these variables with dtype="int64", or use '
        '"elementwise" or False.'
    )


def warn_of_int32_variables(names: list[str]) -> None:
    """Warns that a step is not compiled because of its int32 variables."""
    logging.warning(
        "XLA's programs for a GPU cannot reach int32 variables, which TensorFlow keeps in the "
        "host's memory, as %s. So TensorFlow runs the step without XLA. To compile the step, "
        'create them with dtype="int64".',
        listed_operations(names),
    )


def warn_of_sizes(names: list[str], *, compiled: bool) -> None:
    """Warns that XLA may compute wrong numbers.

    Args:
        names: the operations because of which it may.
        compiled: whether XLA compiles the step all the same, because it was asked to.
    """
    logging.warning(
        "XLA may compute wrong numbers behind operations whose sizes depend on values, as %s. %s",
        listed_operations(names),
        'Compare a few steps with jit_compile=False, or leave it at "auto", which does not use XLA '
        "for them."
        if compiled
        else "So TensorFlow runs the step without XLA, which may be slow.",
    )
