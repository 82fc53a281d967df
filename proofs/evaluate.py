"""Evaluates formulas on arrays, to hold a million steps of the real code against them."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import z3

OPERATIONS: dict[int, Callable[..., Any]] = {
    z3.Z3_OP_ITE: np.where,
    z3.Z3_OP_AND: lambda *terms: functools.reduce(np.logical_and, terms),
    z3.Z3_OP_OR: lambda *terms: functools.reduce(np.logical_or, terms),
    z3.Z3_OP_NOT: np.logical_not,
    z3.Z3_OP_EQ: operator.eq,
    z3.Z3_OP_BADD: operator.add,
    z3.Z3_OP_BSUB: operator.sub,
    z3.Z3_OP_BNEG: operator.neg,
    z3.Z3_OP_SLT: operator.lt,
    z3.Z3_OP_SLEQ: operator.le,
    z3.Z3_OP_SGT: operator.gt,
    z3.Z3_OP_SGEQ: operator.ge,
    z3.Z3_OP_FPA_EQ: operator.eq,
    z3.Z3_OP_FPA_LT: operator.lt,
    z3.Z3_OP_FPA_LE: operator.le,
    z3.Z3_OP_FPA_GT: operator.gt,
    z3.Z3_OP_FPA_GE: operator.ge,
    z3.Z3_OP_FPA_MUL: lambda _, a, b: a * b,
    z3.Z3_OP_TRUE: lambda: np.bool_(True),
    z3.Z3_OP_FALSE: lambda: np.bool_(False),
}


def evaluate(term: Any, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns a formula's values.

    Args:
        term: the formula.
        values: arrays of float32, int32 and bool for its free variables, by name.

    Raises:
        NotImplementedError: for an operation that is not in `OPERATIONS`.
    """
    known: dict[int, Any] = {}

    def value_of(each: Any) -> Any:
        if each.get_id() not in known:
            known[each.get_id()] = computed(each)
        return known[each.get_id()]

    def computed(each: Any) -> Any:
        if z3.is_bv_value(each):
            return np.int32(each.as_signed_long())
        if z3.is_fp_value(each):
            bits = z3.simplify(z3.fpToIEEEBV(each)).as_long()
            return np.uint32(bits).view(np.float32)
        if z3.is_const(each) and each.decl().kind() == z3.Z3_OP_UNINTERPRETED:
            return values[each.decl().name()]
        if isinstance(each, z3.FPRMRef):
            return None
        if each.decl().kind() not in OPERATIONS:
            raise NotImplementedError(f"No arrays for {each.decl().name()}; add it to OPERATIONS.")
        return OPERATIONS[each.decl().kind()](*(value_of(child) for child in each.children()))

    with np.errstate(over="ignore"):  # as in the rule: the product may be inf before it is clipped
        return value_of(term)
