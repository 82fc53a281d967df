"""`scaling.float8.DelayedScaling`: one step as formulas, and the claims, for short histories."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import z3

from proofs import transition as shared
from proofs.formulas import FLOAT, ROUNDING, formulas_of, is_finite
from proofs.source import Change, loaded
from proofs.transition import between
from scaling.float8 import delayed, magnitudes
from scaling.float8.cast import FORMATS

# dtype, history_length, algorithm, includes_newest
VARIANTS = (
    ("float8_e4m3fn", 1, "max", True),
    ("float8_e4m3fn", 3, "max", True),
    ("float8_e5m2", 3, "max", True),
    ("float8_e4m3fn", 3, "most_recent", True),
    ("float8_e4m3fn", 3, "max", False),
)
MARGINS = (-64, 0, 1, 64)
LARGEST = 2.0**126


class Step(NamedTuple):
    """One step: any scale, any history, any largest magnitude."""

    scale: Any
    history: Sequence[Any]  # newest first, then oldest first
    amax: Any
    after: Any
    history_after: Sequence[Any]
    limit: float  # the format's largest number
    margin: int
    seen: Sequence[Any]  # the magnitudes that the scale goes by


def step_of(variant: tuple[str, int, str, bool], change: Change = None, *, margin: int = 0) -> Step:
    """Returns a step of a rule with powers of two, or of a mutant, as formulas."""
    dtype, length, algorithm, newest = variant
    names = changed(change)
    rule = names["DelayedScaling"](
        dtype, length, algorithm=algorithm, margin=margin, includes_newest=newest
    )
    function = tf.function(
        lambda scale, history, amax: rule.advance(
            names["DelayedScalingState"](scale, history), amax
        ),
        autograph=False,
    ).get_concrete_function(*(tf.TensorSpec(shape) for shape in ([], [length], [])))
    scale, amax = z3.FP("scale", FLOAT), z3.FP("amax", FLOAT)
    history = np.array([z3.FP(f"history_{at}", FLOAT) for at in range(length)], object)
    after, history_after = formulas_of(function, [scale, history, amax])
    kept = [amax, *history[2:], *history[:1]][:length] if newest else [*history]
    seen = kept[:1] if algorithm == "most_recent" else kept
    return Step(scale, history, amax, after, history_after, FORMATS[dtype].largest, margin, seen)


def changed(change: Change) -> dict[str, Any]:
    """Returns the names of `delayed.py`, with a change there or in the functions it imports."""
    inside = change is not None and change[0] in inspect.getsource(delayed)
    below = loaded(magnitudes, None if inside else change)
    taken = {name: below[name] for name in vars(delayed) if callable(vars(magnitudes).get(name))}
    return loaded(delayed, change if inside else None, **taken)


def given(step: Step) -> list[Any]:
    """Returns what holds of every state, and that a magnitude is not negative: it may be inf or
    NaN.
    """
    zero = z3.FPVal(0.0, FLOAT)
    kept = [z3.And(each >= zero, is_finite(each)) for each in step.history]
    return [shared.power_of_two(step.scale), *kept, z3.Not(z3.fpIsNegative(step.amax))]


def largest(step: Step) -> Any:
    """Returns the largest magnitude that the scale goes by."""
    found = step.seen[0]
    for each in step.seen[1:]:
        found = z3.If(each > found, each, found)
    return found


def bounded(step: Step) -> Any:
    """The scale is a power of two from 2^-126 to 2^126."""
    return shared.power_of_two(step.after)


def nonfinite_moves_nothing(step: Step) -> Any:
    """An inf or NaN moves no bit of scale and history."""
    stays = shared.all_equal([step.after, *step.history_after], [step.scale, *step.history])
    return z3.Implies(z3.Not(is_finite(step.amax)), stays)


def zeros_keep_the_scale(step: Step) -> Any:
    """While all magnitudes that the scale goes by are 0, it stays."""
    return z3.Implies(z3.fpIsZero(largest(step)), step.after == step.scale)


def is_the_smallest_that_fits(step: Step) -> Any:
    """The largest magnitude, divided by the scale, is at most the largest float8 number over
    2^margin; divided by half the scale it is more, unless the scale is at its bound.
    """
    size, margin = largest(step), z3.FPVal(2.0**-step.margin, FLOAT)
    usual = z3.And(is_finite(step.amax), z3.fpIsNormal(size))
    limit = z3.fpMul(ROUNDING, z3.FPVal(step.limit, FLOAT), margin)  # exact: a power of two
    top, bottom = z3.FPVal(LARGEST, FLOAT), z3.FPVal(1 / LARGEST, FLOAT)
    fits = z3.Or(at_most(size, limit, step.after), step.after == top)
    half = z3.fpMul(ROUNDING, step.after, z3.FPVal(0.5, FLOAT))
    smallest = z3.Or(step.after == bottom, z3.Not(at_most(size, limit, half)))
    return z3.Implies(usual, z3.And(fits, smallest))


def at_most(size: Any, limit: Any, scale: Any) -> Any:
    """Returns whether size <= limit * scale, in float64, in which the product is exact."""
    double = z3.Float64()
    wide = [z3.fpFPToFP(ROUNDING, each, double) for each in (size, limit, scale)]
    return wide[0] <= z3.fpMul(ROUNDING, wide[1], wide[2])


def remembers(step: Step) -> Any:
    """A finite magnitude enters the history in front, and the oldest one leaves it."""
    expected = [step.amax, *step.history[2:], *step.history[:1]][: len(step.history)]
    kept = shared.all_equal([*step.history_after], expected)
    return z3.Implies(is_finite(step.amax), kept)


def claims(_: Any = None) -> dict[str, Any]:
    """Returns the claims: functions of a step that return a formula."""
    found = (
        bounded,
        nonfinite_moves_nothing,
        zeros_keep_the_scale,
        is_the_smallest_that_fits,
        remembers,
    )
    return {claim.__name__: claim for claim in found}


def rises_with(one: Step) -> tuple[Any, list[Any]]:
    """Returns the claim that larger magnitudes never give a smaller scale, and what is given.

    Two steps from one scale, of which the second has in every place at least the first's magnitude.
    """
    terms = [one.amax, *one.history]
    others = [z3.FP(f"other_{at}", FLOAT) for at in range(len(terms))]
    after = z3.substitute(one.after, *zip(terms, others, strict=True))
    more = [z3.And(is_finite(b), a <= b) for a, b in zip(terms, others, strict=True)]
    positive = largest(one) > z3.FPVal(0.0, FLOAT)
    return one.after <= after, [
        *given(one),
        *more,
        positive,
        between(one.scale, one.scale, one.scale),
    ]
