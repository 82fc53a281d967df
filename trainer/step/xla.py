"""Compile modes: which part of a step XLA compiles. TensorFlow runs the rest op by op.

XLA fuses operations, so it reads and writes less memory. TensorFlow's own kernels make better use
of a CPU's instructions for matrix products and convolutions. Which of the two is faster depends on
the model, the dtype and the device; `jit_compile="auto"` chooses.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf
from absl import logging

import strategies
from trainer.base.argument_checks import check_choice
from trainer.keras_compat import all_layers
from trainer.step.microbatch import Differentiate, Microbatch, PassInputs
from trainer.step.report import StepReport
from trainer.step.report_bits import PackedReport, packed
from trainer.step.types import Batch, Gradient, Model

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


def check_model_compiles(model: Model, jit_compile: bool | str) -> None:
    """Raises ValueError if XLA is to compile a layer that it cannot compile."""
    found = layers_without_xla(model) if jit_compile in WITH_PASSES else []
    if found:
        kinds = {hasattr(layer, "use_cudnn") for layer in found}
        remedies = {
            True: "create LSTM and GRU with use_cudnn=False",
            False: "apply such layers to the data, with Dataset.map",
        }
        raise ValueError(
            f"`jit_compile` must not be {jit_compile!r} with layers that XLA cannot compile; got "
            f"{listed_layers(found)}. TensorFlow would fail at the first step. Use "
            f'"elementwise" or False, or {" and ".join(remedies[kind] for kind in sorted(kinds))}.'
        )


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
