"""`HeadroomLossScale`: one step as formulas, and the claims."""

from collections.abc import Mapping
from typing import Any

import z3

from proofs import transition as shared
from proofs.formulas import FLOAT, ROUNDING, is_finite
from proofs.source import Change, loaded
from proofs.transition import LARGEST_COUNT, Transition, between, in_bounds
from scaling.base.number_formats import HALF_BITS, HALF_MAX
from scaling.rules import headroom

CONSTANTS = {
    "limit": "float",  # 65504 / 2^headroom_bits, which Python computes: exact
    "growth_interval": "int",
    "growth_factor": "float",
    "backoff_factor": "float",
    "min_scale": "float",
    "max_scale": "float",
}
STATE = {"loss_scale": "float", "finite_steps": "int", "peak": "float", "found": "bool"}
VARIANTS = (None,)
ZERO, JUMP = z3.FPVal(0.0, FLOAT), 2.0**20


def step_of(_: None = None, change: Change = None) -> Transition:
    """Returns a step of the rule, or of a mutant, as formulas."""
    names, rule = loaded(headroom, change), "HeadroomLossScale"
    limit = {"_max_scaled_magnitude": lambda self: self.limit}
    names[rule] = type(rule, (names[rule],), limit)
    return shared.transition(names, rule, CONSTANTS, STATE)


def given(step: Transition) -> list[Any]:
    """Returns what the constructor demands, and what holds of every possible state and verdict."""
    limits = [HALF_MAX / 2.0**bits for bits in range(HALF_BITS + 1)]
    return [
        *shared.valid_scales(step.constants),
        between(1, step.constants["growth_interval"], LARGEST_COUNT),
        z3.Or(*(step.constants["limit"] == z3.FPVal(limit, FLOAT) for limit in limits)),
        *possible(step.state),
        z3.Not(z3.fpIsNegative(step.magnitude)),  # it may be inf or NaN
    ]


def possible(state: Mapping[str, Any]) -> list[Any]:
    """Returns what holds of every state that a rule with any valid constants can leave behind."""
    return [
        shared.power_of_two(state["loss_scale"]),
        between(0, state["finite_steps"], LARGEST_COUNT),
        state["peak"] >= ZERO,
        is_finite(state["peak"]),
    ]


def measured(step: Transition) -> Any:
    """Returns whether a step was finite, with a magnitude that a finite step can have."""
    return z3.And(step.finite, is_finite(step.magnitude))


def bounded(step: Transition) -> Any:
    """L3: see `transition.bounded`; a step that contradicts itself does not move the state."""
    return z3.Implies(z3.Or(step.overflowed, is_finite(step.magnitude)), shared.bounded(step))


def contradiction_moves_nothing(step: Transition) -> Any:
    """A finite step whose largest magnitude is inf or NaN moves no bit."""
    stays = shared.all_equal([*step.after.values()], [*step.state.values()])
    return z3.Implies(z3.And(step.finite, z3.Not(is_finite(step.magnitude))), stays)


def searches(step: Transition) -> Any:
    """Until a gradient is found, an overflow divides the scale by 2^20, zeros multiply it."""
    scale, after, named = step.state["loss_scale"], step.after["loss_scale"], step.constants
    down = shared.lowered(scale, z3.FPVal(1 / JUMP, FLOAT), named["min_scale"])
    up = shared.raised(scale, z3.FPVal(JUMP, FLOAT), named["max_scale"])
    zeros = z3.And(measured(step), z3.fpIsZero(step.magnitude))
    goes_on = z3.Not(step.after["found"])
    moved = z3.And(
        z3.Implies(step.overflowed, z3.And(after == down, goes_on)),
        z3.Implies(zeros, z3.And(after == up, goes_on)),
    )
    return z3.Implies(z3.And(in_bounds(step), z3.Not(step.state["found"])), moved)


def finds_the_largest_that_fits(step: Transition) -> Any:
    """The first gradient that is not 0 ends the search at the largest power of two, within the
    bounds, at which it leaves the headroom.
    """
    after, named, size = step.after["loss_scale"], step.constants, step.magnitude
    first = z3.And(measured(step), z3.fpIsNormal(size), z3.Not(step.state["found"]))
    scaled = z3.fpMul(ROUNDING, size, after)
    twice = z3.fpMul(ROUNDING, size, z3.fpMul(ROUNDING, after, z3.FPVal(2.0, FLOAT)))
    leaves = z3.Or(scaled <= named["limit"], after == named["min_scale"])
    largest = z3.Or(twice > named["limit"], after == named["max_scale"])
    return z3.Implies(first, z3.And(step.after["found"], leaves, largest))


