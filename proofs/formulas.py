"""Turns a rule's traced graph into formulas, bit for bit: the code that trains is what is proved.

A float32 tensor becomes a floating-point term, an int32 tensor a bit vector of 32 (which wraps, as
int32 does), a bool a Boolean. Operations that no rule uses yet raise an error.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import z3

FLOAT = z3.Float32()
ROUNDING = z3.RNE()  # to nearest, ties to even, as processors round


def is_float(term: Any) -> bool:
    """Returns whether a term is a floating-point number."""
    return isinstance(term, z3.FPRef)


def either(floats: Callable[..., Any], ints: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes with floats or with ints, as its arguments are."""
    return lambda *terms: (floats if is_float(terms[0]) else ints)(*terms)


def equal(one: Any, other: Any) -> Any:
    """Returns whether two terms are equal, as TensorFlow compares: 0 and -0 are."""
    return z3.fpEQ(one, other) if is_float(one) else one == other


OPERATIONS: dict[str, Callable[..., Any]] = {
    "AddV2": either(lambda a, b: z3.fpAdd(ROUNDING, a, b), operator.add),
    "Sub": either(lambda a, b: z3.fpSub(ROUNDING, a, b), operator.sub),
    "Mul": either(lambda a, b: z3.fpMul(ROUNDING, a, b), operator.mul),
    "Neg": operator.neg,
    "Minimum": lambda a, b: z3.If(a < b, a, b),
    "Maximum": lambda a, b: z3.If(a > b, a, b),
    "Less": operator.lt,
    "LessEqual": operator.le,
    "Greater": operator.gt,
    "GreaterEqual": operator.ge,
    "Equal": equal,
    "NotEqual": lambda a, b: z3.Not(equal(a, b)),
    "LogicalAnd": z3.And,
    "LogicalOr": z3.Or,
    "LogicalNot": z3.Not,
    "SelectV2": z3.If,
    "Identity": lambda a: a,
}


def constant(value: Any) -> Any:
    """Returns a scalar from a graph as a term."""
    if value.dtype == bool:
        return z3.BoolVal(bool(value))
    if value.dtype.kind == "f":
        return z3.FPVal(float(value), FLOAT)
    return z3.BitVecVal(int(value), 32)


def formulas_of(function: Any, arguments: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a traced function as formulas of its arguments.

    Args:
        function: a `ConcreteFunction` of scalars without captured variables.
        arguments: a term for each of its inputs.

    Raises:
        NotImplementedError: if the graph has an operation that is not in `OPERATIONS`.
    """
    known = {tensor.ref(): term for tensor, term in zip(function.inputs, arguments, strict=True)}

    def term_of(tensor: tf.Tensor) -> Any:
        if tensor.ref() not in known:
            made = tensor.op
            if made.type == "Const":
                known[tensor.ref()] = constant(tf.make_ndarray(made.get_attr("value")))
            elif made.type in OPERATIONS:
                inputs = [term_of(each) for each in made.inputs]
                known[tensor.ref()] = OPERATIONS[made.type](*inputs)
            else:
                raise NotImplementedError(
                    f"No formula for the operation {made.type} ({made.name}). A rule that is to be "
                    "proved may use only the operations in OPERATIONS. Add it there."
                )
        return known[tensor.ref()]

    return [term_of(tensor) for tensor in function.outputs]
