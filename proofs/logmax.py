"""`LogMaxLossScale`: one step as formulas, and the claims.

Logarithms, roots, squares, products of two variables and the weights of the running means are left
open: the claims are proved for whatever they return within the limits that `given` states, which
hold because rounding is monotonic. The rest is bit for bit.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf
import z3

from proofs import transition as shared
from proofs.formulas import FLOAT, ROUNDING, Operation, is_finite
from proofs.source import Change, loaded
from proofs.transition import LARGEST_COUNT, Cut, Transition, between, in_bounds
from scaling.rules import logmax

CONSTANTS = {
    "mean_decay": "float",  # see `step_of`
    "deviation_decay": "float",
    "deviations": "float",
    "min_scale": "float",
    "max_scale": "float",
}
STATE = {
    "loss_scale": "float",
    "steps": "int",
    "mean": "float",
    "slow_mean": "float",
    "variance": "float",
}
VARIANTS = (None,)
LARGEST_LOG = 150.0  # of a float32
LARGEST_MEAN, LARGEST_VARIANCE = 2.0**8, 2.0**18


def step_of(_: None = None, change: Change = None, *, exact: bool = False) -> Transition:
    """Returns a step of the rule, or of a mutant, as formulas.

    Python's `math.log2` of a bound is its exponent. What takes the place of a decay is the weight
    that the newest value has in this step.

    Args:
        change: see `source.loaded`.
        exact: whether nothing is left open, for evaluation.
    """
    names = loaded(
        logmax,
        change,
        math=SimpleNamespace(log2=exponent_of),
        log2=tf.math.log,
        newest_weight=lambda decay, _: decay,
    )
    cuts: list[Cut] = []
    instead = (
        {} if exact else {name: cut(name, cuts) for name in ("Sqrt", "Square", "Floor", "Log")}
    )
    if not exact:
        instead["Mul"] = cut("Mul", cuts)
    step = shared.transition(names, "LogMaxLossScale", CONSTANTS, STATE, instead=instead)
    return step._replace(cuts=cuts)


def cut(name: str, cuts: list[Cut]) -> Operation:
    """Returns an operation whose value is a new variable, unless an operand is a constant."""

    def value(*terms: Any) -> Any:
        if any(z3.is_fp_value(each) for each in terms):
            return z3.fpMul(ROUNDING, *terms)
        cuts.append(Cut(name, terms, z3.FreshConst(FLOAT, name)))
        return cuts[-1].value

    return value


def exponent_of(scale: tf.Tensor) -> tf.Tensor:
    """Returns the logarithm of a power of two, exactly: shape (), float32."""
    bits = tf.bitwise.right_shift(tf.bitcast(scale, tf.int32), 23)
    return tf.cast(bits - 127, tf.float32)


def given(step: Transition) -> list[Any]:
    """Returns what the constructor demands, and what holds of every possible state and verdict, of
    weights, logarithms and roots.
    """
    zero, one = z3.FPVal(0.0, FLOAT), z3.FPVal(1.0, FLOAT)
    named = step.constants
    return [
        *shared.valid_scales(named),
        between(zero, named["mean_decay"], one),
        between(zero, named["deviation_decay"], one),
        between(zero, named["deviations"], z3.FPVal(100.0, FLOAT)),
        *possible(step.state),
        z3.Not(z3.fpIsNegative(step.magnitude)),  # it may be inf or NaN
        *(LIMITS[each.name](step, each) for each in step.cuts),
    ]


def number(value: float) -> Any:
    """Returns a float32 constant."""
    return z3.FPVal(value, FLOAT)


def limits_of_log(_: Transition, cut: Cut) -> Any:
    """Returns what holds of a float32's logarithm, with room for its error."""
    [size] = cut.terms
    usual = between(number(2.0**-126), size, number(2.0**126))
    positive = z3.And(size > number(0.0), is_finite(size))
    return z3.And(
        z3.Implies(usual, within(cut.value, 127.0)),
        z3.Implies(positive, within(cut.value, LARGEST_LOG)),
    )


def limits_of_root(step: Transition, cut: Cut) -> Any:
    """Returns what holds of a root, if its argument is a variance; see `variance_stays`."""
    root = between(number(0.0), cut.value, number(LARGEST_VARIANCE**0.5))
    return z3.Implies(enters(step), root)


def limits_of_floor(step: Transition, cut: Cut) -> Any:
    """Returns that the largest exponent that fits is no NaN; see `nothing_is_nan`."""
    return z3.Implies(enters(step), z3.Not(z3.fpIsNaN(cut.value)))


def limits_of_product(_: Transition, cut: Cut) -> Any:
    """Returns what holds of a product whose first factor is from 0 to 1, or from 0 to 100."""
    (factor, other), zero = cut.terms, number(0.0)
    small = z3.And(between(zero, factor, number(1.0)), is_finite(other))
    toward = z3.Or(between(zero, cut.value, other), between(other, cut.value, zero))
    large = z3.And(between(zero, factor, number(100.0)), between(zero, other, number(512.0)))
    return z3.And(
        z3.Implies(small, toward), z3.Implies(large, between(zero, cut.value, number(51200.0)))
    )


