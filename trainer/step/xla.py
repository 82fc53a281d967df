"""What of a step XLA compiles, and what TensorFlow runs operation by operation.

XLA joins operations, and so reads and writes less memory; TensorFlow's own kernels know more
of the processor's instructions for products and convolutions. Which is faster depends on the
model, the dtype and the device: `jit_compile="auto"` measures.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import strategies
from trainer.base.argument_checks import check_choice
from trainer.step.microbatch import Differentiate, Microbatch, PassInputs

# What may be compiled, and how a person calls it.
COMPILE_MODES: dict[bool | str, str] = {
    False: "nothing",
    "update": "the optimizer's update",
    "elementwise": "what is element-wise",
    True: "forward and backward passes",
}

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


def check_compile_mode(jit_compile: Any, strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError unless a step can be compiled in this way."""
    check_choice("jit_compile", jit_compile, tuple(COMPILE_MODES))
    if jit_compile == "update" and not has_one_replica(strategy):
        raise ValueError(
            '`jit_compile` must not be "update" with several replicas, a TPU or parameter servers; '
            f'got "update" with {strategy.num_replicas_in_sync} replicas. Keras moves the copies '
            "of a variable together, which XLA cannot compile. Use one of the other ways."
        )


def has_one_replica(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether an update is one replica's own affair."""
    others = strategies.is_asynchronous(strategy) or strategies.decides_inside(strategy)
    return strategy.num_replicas_in_sync == 1 and not others


def runs_on_cpu(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether all of a strategy's replicas compute on CPU devices."""
    return strategies.capabilities(strategy).on_cpu


def compiled_differentiation(
    differentiate: Callable[[PassInputs], Microbatch], jit_compile: bool | str
) -> Differentiate:
    """Returns a forward and backward pass as a `tf.function`, compiled as a mode says."""

    def run(inputs: PassInputs) -> Microbatch:
        with elementwise_scope() if jit_compile == "elementwise" else contextlib.nullcontext():
            return differentiate(inputs)

    return tf.function(run, autograph=False, jit_compile=jit_compile is True or None)


def elementwise_scope() -> contextlib.AbstractContextManager[None]:
    """Within, XLA compiles clusters of operations other than products, convolutions and pooling."""
    return tf.xla.experimental.jit_scope(compile_ops=lambda node: node.op in ELEMENTWISE)


def compiled_update(apply: Callable[..., None], jit_compile: bool | str) -> Callable[..., None]:
    """Returns an update, as one program of XLA's if it shall be."""
    if jit_compile != "update":
        return apply
    return tf.function(apply, autograph=False, jit_compile=True)
