"""Compile modes: which part of a step XLA compiles. TensorFlow runs the rest op by op.

XLA fuses operations, so it reads and writes less memory. TensorFlow's own kernels make better use
of a CPU's instructions for matrix products and convolutions. Which of the two is faster depends on
the model, the dtype and the device; `jit_compile="auto"` chooses.

Operations that XLA is to compile and cannot are found in the traced graph before the first step, so
that "auto" does without XLA. A layer may say that XLA cannot compile it (`supports_jit`), but
`compute_loss` may use layers that are no part of the model, `tf.print`, lookup tables or Python
functions.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from absl import logging

import strategies
from trainer.base.argument_checks import check_choice
from trainer.keras_compat import all_layers, has_xla_kernel
from trainer.step.report import PackedReport, StepReport, packed
from trainer.step.trace import called_functions
from trainer.step.types import Batch, Differentiate, Gradient, Microbatch, Model, PassInputs

UpdateFunction: TypeAlias = Callable[[list[Gradient]], None]
StepFunction: TypeAlias = Callable[[Batch, tf.Tensor], StepReport]

# The values of `jit_compile`, each with a description for logs of what XLA compiles.
COMPILE_MODES: dict[bool | str, str] = {
    False: "nothing",
    "update": "the optimizer's update",
    "elementwise": "element-wise operations",
    True: "forward and backward passes",
    "step": "the whole step",
}
WITH_PASSES = (True, "step")  # modes in which XLA compiles forward and backward passes
ONE_REPLICA = ("update", "step")  # modes in which XLA compiles what assigns variables

# fmt: off
ELEMENTWISE = frozenset({
    "Abs", "Add", "AddN", "AddV2", "BiasAdd", "BroadcastTo", "Cast", "Div", "DivNoNan", "Elu",
    "EluGrad", "Equal", "Erf", "Exp", "Expm1", "Fill", "Greater", "GreaterEqual", "Inv", "InvGrad",
    "IsFinite", "LeakyRelu", "LeakyReluGrad", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd",
    "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mul", "MulNoNan", "Neg", "NotEqual",
    "OnesLike", "Pow", "RealDiv", "Reciprocal", "Relu", "Relu6", "Relu6Grad", "ReluGrad", "Rsqrt",
    "RsqrtGrad", "Select", "SelectV2", "Selu", "SeluGrad", "Sigmoid", "SigmoidGrad", "Softplus",
    "SoftplusGrad", "Softsign", "Sqrt", "SqrtGrad", "Square", "SquaredDifference", "Sub", "Tanh",
    "TanhGrad", "Tile", "ZerosLike",
})
# fmt: on


def check_compile_mode(jit_compile: object, strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError unless XLA can compile this part of a step under this strategy."""
    check_choice("jit_compile", jit_compile, tuple(COMPILE_MODES))
    if jit_compile in ONE_REPLICA and not can_compile_update(strategy):
        others = ", ".join(repr(mode) for mode in COMPILE_MODES if mode not in ONE_REPLICA)
        raise ValueError(
            f'`jit_compile` must not be "{jit_compile}" with several replicas, a TPU or parameter '
            f"servers; got {jit_compile!r} under {type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas. XLA can compile the optimizer's update "
            "only where a variable has one copy, on the device that updates it. "
            f"Use one of {others}."
        )


def layers_without_xla(model: Model) -> list[keras.Layer]:
    """Returns a model's layers that XLA cannot compile: those whose `supports_jit` is False.

    `RandomElasticTransform` has True there, but a shape in it depends on a random number. For LSTM
    and GRU see `supports_xla`.
    """
    layers = all_layers(model) if isinstance(model, keras.Layer) else []
    wrong = keras.layers.RandomElasticTransform
    return [layer for layer in layers if isinstance(layer, wrong) or not supports_xla(layer)]


def supports_xla(layer: keras.Layer) -> bool:
    """Returns whether a layer says that XLA can compile it.

    Where there is a GPU, Keras lets LSTM and GRU say no, because it computes them by cuDNN, unless
    they are created with `use_cudnn=False`. In `Bidirectional` they say no even then, but compile.
    """
    return bool(layer.supports_jit or getattr(layer, "use_cudnn", None) is False)


