"""Compile modes: which part of a step XLA compiles. TensorFlow runs the rest op by op.

XLA fuses operations, so it reads and writes less memory. TensorFlow's own kernels make better use
of a CPU's instructions for matrix products and convolutions. Which of the two is faster depends on
the model, the dtype and the device; `jit_compile="auto"` chooses.

A layer may say that XLA cannot compile it (`supports_jit`). What else XLA cannot compile, such as
`tf.print`, ends the first step with TensorFlow's error.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from absl import logging

import strategies
from trainer.base.argument_checks import check_choice
from trainer.base.tracking import tracked
from trainer.step.report import PackedReport, StepReport, packed
from trainer.step.trace import called_functions
from trainer.step.types import Batch, Differentiate, Gradient, Microbatch, PassInputs

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
    found = strategies.capabilities(strategy)
    alone = found.num_replicas == 1 and not (found.asynchronous or found.decides_in_replica)
    if jit_compile in ONE_REPLICA and not alone:  # only there, a variable has one copy
        raise ValueError(
            "`jit_compile` must not compile the update on several replicas, a TPU or parameter "
            f"servers; got {jit_compile!r}"
        )


def layers_without_xla(*roots: Any) -> list[keras.Layer]:
    """Returns the layers that are tracked from some roots and say that XLA cannot compile them."""
    layers = (each for each in tracked(*roots) if isinstance(each, keras.Layer))
    return [layer for layer in layers if not supports_xla(layer)]


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


def adds_in_rows(jit_compile: bool | str, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether XLA compiles the norm of the gradients, and for a CPU."""
    return jit_compile == "step" and strategies.capabilities(strategy).on_cpu


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


def note_xla(error: tf.errors.OpError) -> None:
    """Adds to an error what to pass instead, if it is one of XLA's, which all name it."""
    if "xla" in error.message.lower():
        error.add_note("To compute without XLA, pass jit_compile=False.")


# Operations whose number of outputs depends on the values of their inputs. XLA reserves memory for
# the largest number, and some values and gradients behind such operations are then wrong, without
# an error.
SIZED_BY_VALUES = frozenset(
    {"DynamicPartition", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "Where"}
)
SHOWN = 3  # how many operations a message names


def operations_sized_by_values(function: Any) -> str:
    """Returns operations behind which XLA may compute wrong numbers, for a message; "" for none.

    Args:
        function: a trace of a `tf.function`. It is compiled itself, or it calls functions that are,
            or neither.
    """
    found: dict[str, None] = {}  # as an ordered set
    definition, library = definitions(function)
    seen: set[str] = set()
    for name in compiled_functions(definition, library):
        for node in used_nodes(library.get(name, definition), library, seen):
            if node.op in SIZED_BY_VALUES:
                found[node.name] = None
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(map(repr, [*found][:SHOWN])) + more


def definitions(trace: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the `FunctionDef` of a trace, and those of the functions it may call, by name."""
    library = trace.graph.as_graph_def().library.function
    return trace.function_def, {each.signature.name: each for each in library}


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


def used_nodes(definition: Any, library: dict[str, Any], seen: set[str]) -> Iterator[Any]:
    """Yields the operations of a function on which its results or its effects depend.

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
        yield by_name[name]
        for called in called_functions(by_name[name].attr):
            if called in library:
                yield from used_nodes(library[called], library, seen)
