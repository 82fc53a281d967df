"""Scaling, unscaling, summing and the norm of gradients: claims about every float32.

The formulas are traced from `scaling.scale_loss`, `scaling.unscale_gradients` and the trainer's
`global_norm`. A scale is any power of two from 2^-126 to 2^126.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf
import z3

import scaling
from proofs.formulas import FLOAT, ROUNDING, formulas_of, is_finite
from proofs.transition import power_of_two
from scaling.rules.constant import FixedLossScaleState
from trainer.step.verdict import global_norm

DOUBLED = 1 << 23  # one in the exponent of a float32
SCALE, ZERO = z3.FP("scale", FLOAT), z3.FPVal(0.0, FLOAT)
Claim = tuple[Any, list[Any]]  # what is claimed, and what is given


def traced(function: Callable[..., Any], *terms: Any) -> list[Any]:
    """Returns a function's outputs as formulas of float32 terms."""
    specs = [tf.TensorSpec([])] * len(terms)
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    return formulas_of(concrete, terms)


def scaled(term: Any) -> Any:
    """Returns a term times the scale, by `scaling.scale_loss`."""
    return traced(lambda x, s: scaling.scale_loss(x, FixedLossScaleState(s)), term, SCALE)[0]


def unscaled(term: Any) -> Any:
    """Returns a term without the scale, by `scaling.unscale_gradients`."""
    unscale = scaling.unscale_gradients
    return traced(lambda x, s: unscale([x], FixedLossScaleState(s)), term, SCALE)[0]


def norm(*terms: Any) -> Any:
    """Returns the global norm of gradients of one element each, as the trainer computes it."""
    return traced(lambda *all_of_them: global_norm([*all_of_them]), *terms)[0]


def exponent(term: Any) -> Any:
    """Returns the biased exponent of a float, as an int that does not wrap."""
    return z3.ZeroExt(8, z3.Extract(30, 23, z3.fpToIEEEBV(term)))


def stays_normal(term: Any) -> Any:
    """Returns whether a float and its exact product with the scale are normal, or both are 0.

    The exact product: one just below 2^-126 may be rounded up to it.
    """
    power = exponent(term) + exponent(SCALE)  # 127 is the bias of both
    fits = z3.And(z3.UGE(power, 127 + 1), z3.ULE(power, 127 + 254))
    return z3.Or(z3.fpIsZero(term), z3.And(z3.fpIsNormal(term), fits))


def flushed(term: Any) -> Any:
    """Returns 0 for a subnormal number, with its sign, as a processor does that flushes them."""
    zero = z3.If(z3.fpIsNegative(term), z3.fpMinusZero(FLOAT), ZERO)
    return z3.If(z3.fpIsSubnormal(term), zero, term)


def lossless() -> Claim:
    """L1: a gradient that is scaled and unscaled has its bits again, if it and its product with the
    scale are normal or 0.
    """
    x = z3.FP("gradient", FLOAT)
    return unscaled(scaled(x)) == x, [power_of_two(SCALE), stays_normal(x)]


def lossless_upward() -> Claim:
    """L1: at a scale of at least 1, every finite gradient, subnormal ones too, has its bits again
    unless its product overflows; on a processor that keeps subnormal numbers.
    """
    x = z3.FP("gradient", FLOAT)
    finite = z3.And(is_finite(x), is_finite(scaled(x)))
    return unscaled(scaled(x)) == x, [power_of_two(SCALE), SCALE >= 1.0, finite]


def lossless_flushed() -> Claim:
    """L1: `lossless` also where a processor flushes subnormal operands and products to 0."""
    x = z3.FP("gradient", FLOAT)
    there = flushed(z3.substitute(scaled(x), (x, flushed(x))))
    y = z3.FP("scaled", FLOAT)
    back = flushed(z3.substitute(unscaled(y), (y, there)))
    return back == x, [power_of_two(SCALE), stays_normal(x)]


def reciprocal_is_normal() -> Claim:
    """The reciprocal of every scale is a power of two as well, so that no processor flushes it."""
    one = z3.FPVal(1.0, FLOAT)
    return power_of_two(z3.fpDiv(ROUNDING, one, SCALE)), [power_of_two(SCALE)]


def doubling_adds_to_the_exponent() -> Claim:
    """Scaling by 2 adds one to a gradient's exponent, unless it is subnormal or overflows."""
    x = z3.FP("gradient", FLOAT)
    twice = z3.substitute(scaled(x), (SCALE, z3.FPVal(2.0, FLOAT)))
    usual = z3.And(z3.fpIsNormal(x), is_finite(twice))
    return z3.fpToIEEEBV(twice) == z3.fpToIEEEBV(x) + DOUBLED, [usual]