def listed_layers(layers: Sequence[keras.Layer]) -> str:
    """Returns names and classes of layers, for a message."""
    return ", ".join(f"{layer.name!r} ({type(layer).__name__})" for layer in layers)


def warn_of_plain_step(
    what: str, where: str, remedy: str = "apply such layers to the data"
) -> None:
    """Warns that a step is not compiled where it needs XLA to be fast.

    Args:
        what: what XLA cannot compile.
        where: a dtype and a kind of device.
        remedy: what to do with `Dataset.map`.
    """
    logging.warning(
        "XLA cannot compile %s, so TensorFlow runs the step without XLA, which is slow %s. To "
        "compile the step, %s, with Dataset.map.",
        what,
        where,
        remedy,
    )


def can_compile_update(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether XLA can compile the update: one replica, no TPU, no parameter servers."""
    found = strategies.capabilities(strategy)
    return found.num_replicas == 1 and not found.asynchronous and not found.decides_in_replica


def adds_in_rows(jit_compile: bool | str, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether XLA compiles the norm of the gradients, and for a CPU."""
    return jit_compile == "step" and strategies.capabilities(strategy).on_cpu


def check_microbatches(
    jit_compile: bool | str, num_microbatches: int, examples: int | None
) -> None:
    """Raises ValueError if a whole step is to be compiled with microbatches of several sizes.

    Args:
        jit_compile: the compile mode.
        num_microbatches: the number of microbatches.
        examples: the size of the global batch; None if the trace does not know it.
    """
    divided = jit_compile == "step" and num_microbatches > 1
    if divided and (examples is None or examples % num_microbatches):
        size = "of any size" if examples is None else f"of {examples} examples"
        raise ValueError(
            f'`jit_compile` must not be "step" with {num_microbatches} microbatches of a batch '
            f"{size}. XLA compiles a loop over microbatches of one size only, known when the step "
            "is traced. Make all batches a multiple of num_microbatches, with "
            "Dataset.batch(..., drop_remainder=True), or pass jit_compile=True."
        )


def compiled_step(attempt: StepFunction, jit_compile: bool | str, device: str) -> StepFunction:
    """Returns all of a step that depends on its inputs, compiled by XLA in mode "step".

    Args:
        attempt: the step.
        jit_compile: the compile mode.
        device: where the run's variables are. A program of XLA reaches only those of its device.
    """
    return one_program(attempt, device) if jit_compile == "step" else attempt


def one_program(attempt: StepFunction, device: str) -> StepFunction:
    """Returns a step as one program of XLA, whose only result is the report, as one vector.

    XLA copies each result of a program to a buffer of its own, constants too.

    Args:
        attempt: the step.
        device: where to run it.
    """

    def run(batch: Batch, weights: tf.Tensor) -> StepReport:
        specs: list[StepReport] = []

        def bits(batch: Batch, weights: tf.Tensor) -> tf.Tensor:
            report = attempt(batch, weights)
            specs.append(StepReport(*map(tf.TensorSpec.from_tensor, report)))
            return packed(report, specs[0])

        with tf.device(device):
            found = tf.function(bits, autograph=False, jit_compile=True)(batch, weights)
        return PackedReport.from_bits(found, specs[0])

    return run


def compiled_differentiation(
    differentiate: Callable[[PassInputs], Microbatch], jit_compile: bool | str
) -> Differentiate:
    """Returns a forward and backward pass as a `tf.function`, compiled as `jit_compile` says."""

    def run(inputs: PassInputs) -> Microbatch:
        with elementwise_scope() if jit_compile == "elementwise" else contextlib.nullcontext():
            return differentiate(inputs)

    compiled: Differentiate = tf.function(
        run, autograph=False, jit_compile=jit_compile is True or None
    )
    return compiled


def elementwise_scope() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which XLA compiles clusters of the operations in `ELEMENTWISE`."""
    scope: contextlib.AbstractContextManager[None] = tf.xla.experimental.jit_scope(
        compile_ops=lambda node: node.op in ELEMENTWISE
    )
    return scope


def compiled_update(apply: UpdateFunction, jit_compile: bool | str) -> UpdateFunction:
    """Returns the optimizer's update, compiled by XLA in mode "update"."""
    if jit_compile != "update":
        return apply
    compiled: UpdateFunction = tf.function(apply, autograph=False, jit_compile=True)
    return compiled


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
