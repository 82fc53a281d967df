"""One step of a rule as formulas: what all rules have in common."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
import z3

import scaling
from proofs.formulas import DOUBLE, FLOAT, Operation, formulas_of

LARGEST_COUNT = 2**30  # of the constants that count
KINDS = {
    "float": (tf.float32, lambda name: z3.FP(name, FLOAT)),
    "double": (tf.float64, lambda name: z3.FP(name, DOUBLE)),
    "int": (tf.int32, lambda name: z3.BitVec(name, 32)),
    "bool": (tf.bool, z3.Bool),
}


class Cut(NamedTuple):
    """An operation that the proofs leave open: its value is a variable of its own."""

    name: str
    terms: Sequence[Any]
    value: Any


class Transition(NamedTuple):
    """One step of a rule: any constants, any state, any verdict."""

    constants: dict[str, Any]
    state: dict[str, Any]
    finite: Any
    cause: Any
    magnitude: Any  # `Verdict.max_magnitude`
    after: dict[str, Any]  # the state after the step, as formulas of all of the above
    cuts: Sequence[Cut] = ()
    variant: Any = None  # an attribute that the code branches on

    @property
    def overflowed(self) -> Any:
        """Whether the step was not finite and a smaller scale may help."""
        return overflowed(self.finite, self.cause)

    @property
    def moves(self) -> Any:
        """Whether the step may change the state: a finite one, or an overflow."""
        return z3.Or(self.finite, self.overflowed)


def overflowed(finite: Any, cause: Any) -> Any:
    """Returns whether a step was not finite and a smaller scale may help."""
    causes = [int(scaling.Cause.BACKWARD), int(scaling.Cause.REDUCTION)]
    return z3.And(z3.Not(finite), z3.Or(*(cause == each for each in causes)))


def free(kinds: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """Returns a free variable of each name's kind, whose own name begins with `prefix`."""
    return {name: KINDS[kind][1](prefix + name) for name, kind in kinds.items()}


def specs(kinds: Mapping[str, str]) -> dict[str, tf.TensorSpec]:
    """Returns the specs of scalar tensors of each name's kind."""
    return {name: tf.TensorSpec([], KINDS[kind][0]) for name, kind in kinds.items()}


def transition(
    names: Mapping[str, Any],
    rule: str,
    constants: Mapping[str, str],
    state: Mapping[str, str],
    fixed: Mapping[str, Any] | None = None,
    instead: Mapping[str, Operation] | None = None,
) -> Transition:
    """Returns a step of a rule as formulas.

    Args:
        names: what the rule's module defines; of a mutant, what `source.loaded` returns.
        rule: the class's name; that of its state ends in State.
        constants: the kind of each attribute that the proofs leave open.
        state: the kind of each field of the state.
        fixed: attributes that the code branches on, or functions of the constants that return them.
        instead: see `formulas_of`.
    """

    def run(given: Any, before: Any, finite: Any, cause: Any, magnitude: Any) -> Any:
        made = object.__new__(names[rule])  # unchecked: its constants are tensors
        chosen = {
            name: value(given) if callable(value) else value
            for name, value in (fixed or {}).items()
        }
        for name, value in (given | chosen).items():
            object.__setattr__(made, name, value)
        verdict = scaling.Verdict(finite, cause, magnitude)
        moved = made.advance(names[f"{rule}State"](**before), verdict)
        return [getattr(moved, name) for name in state]

    verdict = {"grads_finite": "bool", "cause": "int", "magnitude": "float"}
    function = tf.function(run, autograph=False).get_concrete_function(
        specs(constants), specs(state), *specs(verdict).values()
    )
    named, before, others = free(constants), free(state, "state."), free(verdict)
    arguments = tf.nest.flatten([named, before, [*others.values()]])
    after = formulas_of(function, arguments, instead)
    return Transition(named, before, *others.values(), dict(zip(state, after, strict=True)))


def power_of_two(term: Any) -> Any:
    """Returns whether a float is a power of two from 2^-126 to 2^126."""
    bits = z3.fpToIEEEBV(term)
    exponent = z3.Extract(30, 23, bits)
    plain = z3.And(z3.Extract(31, 31, bits) == 0, z3.Extract(22, 0, bits) == 0)
    return z3.And(plain, z3.UGE(exponent, 1), z3.ULE(exponent, 253))


def between(low: Any, term: Any, high: Any) -> Any:
    """Returns whether a term is within bounds; ints are compared with their sign."""
    return z3.And(low <= term, term <= high)


def bounded(step: Transition) -> Any:
    """L3: after a step that moves the state, the scale is a power of two within the bounds, from
    whatever state: one that was saved under other constants is pulled in by the first step.
    """
    after, named = step.after["loss_scale"], step.constants
    inside = between(named["min_scale"], after, named["max_scale"])
    return z3.Implies(step.moves, z3.And(power_of_two(after), inside))


def unmoved(step: Transition) -> Any:
    """What no scale cures moves nothing: every bit of the state stays."""
    return z3.Implies(z3.Not(step.moves), all_equal([*step.after.values()], [*step.state.values()]))


def in_bounds(step: Transition) -> Any:
    """Returns whether the scale before the step is within the rule's bounds."""
    named = step.constants
    return between(named["min_scale"], step.state["loss_scale"], named["max_scale"])


def all_equal(one: Sequence[Any], other: Sequence[Any]) -> Any:
    """Returns whether all terms are equal, bit for bit."""
    return z3.And(*(a == b for a, b in zip(one, other, strict=True)))


def valid_scales(constants: Mapping[str, Any]) -> list[Any]:
    """Returns what every constructor demands of bounds and factors."""
    one = z3.FPVal(1.0, FLOAT)
    demands = [constants["min_scale"] <= constants["max_scale"]]
    if "growth_factor" in constants:
        demands += [constants["growth_factor"] > one, constants["backoff_factor"] < one]
    named = ("min_scale", "max_scale", "growth_factor", "backoff_factor")
    return [*demands, *(power_of_two(constants[name]) for name in named if name in constants)]


def raised(scale: Any, factor: Any, high: Any) -> Any:
    """Returns a scale times a growth factor, at most its upper bound."""
    product = z3.fpMul(z3.RNE(), scale, factor)
    return z3.If(product <= high, product, high)


def lowered(scale: Any, factor: Any, low: Any) -> Any:
    """Returns a scale times a backoff factor, at least its lower bound."""
    product = z3.fpMul(z3.RNE(), scale, factor)
    return z3.If(product >= low, product, low)