def has_room(step: Transition) -> Any:
    """Returns whether the largest gradient of the interval leaves the headroom after growth."""
    peak = z3.If(step.state["peak"] > step.magnitude, step.state["peak"], step.magnitude)
    grown = z3.fpMul(ROUNDING, peak, step.constants["growth_factor"])
    return grown <= z3.fpDiv(ROUNDING, step.constants["limit"], step.state["loss_scale"])


def grows_only_with_headroom(step: Transition) -> Any:
    """Once the search is over, the scale rises on the finite step that completes the interval, by
    the growth factor or to its bound, if there is headroom; and on no other step.
    """
    scale, named, after = step.state["loss_scale"], step.constants, step.after["loss_scale"]
    due = z3.And(measured(step), step.state["finite_steps"] + 1 >= named["growth_interval"])
    grows = z3.And(due, has_room(step))
    grown = after == shared.raised(scale, named["growth_factor"], named["max_scale"])
    exact = z3.And(z3.Implies(grows, grown), z3.Or(grows, z3.Not(after > scale)))
    return z3.Implies(z3.And(in_bounds(step), step.state["found"]), exact)


def headroom_is_meant(step: Transition) -> Any:
    """Headroom by the rule's division is headroom by multiplication: a gradient within limit /
    scale is, times the scale, within the limit. If the quotient is subnormal, it has lost bits.
    """
    size, scale, limit = step.magnitude, step.state["loss_scale"], step.constants["limit"]
    quotient = z3.fpDiv(ROUNDING, limit, scale)
    scaled = z3.fpMul(ROUNDING, size, scale)
    within = z3.And(size <= quotient, z3.fpIsNormal(quotient))
    return z3.Implies(within, scaled <= limit)


def backs_off_at_once(step: Transition) -> Any:
    """Once the search is over, every overflow lowers the scale, and nothing else does."""
    scale, after, named = step.state["loss_scale"], step.after["loss_scale"], step.constants
    fell = after == shared.lowered(scale, named["backoff_factor"], named["min_scale"])
    exact = z3.And(z3.Implies(step.overflowed, fell), z3.Or(step.overflowed, after >= scale))
    return z3.Implies(z3.And(in_bounds(step), step.state["found"]), exact)


def counts_finite_steps(step: Transition) -> Any:
    """Once the search is over, a finite step counts one and enters the peak; an overflow, and the
    end of an interval, start both again.
    """
    before, after, named = step.state, step.after, step.constants
    early = z3.And(measured(step), before["finite_steps"] + 1 < named["growth_interval"])
    peak = z3.If(before["peak"] > step.magnitude, before["peak"], step.magnitude)
    counted = z3.And(after["finite_steps"] == before["finite_steps"] + 1)
    again = z3.And(after["finite_steps"] == 0, z3.fpIsZero(after["peak"]))
    due = z3.Or(step.overflowed, z3.And(measured(step), z3.Not(early)))
    exact = z3.And(
        z3.Implies(early, z3.And(counted, z3.fpEQ(after["peak"], peak))), z3.Implies(due, again)
    )
    return z3.Implies(before["found"], z3.And(after["found"], exact))


def never_wraps(step: Transition) -> Any:
    """Counters cannot wrap, and the peak stays finite: what holds of every state holds after it."""
    return z3.And(*possible(step.after))


def ends_at_the_bottom(step: Transition) -> Any:
    """L11: overflows in a row reach the smallest scale: each one lowers the scale."""
    above = z3.And(in_bounds(step), step.state["loss_scale"] > step.constants["min_scale"])
    lower = step.after["loss_scale"] < step.state["loss_scale"]
    return z3.Implies(z3.And(step.overflowed, above), lower)


def claims(_: None = None) -> dict[str, Any]:
    """Returns the claims: functions of a step that return a formula."""
    found = (
        bounded,
        shared.unmoved,
        contradiction_moves_nothing,
        searches,
        finds_the_largest_that_fits,
        grows_only_with_headroom,
        headroom_is_meant,
        backs_off_at_once,
        counts_finite_steps,
        never_wraps,
        ends_at_the_bottom,
    )
    return {claim.__name__: claim for claim in found}
