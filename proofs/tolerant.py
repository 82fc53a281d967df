"""`TolerantLossScale`: one step as formulas, and the claims.

The fraction of overflows is a float64 quotient, which costs a solver minutes. The claims are proved
for whatever a correctly rounded quotient can be: see `quotients`.
"""

from collections.abc import Mapping
from typing import Any

import z3

from proofs import transition as shared
from proofs.formulas import DOUBLE, FLOAT, ROUNDING
from proofs.source import Change, loaded
from proofs.transition import LARGEST_COUNT, Transition, between, in_bounds
from scaling.rules import tolerant

CONSTANTS = {
    "growth_interval": "int",
    "growth_factor": "float",
    "backoff_factor": "float",
    "min_scale": "float",
    "max_scale": "float",
    "tolerance": "double",
}
STATE = {
    "loss_scale": "float",
    "finite_steps": "int",
    "steps": "int",
    "overflows": "int",
    "growth_interval": "int",
}
VARIANTS = (False, True)  # `scale_interval`
SHARE = z3.Function("share", DOUBLE, DOUBLE, DOUBLE)


def quotient(one: Any, other: Any) -> Any:
    """Returns a quotient: in float64 any function of the two numbers, in float32 the exact one."""
    return SHARE(one, other) if one.sort() == DOUBLE else z3.fpDiv(ROUNDING, one, other)


def step_of(scale_interval: bool, change: Change = None, *, exact: bool = False) -> Transition:
    """Returns a step of the rule as formulas.

    Args:
        scale_interval: the attribute, which the code branches on.
        change: see `source.loaded`.
        exact: whether the fraction of overflows is the quotient itself, to be computed.
    """
    step = shared.transition(
        loaded(tolerant, change),
        "TolerantLossScale",
        CONSTANTS,
        STATE,
        {"scale_interval": scale_interval},
        {} if exact else {"RealDiv": quotient},
    )
    return step._replace(variant=scale_interval)


def overflows(step: Transition) -> Any:
    """Returns the number of overflows, with that of this step."""
    return step.state["overflows"] + z3.If(step.overflowed, z3.BitVecVal(1, 32), 0)


def steps(step: Transition) -> Any:
    """Returns the number of steps since the scale moved, with this one, as far as it is counted."""
    before = step.state["steps"]
    return z3.If(before < LARGEST_COUNT, before + 1, LARGEST_COUNT)


def share(step: Transition) -> Any:
    """Returns the fraction of steps that overflowed."""
    counts = overflows(step), steps(step)
    return SHARE(*(z3.fpSignedToFP(z3.RNE(), each, DOUBLE) for each in counts))


def bits_of_factor(factor: Any) -> Any:
    """Returns the logarithm of a power of two of at least 1, at most 30."""
    exponent = z3.ZeroExt(24, z3.Extract(30, 23, z3.fpToIEEEBV(factor))) - 127
    return z3.If(exponent < 30, exponent, 30)


def interval(step: Transition) -> Any:
    """Returns the growth interval of the step."""
    return (step.state if step.variant else step.constants)["growth_interval"]


def quotients(step: Transition) -> list[Any]:
    """Returns what holds of a correctly rounded quotient of counts that are not negative.

    Rounding is monotonic and 0 and 1 are float64 numbers: so a quotient of at least 1 is rounded to
    at least 1, and no quotient below 0. The denominator is at least 1, so there is no NaN.
    """
    one, zero = z3.FPVal(1.0, DOUBLE), z3.FPVal(0.0, DOUBLE)
    return [share(step) >= zero, z3.Implies(overflows(step) >= steps(step), share(step) >= one)]


def given(step: Transition) -> list[Any]:
    """Returns what the constructor demands, what holds of every possible state, and `quotients`."""
    return [*valid_constants(step), *possible(step.state), *quotients(step)]


def valid_constants(step: Transition) -> list[Any]:
    """Returns what the constructor demands of the constants."""
    named = step.constants
    return [
        *shared.valid_scales(named),
        between(1, named["growth_interval"], LARGEST_COUNT),
        named["tolerance"] >= z3.FPVal(0.0, DOUBLE),
        named["tolerance"] < z3.FPVal(1.0, DOUBLE),
    ]


def possible(state: Mapping[str, Any]) -> list[Any]:
    """Returns what holds of every state that a rule with any valid constants can leave behind."""
    counts = [state[name] for name in ("finite_steps", "steps", "overflows")]
    return [
        shared.power_of_two(state["loss_scale"]),
        *(between(0, each, LARGEST_COUNT) for each in counts),
        between(1, state["growth_interval"], LARGEST_COUNT),
    ]


