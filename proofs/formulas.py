"""Turns a traced graph into formulas, bit for bit: the code that trains is what is proved.

A float32 tensor becomes a floating-point term, an int32 tensor a bit vector of 32 (which wraps, as
int32 does), a bool a Boolean; a vector becomes an array of terms. Operations that no rule uses yet
raise an error.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import z3

FLOAT = z3.Float32()
DOUBLE = z3.Float64()
ROUNDING = z3.RNE()  # to nearest, ties to even, as processors round

Operation = Callable[..., Any]


def is_float(term: Any) -> bool:
    """Returns whether a term is a floating-point number."""
    return isinstance(term, z3.FPRef)


def either(floats: Operation, ints: Operation) -> Operation:
    """Returns a function that computes with floats or with ints, as its arguments are."""
    return lambda *terms: (floats if is_float(terms[0]) else ints)(*terms)


def equal(one: Any, other: Any) -> Any:
    """Returns whether two terms are equal, as TensorFlow compares: 0 and -0 are."""
    return z3.fpEQ(one, other) if is_float(one) else one == other


def is_nan(term: Any) -> Any:
    """Returns whether a term is NaN; an int never is."""
    return z3.fpIsNaN(term) if is_float(term) else z3.BoolVal(False)


def is_finite(term: Any) -> Any:
    """Returns whether a float is neither inf nor NaN."""
    return z3.Not(z3.Or(z3.fpIsNaN(term), z3.fpIsInf(term)))


def smaller(one: Any, other: Any) -> Any:
    """Returns the minimum; NaN if either is NaN, as TensorFlow does on a CPU."""
    return z3.If(is_nan(one), one, z3.If(is_nan(other), other, z3.If(one < other, one, other)))


def larger(one: Any, other: Any) -> Any:
    """Returns the maximum; NaN if either is NaN, as TensorFlow does on a CPU."""
    return z3.If(is_nan(one), one, z3.If(is_nan(other), other, z3.If(one > other, one, other)))


def floor_quotient(one: Any, other: Any) -> Any:
    """Returns the quotient of two ints, rounded down."""
    uneven = z3.And(one % other != 0, (one < 0) != (other < 0))  # `%` has the divisor's sign
    return z3.If(uneven, one / other - 1, one / other)


def opaque(name: str) -> Operation:
    """Returns an operation of which a formula knows nothing but that it is a function."""
    return lambda term: z3.Function(name, term.sort(), term.sort())(term)


OPERATIONS: dict[str, Operation] = {
    "Abs": z3.fpAbs,
    "AddV2": either(lambda a, b: z3.fpAdd(ROUNDING, a, b), operator.add),
    "Sub": either(lambda a, b: z3.fpSub(ROUNDING, a, b), operator.sub),
    "Mul": either(lambda a, b: z3.fpMul(ROUNDING, a, b), operator.mul),
    "RealDiv": lambda a, b: z3.fpDiv(ROUNDING, a, b),
    "FloorDiv": floor_quotient,
    "FloorMod": operator.mod,
    "Neg": operator.neg,
    "Square": lambda a: z3.fpMul(ROUNDING, a, a),
    "Sqrt": lambda a: z3.fpSqrt(ROUNDING, a),
    "Floor": lambda a: z3.fpRoundToIntegral(z3.RTN(), a),
    "Log": opaque("Log"),
    "Minimum": smaller,
    "Maximum": larger,
    "Less": operator.lt,
    "LessEqual": operator.le,
    "Greater": operator.gt,
    "GreaterEqual": operator.ge,
    "Equal": equal,
    "NotEqual": lambda a, b: z3.Not(equal(a, b)),
    "IsFinite": is_finite,
    "LogicalAnd": z3.And,
    "LogicalOr": z3.Or,
    "LogicalNot": z3.Not,
    "SelectV2": z3.If,
    "Identity": lambda a: a,
    "BitwiseAnd": operator.and_,
    "LeftShift": operator.lshift,
    "RightShift": operator.rshift,  # of int32: the sign is kept
    # A vector of one element each: a sum over replicas or variables is one of these after another.
    "L2Loss": lambda a: z3.fpMul(ROUNDING, z3.fpMul(ROUNDING, a, a), z3.FPVal(0.5, FLOAT)),
}


def cast(term: Any, dtype: tf.DType) -> Any:
    """Returns a term as another dtype, as `tf.cast` does, for floats within int32's range."""
    if dtype == tf.int32:
        if isinstance(term, z3.BoolRef):
            return z3.If(term, z3.BitVecVal(1, 32), z3.BitVecVal(0, 32))
        return z3.fpToSBV(z3.RTZ(), term, z3.BitVecSort(32)) if is_float(term) else term
    sort = {tf.float32: FLOAT, tf.float64: DOUBLE}[dtype]
    return (z3.fpFPToFP if is_float(term) else z3.fpSignedToFP)(ROUNDING, term, sort)