def sum_commutes(*, same_sign: bool) -> Claim:
    """Two gradients doubled and then added give double their sum, bit for bit, if gradients and sum
    are normal before and after.

    The first has at least the magnitude of the second, as addition is commutative. A scale of 2^k
    is k doublings, 2^-k as many read backwards; a sum over microbatches and replicas is such
    additions. So the sum of scaled gradients, unscaled, has the bits that the same additions give
    without a scale.
    """
    bits = [z3.BitVec(name, 32) for name in "ab"]
    once = z3.fpAdd(ROUNDING, *(z3.fpBVToFP(each, FLOAT) for each in bits))
    twice = z3.fpAdd(ROUNDING, *(z3.fpBVToFP(each + DOUBLED, FLOAT) for each in bits))
    exponents = [z3.Extract(30, 23, each) for each in bits]
    signs, sizes = (
        [z3.Extract(high, low, each) for each in bits] for high, low in ((31, 31), (30, 0))
    )
    usual = [
        *(z3.And(z3.UGE(each, 1), z3.ULE(each, 253)) for each in exponents),
        z3.And(z3.fpIsNormal(once), z3.fpIsNormal(twice), z3.UGE(*sizes)),
        (signs[0] == signs[1]) == same_sign,
    ]
    return twice == z3.fpBVToFP(z3.fpToIEEEBV(once) + DOUBLED, FLOAT), usual


def nonfinite_stays_in_sum() -> Claim:
    """A sum with an inf or NaN is not finite: no addition cures one that a replica has met."""
    a, b = z3.FP("a", FLOAT), z3.FP("b", FLOAT)
    bad = z3.Not(z3.And(is_finite(a), is_finite(b)))
    return z3.Not(is_finite(z3.fpAdd(ROUNDING, a, b))), [bad]


def nonfinite_stays_unscaled() -> Claim:
    """An inf or NaN is still one after it has been unscaled, and after it has been scaled."""
    x = z3.FP("gradient", FLOAT)
    both = z3.Or(is_finite(unscaled(x)), is_finite(scaled(x)))
    return z3.Not(both), [power_of_two(SCALE), z3.Not(is_finite(x))]


def norm_tells() -> Claim:
    """An inf or NaN in any of three gradients makes the global norm inf or NaN."""
    terms = [z3.FP(f"gradient_{at}", FLOAT) for at in range(3)]
    bad = z3.Not(z3.And(*(is_finite(each) for each in terms)))
    return z3.Not(is_finite(norm(*terms))), [bad]


def square_tells() -> Claim:
    """Half a square is not negative or NaN, and not finite if the gradient is not: the first step
    of an induction over any number of elements.
    """
    x = z3.FP("gradient", FLOAT)
    half = z3.fpMul(ROUNDING, z3.fpMul(ROUNDING, x, x), z3.FPVal(0.5, FLOAT))
    kept = z3.Or(is_finite(x), z3.Not(is_finite(half)))
    return z3.And(not_negative(half), kept), []


def partial_sum_tells() -> Claim:
    """Two partial sums that are not negative or NaN have such a sum, and it is finite only if both
    are: the step of the induction, for elements added in any order.
    """
    a, b = z3.FP("a", FLOAT), z3.FP("b", FLOAT)
    total = z3.fpAdd(ROUNDING, a, b)
    kept = z3.Or(z3.And(is_finite(a), is_finite(b)), z3.Not(is_finite(total)))
    return z3.And(not_negative(total), kept), [not_negative(a), not_negative(b)]


def root_tells() -> Claim:
    """The root of twice a sum of half squares is finite only if the sum is: the end of the
    induction.
    """
    a = z3.FP("a", FLOAT)
    twice = z3.fpMul(ROUNDING, z3.FPVal(2.0, FLOAT), a)
    bad = z3.Not(is_finite(a))
    return z3.Not(is_finite(z3.fpSqrt(ROUNDING, twice))), [not_negative(a), bad]


def small_norms_are_finite() -> Claim:
    """A single gradient below 2^64 in magnitude has a finite norm. At 2^64 its square overflows:
    such a gradient is finite, and is skipped all the same, because Adam would store its square.
    """
    x = z3.FP("gradient", FLOAT)
    small = z3.And(is_finite(x), z3.fpAbs(x) < z3.FPVal(2.0**64, FLOAT))
    return is_finite(norm(x)) == small, [is_finite(x)]


def not_negative(term: Any) -> Any:
    """Returns whether a float is at least 0, or NaN."""
    return z3.Or(z3.fpIsNaN(term), term >= ZERO)


CLAIMS: dict[str, Callable[[], Claim]] = {
    claim.__name__: claim
    for claim in (
        lossless,
        lossless_upward,
        lossless_flushed,
        reciprocal_is_normal,
        doubling_adds_to_the_exponent,
        nonfinite_stays_in_sum,
        nonfinite_stays_unscaled,
        norm_tells,
        square_tells,
        partial_sum_tells,
        root_tells,
        small_norms_are_finite,
    )
} | {
    "sums_of_one_sign_commute": partial(sum_commutes, same_sign=True),
    "sums_of_two_signs_commute": partial(sum_commutes, same_sign=False),
}
