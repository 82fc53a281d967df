"""What is claimed of `DynamicLossScale`, each as a formula that must hold for every step."""

from collections.abc import Callable
from typing import Any

import z3

from proofs.dynamic import Step, in_bounds, interval, possible
from proofs.transition import all_equal, power_of_two

Claim = Callable[[Step], Any]


def bounded(step: Step) -> Any:
    """L3: after a step that moves the state, the scale is a power of two within the bounds, from
    whatever state: one that was saved under other constants is pulled in by the first step.
    """
    moves = z3.Or(step.finite, step.overflowed)
    after = z3.And(power_of_two(step.after["loss_scale"]), in_bounds(step, step.after))
    return z3.Implies(moves, after)


def unmoved(step: Step) -> Any:
    """What no scale cures moves nothing: every bit of the state stays."""
    stays = all_equal([*step.after.values()], [*step.state.values()])
    return z3.Implies(z3.Not(z3.Or(step.finite, step.overflowed)), stays)


def grows_on_time(step: Step) -> Any:
    """L4: the scale is multiplied by the growth factor, up to its bound, on the finite step that
    completes the interval, and the count starts again; on no other step does it rise.
    """
    scale, after, named = step.state["loss_scale"], step.after, step.constants
    due = z3.And(step.finite, step.state["finite_steps"] + 1 >= interval(step))
    raised, high = z3.fpMul(z3.RNE(), scale, named["growth_factor"]), named["max_scale"]
    grown = z3.If(raised <= high, after["loss_scale"] == raised, after["loss_scale"] == high)
    grew = z3.And(grown, after["finite_steps"] == 0)
    rises = after["loss_scale"] > scale
    return z3.Implies(
        in_bounds(step, step.state), z3.And(z3.Implies(due, grew), z3.Or(due, z3.Not(rises)))
    )


def counts_finite_steps(step: Step) -> Any:
    """L4: a finite step that does not complete the interval counts one; an overflow starts the
    count again, before the grace steps.
    """
    after, before = step.after["finite_steps"], step.state["finite_steps"]
    early = z3.And(step.finite, before + 1 < interval(step))
    return z3.And(
        z3.Implies(early, after == before + 1),
        z3.Implies(step.overflowed, after == -step.constants["grace_steps"]),
    )


def backs_off_when_due(step: Step) -> Any:
    """L4: the scale is multiplied by the backoff factor, down to its bound, on the overflow that
    uses up the hysteresis and on every later one; on no other step does it fall.
    """
    scale, after, named = step.state["loss_scale"], step.after, step.constants
    due = z3.And(step.overflowed, left_of(step) <= 1)
    lowered = z3.fpMul(z3.RNE(), scale, named["backoff_factor"])
    low = named["min_scale"]
    fell = z3.If(lowered >= low, after["loss_scale"] == lowered, after["loss_scale"] == low)
    falls = after["loss_scale"] < scale
    return z3.Implies(
        in_bounds(step, step.state), z3.And(z3.Implies(due, fell), z3.Or(due, z3.Not(falls)))
    )


def refills(step: Step) -> Any:
    """L4: what refills the hysteresis does so; an overflow uses up one; nothing else changes it."""
    left, after = left_of(step), step.after["overflows_left"]
    due = z3.And(step.finite, step.state["finite_steps"] + 1 >= interval(step))
    refilled = step.finite if step.refill == "finite_step" else due
    used = z3.If(left >= 1, left - 1, 0)
    return z3.And(
        z3.Implies(refilled, after == step.constants["hysteresis"]),
        z3.Implies(step.overflowed, after == used),
        z3.Implies(z3.And(step.finite, z3.Not(refilled)), after == left),
    )


def never_wraps(step: Step) -> Any:
    """Counters cannot wrap: what holds of every possible state holds after the step, too."""
    return z3.And(*possible(step.after))


def ends_at_the_bottom(step: Step) -> Any:
    """L11: overflows in a row reach the smallest scale. Each one lowers the pair (scale, overflows
    left) in lexicographic order, until the scale is `min_scale`.
    """
    scale, after = step.state["loss_scale"], step.after
    lower = z3.Or(
        after["loss_scale"] < scale,
        z3.And(after["loss_scale"] == scale, after["overflows_left"] < left_of(step)),
    )
    above = z3.And(in_bounds(step, step.state), scale > step.constants["min_scale"])
    return z3.Implies(z3.And(step.overflowed, above), lower)


def left_of(step: Step) -> Any:
    """Returns the overflows left before the step, at most the hysteresis."""
    left, most = step.state["overflows_left"], step.constants["hysteresis"]
    return z3.If(left < most, left, most)


CLAIMS: dict[str, Claim] = {
    claim.__name__: claim
    for claim in (
        bounded,
        unmoved,
        grows_on_time,
        counts_finite_steps,
        backs_off_when_due,
        refills,
        never_wraps,
        ends_at_the_bottom,
    )
}