def bitcast(term: Any, dtype: tf.DType) -> Any:
    """Returns the bits of a float as an int, or the float that has the bits of an int."""
    return z3.fpBVToFP(term, FLOAT) if dtype == tf.float32 else z3.fpToIEEEBV(term)


def sliced(made: tf.Operation, term: Any) -> Any:
    """Returns a part of a vector, or a vector of one term."""
    begin, end, stride = (tf.get_static_value(each) for each in made.inputs[1:])
    if made.get_attr("new_axis_mask"):
        return np.array([term], object)
    if made.get_attr("shrink_axis_mask"):
        return term[int(begin[0])]
    return term[
        slice(
            None if made.get_attr("begin_mask") else int(begin[0]),
            None if made.get_attr("end_mask") else int(end[0]),
            int(stride[0]),
        )
    ]


def reduced(operation: Operation, terms: Sequence[Any]) -> Any:
    """Returns terms joined by an operation, from the first to the last."""
    first, *others = terms
    for other in others:
        first = operation(first, other)
    return first


# Operations with attributes, and of vectors: functions of the operation and its inputs.
OF_VECTORS: dict[str, Operation] = {
    "AddN": lambda _, inputs: reduced(OPERATIONS["AddV2"], inputs),
    "Bitcast": lambda made, inputs: bitcast(inputs[0], made.outputs[0].dtype),
    "Cast": lambda made, inputs: cast(inputs[0], made.outputs[0].dtype),
    "ConcatV2": lambda _, inputs: np.concatenate(inputs[:-1]),
    "Max": lambda _, inputs: reduced(larger, inputs[0]),  # over the only axis
    "StridedSlice": lambda made, inputs: sliced(made, inputs[0]),
}


def constant(value: Any) -> Any:
    """Returns a scalar or vector from a graph as a term or an array of terms."""
    if value.shape:
        return np.array([constant(each) for each in value], object)
    if value.dtype == bool:
        return z3.BoolVal(bool(value))
    if value.dtype.kind == "f":
        return z3.FPVal(float(value), DOUBLE if value.dtype == np.float64 else FLOAT)
    return z3.BitVecVal(int(value), 32)


def formulas_of(
    function: Any, arguments: Sequence[Any], instead: Mapping[str, Operation] | None = None
) -> list[Any]:
    """Returns the outputs of a traced function as formulas of its arguments.

    Args:
        function: a `ConcreteFunction` of scalars and vectors without captured variables.
        arguments: a term, or an array of terms, for each of its inputs.
        instead: operations to use in place of those in `OPERATIONS`; for instance an `opaque` one,
            for what is to be proved whatever it returns.

    Raises:
        NotImplementedError: if the graph has an operation that is not in `OPERATIONS`.
    """
    known = {tensor.ref(): term for tensor, term in zip(function.inputs, arguments, strict=True)}
    operations = OPERATIONS | dict(instead or {})

    def term_of(tensor: tf.Tensor) -> Any:
        if tensor.ref() not in known:
            known[tensor.ref()] = computed(tensor.op)
        return known[tensor.ref()]

    def computed(made: tf.Operation) -> Any:
        if made.type == "Const":
            return constant(tf.make_ndarray(made.get_attr("value")))
        inputs = [term_of(each) for each in made.inputs]
        if made.type in OF_VECTORS:
            return OF_VECTORS[made.type](made, inputs)
        if made.type not in operations:
            raise NotImplementedError(
                f"No formula for the operation {made.type} ({made.name}). A rule that is to be "
                "proved may use only the operations in OPERATIONS. Add it there."
            )
        return elementwise(operations[made.type], inputs)

    return [term_of(tensor) for tensor in function.outputs]


def elementwise(operation: Operation, inputs: Sequence[Any]) -> Any:
    """Returns an operation's value; for vectors, of each element."""
    if not any(isinstance(each, np.ndarray) for each in inputs):
        return operation(*inputs)
    return np.array([operation(*each) for each in np.broadcast(*inputs)], object)
