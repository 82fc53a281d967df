"""Evaluates formulas on arrays, to hold a million steps of the real code against them."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import z3


def quotient(one: Any, other: Any) -> Any:
    """Returns the quotient of two ints, rounded toward 0."""
    down = one // other
    return down + ((down < 0) & (down * other != one))


OPERATIONS: dict[int, Callable[..., Any]] = {
    z3.Z3_OP_ITE: np.where,
    z3.Z3_OP_AND: lambda *terms: functools.reduce(np.logical_and, terms),
    z3.Z3_OP_OR: lambda *terms: functools.reduce(np.logical_or, terms),
    z3.Z3_OP_NOT: np.logical_not,
    z3.Z3_OP_EQ: operator.eq,
    z3.Z3_OP_BADD: operator.add,
    z3.Z3_OP_BSUB: operator.sub,
    z3.Z3_OP_BNEG: operator.neg,
    z3.Z3_OP_BMUL: operator.mul,
    z3.Z3_OP_BSMOD: np.mod,
    z3.Z3_OP_BSDIV: quotient,
    z3.Z3_OP_BAND: operator.and_,
    z3.Z3_OP_BSHL: operator.lshift,
    z3.Z3_OP_BASHR: operator.rshift,
    z3.Z3_OP_DISTINCT: operator.ne,
    z3.Z3_OP_SLT: operator.lt,
    z3.Z3_OP_SLEQ: operator.le,
    z3.Z3_OP_SGT: operator.gt,
    z3.Z3_OP_SGEQ: operator.ge,
    z3.Z3_OP_FPA_EQ: operator.eq,
    z3.Z3_OP_FPA_LT: operator.lt,
    z3.Z3_OP_FPA_LE: operator.le,
    z3.Z3_OP_FPA_GT: operator.gt,
    z3.Z3_OP_FPA_GE: operator.ge,
    z3.Z3_OP_FPA_ADD: lambda _, a, b: a + b,
    z3.Z3_OP_FPA_SUB: lambda _, a, b: a - b,
    z3.Z3_OP_FPA_MUL: lambda _, a, b: a * b,
    z3.Z3_OP_FPA_DIV: lambda _, a, b: a / b,
    z3.Z3_OP_FPA_SQRT: lambda _, a: np.sqrt(a),
    z3.Z3_OP_FPA_ROUND_TO_INTEGRAL: lambda _, a: np.floor(a),  # the only rounding of the formulas
    z3.Z3_OP_FPA_NEG: operator.neg,
    z3.Z3_OP_FPA_ABS: np.abs,
    z3.Z3_OP_FPA_IS_NAN: np.isnan,
    z3.Z3_OP_FPA_IS_INF: np.isinf,
    z3.Z3_OP_FPA_TO_IEEE_BV: lambda a: np.asarray(a).view(np.int32),
    z3.Z3_OP_FPA_TO_SBV: lambda _, a: np.asarray(a).astype(np.int32),
    z3.Z3_OP_TRUE: lambda: np.bool_(True),
    z3.Z3_OP_FALSE: lambda: np.bool_(False),
}


def as_float(term: Any, *arguments: Any) -> Any:
    """Returns a number as the float that a term stands for; the bits of one, if they are given."""
    dtype = np.float64 if term.sort() == z3.Float64() else np.float32
    [number] = arguments[-1:]
    return (
        np.asarray(number).view(dtype) if len(arguments) == 1 else np.asarray(number).astype(dtype)
    )


def number(term: Any) -> Any:
    """Returns the value of a constant."""
    if z3.is_bv_value(term):
        return np.int32(term.as_signed_long())
    bits = z3.simplify(z3.fpToIEEEBV(term)).as_long()
    if term.sort() == z3.Float64():
        return np.uint64(bits).view(np.float64)
    return np.uint32(bits).view(np.float32)


def evaluate(
    term: Any,
    values: Mapping[str, np.ndarray],
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> np.ndarray:
    """Returns a formula's values.

    Args:
        term: the formula.
        values: arrays of float32, float64, int32 and bool for its free variables, by name.
        functions: what to call for each function that the formula leaves open.

    Raises:
        NotImplementedError: for an operation that is not in `OPERATIONS`.
    """
    known: dict[int, Any] = {}
    opened = dict(functions or {})

    def value_of(each: Any) -> Any:
        if each.get_id() not in known:
            arguments = [value_of(child) for child in each.children()]
            known[each.get_id()] = computed(each, arguments)
        return known[each.get_id()]

    def computed(each: Any, arguments: Sequence[Any]) -> Any:
        if z3.is_bv_value(each) or z3.is_fp_value(each):
            return number(each)
        if isinstance(each, z3.FPRMRef):
            return None
        kind, name = each.decl().kind(), each.decl().name()
        if kind == z3.Z3_OP_UNINTERPRETED:
            return opened[name](*arguments) if arguments else values[name]
        if kind == z3.Z3_OP_FPA_TO_FP:
            return as_float(each, *arguments)
        if kind not in OPERATIONS:
            raise NotImplementedError(f"No arrays for {name}; add it to OPERATIONS.")
        return OPERATIONS[kind](*arguments)

    # As in the rule: a product may be inf before it is clipped, and what is not selected anything.
    with np.errstate(all="ignore"):
        return value_of(term)