def due(step: Transition) -> tuple[Any, Any]:
    """Returns whether the scale must rise in a step, and whether it must fall."""
    phase = (step.state["finite_steps"] + 1) % interval(step)
    falls = z3.And(step.overflowed, share(step) >= step.constants["tolerance"])
    return z3.And(step.finite, phase == 0), falls


def grows_on_time(step: Transition) -> Any:
    """L4: the scale rises on every `growth_interval`-th finite step since an overflow only."""
    scale, after, named = step.state["loss_scale"], step.after["loss_scale"], step.constants
    grows, _ = due(step)
    grew = after == shared.raised(scale, named["growth_factor"], named["max_scale"])
    exact = z3.And(z3.Implies(grows, grew), z3.Or(grows, z3.Not(after > scale)))
    return z3.Implies(in_bounds(step), exact)


def backs_off_when_due(step: Transition) -> Any:
    """L4: the scale falls on an overflow that reaches the tolerance, and on no other step."""
    scale, after, named = step.state["loss_scale"], step.after["loss_scale"], step.constants
    _, falls = due(step)
    fell = after == shared.lowered(scale, named["backoff_factor"], named["min_scale"])
    exact = z3.And(z3.Implies(falls, fell), z3.Or(falls, z3.Not(after < scale)))
    return z3.Implies(in_bounds(step), exact)


def counts_steps(step: Transition) -> Any:
    """L4: what is counted, and what starts a count again."""
    grows, falls = due(step)
    after, moves = step.after, step.moves
    counted = z3.If(z3.Or(grows, falls), 0, steps(step))
    early = z3.And(step.finite, step.state["finite_steps"] + 1 < LARGEST_COUNT)
    return z3.And(
        z3.Implies(step.overflowed, after["finite_steps"] == 0),
        z3.Implies(early, after["finite_steps"] == step.state["finite_steps"] + 1),
        z3.Implies(moves, after["steps"] == counted),
        z3.Implies(moves, after["overflows"] == z3.If(falls, 0, overflows(step))),
    )


def keeps_the_phase(step: Transition) -> Any:
    """A count that is held below 2^30 goes on at the same place in the interval."""
    every = interval(step)
    before, after = step.state["finite_steps"] + 1, step.after["finite_steps"]
    kept = z3.Or(after == before, after == before % every)
    return z3.Implies(step.finite, kept)


def moves_the_interval(step: Transition) -> Any:
    """With `scale_interval`, the interval is multiplied and divided by the factors, from 1 to
    2^30; otherwise it stays.
    """
    grows, falls = due(step)
    before, after, named = step.state["growth_interval"], step.after, step.constants
    if not step.variant:
        return after["growth_interval"] == before
    up = bits_of_factor(named["growth_factor"])
    down = bits_of_factor(z3.fpDiv(ROUNDING, z3.FPVal(1.0, FLOAT), named["backoff_factor"]))
    longer = z3.If(before <= z3.BitVecVal(LARGEST_COUNT, 32) >> up, before << up, LARGEST_COUNT)
    shorter = z3.If(before >> down >= 1, before >> down, 1)
    moved = z3.If(grows, after["growth_interval"] == longer, after["growth_interval"] == before)
    return z3.If(falls, after["growth_interval"] == shorter, moved)


def zero_tolerates_nothing(step: Transition) -> Any:
    """With a tolerance of 0, the scale falls at every overflow, to its lower bound."""
    scale, after, named = step.state["loss_scale"], step.after["loss_scale"], step.constants
    strict = z3.And(step.overflowed, z3.fpIsZero(named["tolerance"]), in_bounds(step))
    return z3.Implies(strict, z3.Or(after < scale, after == named["min_scale"]))


def never_wraps(step: Transition) -> Any:
    """Counters cannot wrap: what holds of every possible state holds after the step, too."""
    return z3.And(*possible(step.after))


def ends_at_the_bottom(step: Transition) -> Any:
    """L11: overflows in a row reach the smallest scale, also from far within the tolerance:
    each one lowers the scale, or raises a count of overflows that cannot exceed 2^30.
    """
    scale, after = step.state["loss_scale"], step.after
    counted = after["overflows"] == step.state["overflows"] + 1
    nearer = z3.And(after["loss_scale"] == scale, counted, after["overflows"] <= LARGEST_COUNT)
    above = z3.And(in_bounds(step), scale > step.constants["min_scale"])
    lower = z3.Or(after["loss_scale"] < scale, nearer)
    return z3.Implies(z3.And(step.overflowed, above), lower)


def claims(_: bool) -> dict[str, Any]:
    """Returns the claims: functions of a step that return a formula."""
    found = (
        shared.bounded,
        shared.unmoved,
        grows_on_time,
        backs_off_when_due,
        counts_steps,
        keeps_the_phase,
        moves_the_interval,
        zero_tolerates_nothing,
        never_wraps,
        ends_at_the_bottom,
    )
    return {claim.__name__: claim for claim in found}
