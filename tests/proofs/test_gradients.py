"""What is claimed of every float32 gradient, and that the claims can fail."""

import fractions
import itertools
import types

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("z3", reason="needs the extra: pip install -e '.[proofs]'")

import scaling
from proofs import gradients
from proofs.prove import answer
from proofs.source import loaded
from proofs.table import ask_of
from scaling.ops import gradients as scaled_gradients
from trainer.step import verdict as measure

pytestmark = pytest.mark.thorough

SECONDS = {
    *("lossless", "lossless_upward", "lossless_flushed", "norm_tells"),
    *("sums_of_one_sign_commute", "sums_of_two_signs_commute"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SECONDS else [])
        for name in gradients.CLAIMS
    ],
)
def test_a_claim_holds_for_every_float32(name):
    """No gradient and no scale break it."""
    found = ask_of(name)

    assert found.verdict == "proved", found


MUTANTS = {
    "unscales by half": (
        scaled_gradients,
        ("1.0 / state.loss_scale", "0.5 / state.loss_scale"),
    ),
    "unscales twice": (
        scaled_gradients,
        ("gradient * tf.cast(reciprocal", "gradient * reciprocal * tf.cast(reciprocal"),
    ),
    "scales the square": (scaled_gradients, ("return loss * tf", "return loss * loss * tf")),
    "bounds the squares": (
        measure,
        ("tf.nn.l2_loss(", "tf.minimum(tf.constant(1e38), 0.5 * tf.square("),
    ),
    "takes the root of each": (measure, ("tf.sqrt(2.0 *", "tf.sqrt(-2.0 *")),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_a_mutant_is_refuted(what, monkeypatch):
    """A claim fails on every change of the code, with an example."""
    module, (old, new) = MUTANTS[what]
    if new.endswith("tf.square("):
        old, new = (
            f"{old}tf.cast(gradient_values(gradient), tf.float32))",
            (f"{new}tf.cast(gradient_values(gradient), tf.float32)))"),
        )
    names = loaded(module, (old, new))
    if module is scaled_gradients:
        parts = {name: names[name] for name in ("scale_loss", "unscale_gradients")}
        monkeypatch.setattr(gradients, "scaling", types.SimpleNamespace(**parts))
    elif what == "bounds the squares":
        changed = loaded(measure, half_squared_norm=names["half_squared_norm"])
        monkeypatch.setattr(gradients, "global_norm", changed["global_norm"])
    else:
        monkeypatch.setattr(gradients, "global_norm", names["global_norm"])
    for claim in ("small_norms_are_finite", "nonfinite_stays_unscaled", "lossless", "norm_tells"):
        found = answer(*gradients.CLAIMS[claim]())
        if found.verdict == "refuted":
            assert found.example
            return

    pytest.fail("no claim is refuted")


def test_a_product_that_is_rounded_up_to_a_normal_number_is_lost():
    """L1: the law asks for the exact product to be normal: one just below 2^-126 is rounded up to it."""
    state = scaling.FixedLossScale(2.0**-63).initial_state()
    gradient = np.float32(np.nextafter(np.float32(2.0**-63), np.float32(0.0)))
    product = scaling.scale_loss(tf.constant(gradient), state).numpy()

    assert product in {np.float32(2.0**-126), np.float32(0.0)}
    assert scaling.unscale_gradients([tf.constant(product)], state)[0].numpy() != gradient


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32])
def test_a_gradient_has_an_infinite_norm_from_2_to_the_64(dtype):
    """A finite gradient of 2^64 has an infinite norm, one just below has not; float16 has neither."""
    if dtype == tf.float16:
        assert np.isfinite(measure.global_norm([tf.constant([65504.0] * 10**5, dtype)]))
        return
    large = tf.constant(2.0**64, dtype)
    below = tf.cast(tf.constant(2.0**64 * (1 - 2.0**-8)), dtype)

    assert np.isinf(measure.global_norm([large]))
    assert np.isfinite(measure.global_norm([below]))


def bound(terms):
    """The largest error of a sum of n float32 numbers, one after another: (n-1) u / (1 - (n-1) u)
    of the sum of their magnitudes, for u = 2^-24 (Higham, "Accuracy and Stability of Numerical
    Algorithms", section 4.2).
    """
    rounded = (len(terms) - 1) * fractions.Fraction(1, 2**24)
    return rounded / (1 - rounded) * sum(abs(fractions.Fraction(float(each))) for each in terms)


def error(terms):
    """How far a sum in float32 is from the exact one."""
    total = np.float32(0.0)
    for each in terms:
        total = np.float32(total + each)
    return abs(fractions.Fraction(float(total)) - sum(fractions.Fraction(float(x)) for x in terms))


EDGES = np.array([1.0, 1 + 2.0**-23, 2.0**-24, 3 * 2.0**-25, 2.0**-100, 1e30, 0.1, 3.0], np.float32)


def test_a_sum_of_three_microbatches_is_within_the_bound():
    """All triples of numbers at which rounding is decided, with both signs."""
    for terms in itertools.product([*EDGES, *-EDGES], repeat=3):
        assert error(terms) <= bound(terms), terms


def test_a_sum_of_many_microbatches_is_within_the_bound():
    """Random gradients of up to 64 microbatches, from 2^-30 to 2^30, many of which cancel."""
    random = np.random.default_rng(3)
    worst = 0
    for _ in range(2_000):
        size = int(random.integers(2, 65))
        terms = (random.normal(size=size) * 2.0 ** random.integers(-30, 31, size)).astype(
            np.float32
        )
        terms[1::2] -= terms[0::2][: len(terms[1::2])] * np.float32(random.integers(2))
        assert error(terms) <= bound(terms)
        worst = max(worst, error(terms) / max(bound(terms), fractions.Fraction(1, 2**200)))
    assert worst > 0.01  # the bound is not idle
