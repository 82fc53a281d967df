"""Asks Z3 whether a claim can fail."""

import time
from typing import Any, NamedTuple

import z3

from proofs.claims import Claim
from proofs.dynamic import Step, possible, valid_constants

LIMIT_SECS = 60


class Answer(NamedTuple):
    """What is known of a claim."""

    verdict: str  # "proved", "refuted" or "unknown", which is no proof
    secs: float
    example: dict[str, Any]  # the constants, state and verdict with which the claim fails


def answer(claim: Claim, step: Step) -> Answer:
    """Searches for constants, a state and a verdict with which a claim fails."""
    solver = z3.Solver()
    solver.set("timeout", LIMIT_SECS * 1000)
    solver.add(*valid_constants(step), *possible(step.state), z3.Not(claim(step)))
    began = time.perf_counter()
    found = solver.check()
    secs = time.perf_counter() - began
    if found == z3.unsat:
        return Answer("proved", secs, {})
    if found == z3.unknown:
        return Answer("unknown", secs, {})
    model = solver.model()
    return Answer("refuted", secs, {str(name): model[name] for name in model.decls()})
