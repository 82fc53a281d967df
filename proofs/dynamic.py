"""`DynamicLossScale`: one step as formulas, and the claims."""

import itertools
from collections.abc import Mapping
from typing import Any

import z3

from proofs import transition as shared
from proofs.source import Change, loaded
from proofs.transition import LARGEST_COUNT, Transition, between, in_bounds, power_of_two
from scaling.rules import dynamic

CONSTANTS = {
    "growth_interval": "int",
    "growth_factor": "float",
    "backoff_factor": "float",
    "min_scale": "float",
    "max_scale": "float",
    "hysteresis": "int",
    "grace_steps": "int",
}
STATE = {"loss_scale": "float", "finite_steps": "int", "overflows_left": "int"}
# `hysteresis_refill`, and the length of `low_scale_intervals`
VARIANTS = tuple(itertools.product(("growth", "finite_step"), (0, 2)))


def step_of(variant: tuple[str, int], change: Change = None) -> Transition:
    """Returns a step of the rule as formulas.

    Args:
        variant: `hysteresis_refill`, and the length of `low_scale_intervals`. The code branches on
            both.
        change: see `source.loaded`.
    """
    refill, pairs = variant
    kinds = dict(CONSTANTS)
    for at in range(pairs):
        kinds |= {f"scale_{at}": "float", f"interval_{at}": "int"}
    fixed = {"hysteresis_refill": refill, "low_scale_intervals": lambda given: low(given, pairs)}
    step = shared.transition(loaded(dynamic, change), "DynamicLossScale", kinds, STATE, fixed)
    return step._replace(variant=variant)


def low(constants: Mapping[str, Any], pairs: int) -> tuple[tuple[Any, Any], ...]:
    """Returns `low_scale_intervals`."""
    return tuple((constants[f"scale_{at}"], constants[f"interval_{at}"]) for at in range(pairs))


def given(step: Transition) -> list[Any]:
    """Returns what the constructor demands, and what holds of every possible state."""
    return [*valid_constants(step), *possible(step.state)]


def valid_constants(step: Transition) -> list[Any]:
    """Returns what the constructor demands of the constants."""
    named, pairs = step.constants, low(step.constants, step.variant[1])
    counts = [named["growth_interval"], named["hysteresis"], *(count for _, count in pairs)]
    return [
        *shared.valid_scales(named),
        *(power_of_two(scale) for scale, _ in pairs),
        *(between(1, count, LARGEST_COUNT) for count in counts),
        between(0, named["grace_steps"], LARGEST_COUNT),
    ]


def possible(state: Mapping[str, Any]) -> list[Any]:
    """Returns what holds of every state that a rule with any valid constants can leave behind."""
    return [
        power_of_two(state["loss_scale"]),
        between(-LARGEST_COUNT, state["finite_steps"], LARGEST_COUNT),
        between(0, state["overflows_left"], LARGEST_COUNT),
    ]


def interval(step: Transition) -> Any:
    """Returns the growth interval at the state's scale."""
    shortest = step.constants["growth_interval"]
    for scale, count in low(step.constants, step.variant[1]):
        shorter = z3.And(step.state["loss_scale"] < scale, count < shortest)
        shortest = z3.If(shorter, count, shortest)
    return shortest


def grows(step: Transition) -> Any:
    """Returns whether a step is the finite one that completes the interval."""
    return z3.And(step.finite, step.state["finite_steps"] + 1 >= interval(step))


def left_of(step: Transition) -> Any:
    """Returns the overflows left before the step, at most the hysteresis."""
    left, most = step.state["overflows_left"], step.constants["hysteresis"]
    return z3.If(left < most, left, most)


def grows_on_time(step: Transition) -> Any:
    """L4: the scale is multiplied by the growth factor, up to its bound, on the finite step that
    completes the interval, and the count starts again; on no other step does it rise.
    """
    scale, after, named = step.state["loss_scale"], step.after, step.constants
    due = grows(step)
    grown = after["loss_scale"] == shared.raised(scale, named["growth_factor"], named["max_scale"])
    grew = z3.And(grown, after["finite_steps"] == 0)
    rises = after["loss_scale"] > scale
    return z3.Implies(in_bounds(step), z3.And(z3.Implies(due, grew), z3.Or(due, z3.Not(rises))))


def counts_finite_steps(step: Transition) -> Any:
    """L4: a finite step that does not complete the interval counts one; an overflow starts the
    count again, before the grace steps.
    """
    after, before = step.after["finite_steps"], step.state["finite_steps"]
    early = z3.And(step.finite, before + 1 < interval(step))
    return z3.And(
        z3.Implies(early, after == before + 1),
        z3.Implies(step.overflowed, after == -step.constants["grace_steps"]),
    )


def backs_off_when_due(step: Transition) -> Any:
    """L4: the scale is multiplied by the backoff factor, down to its bound, on the overflow that
    uses up the hysteresis and on every later one; on no other step does it fall.
    """
    scale, after, named = step.state["loss_scale"], step.after["loss_scale"], step.constants
    due = z3.And(step.overflowed, left_of(step) <= 1)
    fell = after == shared.lowered(scale, named["backoff_factor"], named["min_scale"])
    exact = z3.And(z3.Implies(due, fell), z3.Or(due, z3.Not(after < scale)))
    return z3.Implies(in_bounds(step), exact)


def refills(step: Transition) -> Any:
    """L4: what refills the hysteresis does so; an overflow uses up one; nothing else changes it."""
    left, after = left_of(step), step.after["overflows_left"]
    refilled = step.finite if step.variant[0] == "finite_step" else grows(step)
    used = z3.If(left >= 1, left - 1, 0)
    return z3.And(
        z3.Implies(refilled, after == step.constants["hysteresis"]),
        z3.Implies(step.overflowed, after == used),
        z3.Implies(z3.And(step.finite, z3.Not(refilled)), after == left),
    )


def never_wraps(step: Transition) -> Any:
    """Counters cannot wrap: what holds of every possible state holds after the step, too."""
    return z3.And(*possible(step.after))


def ends_at_the_bottom(step: Transition) -> Any:
    """L11: overflows in a row reach the smallest scale. Each one lowers the pair (scale, overflows
    left) in lexicographic order, until the scale is `min_scale`.
    """
    scale, after = step.state["loss_scale"], step.after
    fewer = z3.And(after["loss_scale"] == scale, after["overflows_left"] < left_of(step))
    above = z3.And(in_bounds(step), scale > step.constants["min_scale"])
    lower = z3.Or(after["loss_scale"] < scale, fewer)
    return z3.Implies(z3.And(step.overflowed, above), lower)


def claims(_: tuple[str, int]) -> dict[str, Any]:
    """Returns the claims: functions of a step that return a formula."""
    found = (
        shared.bounded,
        shared.unmoved,
        grows_on_time,
        counts_finite_steps,
        backs_off_when_due,
        refills,
        never_wraps,
        ends_at_the_bottom,
    )
    return {claim.__name__: claim for claim in found}