LIMITS = {
    "Log": limits_of_log,
    "Sqrt": limits_of_root,
    "Floor": limits_of_floor,
    "Mul": limits_of_product,
    "Square": lambda *_: z3.BoolVal(True),  # only the variance is made of it
}


def is_negligible(step: Transition) -> Any:
    """Returns whether the largest magnitude is 0, or subnormal: processors may take that for 0."""
    return z3.Or(z3.fpIsZero(step.magnitude), z3.fpIsSubnormal(step.magnitude))


def enters(step: Transition) -> Any:
    """Returns whether a step enters the statistics."""
    measured = z3.And(step.finite, is_finite(step.magnitude), z3.Not(is_negligible(step)))
    return z3.Or(step.overflowed, measured)


def largest_variance() -> float:
    """Returns the largest variance after a step, over all 2^27 or so weights that change one.

    The new variance, (1 - w) (v + w d^2), rises with v and with d^2, and so does each rounding. So
    it is enough to try the largest of both with every float32 weight; one below 2^-26 leaves v.
    """
    largest = np.float32(LARGEST_LOG + LARGEST_MEAN) ** 2
    found = 0.0
    for exponent in range(127 - 26, 128):
        fractions = np.arange(2**23 if exponent < 127 else 1, dtype=np.uint32)
        weights = (fractions + np.uint32(exponent << 23)).view(np.float32)
        rest = np.float32(1.0) - weights
        found = max(found, float(np.max(rest * (np.float32(LARGEST_VARIANCE) + weights * largest))))
    return found


def within(term: Any, size: float) -> Any:
    """Returns whether a float is between -size and size."""
    return between(z3.FPVal(-size, FLOAT), term, z3.FPVal(size, FLOAT))


def possible(state: Mapping[str, Any]) -> list[Any]:
    """Returns what holds of every state that a rule with any valid constants can leave behind."""
    variance = between(z3.FPVal(0.0, FLOAT), state["variance"], z3.FPVal(LARGEST_VARIANCE, FLOAT))
    return [
        shared.power_of_two(state["loss_scale"]),
        between(0, state["steps"], LARGEST_COUNT),
        within(state["mean"], LARGEST_MEAN),
        within(state["slow_mean"], LARGEST_MEAN),
        variance,
    ]


def bounded(step: Transition) -> Any:
    """L3: see `transition.bounded`; a step that contradicts itself does not move the state."""
    return z3.Implies(z3.Or(step.overflowed, is_finite(step.magnitude)), shared.bounded(step))


def contradiction_moves_nothing(step: Transition) -> Any:
    """A finite step whose largest magnitude is inf or NaN moves no bit."""
    stays = shared.all_equal([*step.after.values()], [*step.state.values()])
    return z3.Implies(z3.And(step.finite, z3.Not(is_finite(step.magnitude))), stays)


def zeros_double(step: Transition) -> Any:
    """If all gradients are 0 or subnormal, the scale doubles, to its upper bound, and nothing else
    moves.
    """
    zeros = z3.And(step.finite, is_negligible(step), in_bounds(step))
    two = z3.FPVal(2.0, FLOAT)
    doubled = shared.raised(step.state["loss_scale"], two, step.constants["max_scale"])
    others = [name for name in STATE if name != "loss_scale"]
    stay = shared.all_equal(*([each[name] for name in others] for each in (step.after, step.state)))
    return z3.Implies(zeros, z3.And(step.after["loss_scale"] == doubled, stay))


def halves_at_least(step: Transition) -> Any:
    """An overflow at least halves the scale, down to its bound, whatever the statistics say."""
    half = z3.FPVal(0.5, FLOAT)
    lower = shared.lowered(step.state["loss_scale"], half, step.constants["min_scale"])
    over = z3.And(step.overflowed, in_bounds(step))
    return z3.Implies(over, step.after["loss_scale"] <= lower)


def counts_steps(step: Transition) -> Any:
    """A step that enters the statistics counts one, up to 2^30."""
    before = step.state["steps"]
    more = z3.If(before < LARGEST_COUNT, before + 1, LARGEST_COUNT)
    return step.after["steps"] == z3.If(enters(step), more, before)


def means_stay(step: Transition) -> Any:
    """The running means stay between -256 and 256."""
    return z3.And(*possible(step.after)[2:4])


def never_wraps(step: Transition) -> Any:
    """The counter cannot wrap."""
    return possible(step.after)[1]


def nothing_is_nan(step: Transition) -> Any:
    """What the scale is computed from is finite: mean and deviations, where they enter."""
    sums = [each.terms[0] for each in step.cuts if each.name == "Floor"]
    return z3.Implies(enters(step), z3.And(*(is_finite(each) for each in sums)))


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
        zeros_double,
        halves_at_least,
        counts_steps,
        means_stay,
        nothing_is_nan,
        never_wraps,
        ends_at_the_bottom,
    )
    return {claim.__name__: claim for claim in found}
