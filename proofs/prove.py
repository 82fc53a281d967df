"""Asks Z3 whether a claim can fail."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import z3

LIMIT_SECS = 180
# Everything at once as bits, for a solver of clauses: faster than Z3's default for additions.
BITS = ("simplify", "fpa2bv", "simplify", "solve-eqs", "bit-blast", "sat")


class Answer(NamedTuple):
    """What is known of a claim."""

    verdict: str  # "proved", "refuted" or "unknown", which is no proof
    secs: float
    example: dict[str, Any]  # the constants, state and verdict with which the claim fails


def answer(claim: Any, given: Sequence[Any], tactics: Sequence[str] = ()) -> Answer:
    """Searches for constants, a state and a verdict with which a claim fails.

    Args:
        claim: the formula that is claimed.
        given: what holds of the constants and the state.
        tactics: those of Z3 to use, one after another; its own choice if there are none.
    """
    solver = z3.Then(*tactics).solver() if tactics else z3.Solver()
    solver.set("timeout", LIMIT_SECS * 1000)
    solver.add(*given, z3.Not(claim))
    began = time.perf_counter()
    found = solver.check()
    secs = time.perf_counter() - began
    if found == z3.unsat:
        return Answer("proved", secs, {})
    if found == z3.unknown:
        return Answer("unknown", secs, {})
    model = solver.model()
    return Answer("refuted", secs, {str(name): model[name] for name in model.decls()})
