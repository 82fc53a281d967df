"""`DynamicLossScale` is proved for all constants and states, the proofs can fail, and what is proved
is what runs.
"""

import inspect
import textwrap

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("z3", reason="needs the extra: pip install -e '.[proofs]'")

import z3

import scaling
from proofs.claims import CLAIMS
from proofs.dynamic import CONSTANTS, STATE, given, step_of, valid_constants
from proofs.evaluate import evaluate
from proofs.formulas import FLOAT
from proofs.prove import answer
from proofs.transition import power_of_two
from scaling.rules import dynamic
from scaling.rules.dynamic import DynamicLossScale, DynamicLossScaleState
from scaling.rules.named import PRESETS

pytestmark = pytest.mark.thorough

VARIANTS = [("growth", 0), ("growth", 2), ("finite_step", 0), ("finite_step", 2)]


@pytest.mark.parametrize(
    ("refill", "pairs"),
    [VARIANTS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in VARIANTS[1:])],
)
@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_holds_for_all_constants_and_states(name, refill, pairs):
    """L23: no constants, no state and no verdict break it."""
    step = step_of(refill, pairs)
    found = answer(CLAIMS[name](step), given(step))

    assert found.verdict == "proved", found


MUTANTS = {  # of `advance`, and the claims that must notice them
    "grows a step late": ("finite_steps >= self", "finite_steps > self"),
    "grows after an overflow": ("verdict.grads_finite & (finite", "verdict.moves_scale & (finite"),
    "counts in twos": ("state.finite_steps + 1", "state.finite_steps + 2"),
    "forgets that the hysteresis was shortened": (
        "tf.minimum(state.overflows_left, self.hysteresis)",
        "state.overflows_left",
    ),
    "counts overflows below 0": ("tf.maximum(left - 1, 0)", "left - 1"),
    "backs off an overflow late": ("(overflows_left == 0)", "(left == 0)"),
    "swaps what refills": ('== "growth" else', '!= "growth" else'),
    "backs off by the growth factor": ("(backs_off, self.backoff", "(backs_off, self.growth"),
    "does not clip": ("tf.clip_by_value(", "(lambda scale, low, high: scale)("),
    "clips at the bottom only": (", self.max_scale)", ", 2.0**126)"),
    "has no grace": ("-self.grace_steps, tf", "0, tf"),
    "goes on counting after growth": ("tf.where(grows, 0, finite_steps)", "finite_steps"),
    "never refills": ("            self.hysteresis,\n", "            left,\n"),
    "loses an overflow": (
        "(verdict.overflowed, overflows_left, left)",
        "(verdict.overflowed, left, left)",
    ),
    "moves on every verdict": (
        "select_state(verdict.moves_scale,",
        "select_state(tf.constant(True),",
    ),
}


def mutant(old, new):
    """`advance` with one change of its source."""
    source = textwrap.dedent(inspect.getsource(DynamicLossScale.advance))
    assert source.count(old) == 1
    names = dict(vars(dynamic))
    exec(source.replace(old, new), names)  # noqa: S102  # our own source
    return names["advance"]


@pytest.mark.parametrize("what", MUTANTS)
def test_a_mutant_is_refuted(what):
    """A claim fails on every change of the code, with an example."""
    found = {}
    for refill in ("growth", "finite_step"):
        step = step_of(refill, advance=mutant(*MUTANTS[what]))
        found |= {name: answer(claim(step), given(step)) for name, claim in CLAIMS.items()}
        refuted = {name: each.example for name, each in found.items() if each.verdict == "refuted"}
        if refuted:
            break

    assert refuted, found
    assert all(refuted.values())


def drawn_rule(random):
    """A rule with constants at random; and the refill and number of pairs that its code branches on."""
    low, initial, high = sorted(2.0 ** random.integers(-126, 127, size=3))
    pairs = int(random.choice([0, 2]))
    count = lambda: int(random.choice([1, 2, 3, 2**30, random.integers(1, 2**30)]))  # noqa: E731
    return DynamicLossScale(
        initial_scale=initial,
        growth_interval=count(),
        growth_factor=2.0 ** random.integers(1, 127),
        backoff_factor=2.0 ** -random.integers(1, 127),
        min_scale=low,
        max_scale=high,
        hysteresis=count(),
        hysteresis_refill=str(random.choice(["growth", "finite_step"])),
        grace_steps=count() - 1,
        low_scale_intervals=tuple(
            (2.0 ** random.integers(-126, 127), count()) for _ in range(pairs)
        ),
    )


def drawn_states(random, rule, size):
    """States at random, half of them at the numbers where the rule decides; and verdicts."""
    shorter = [count for _, count in rule.low_scale_intervals]
    edges = [rule.growth_interval, *shorter, -rule.grace_steps, 0]
    near = np.clip(random.choice(edges, size) + random.integers(-2, 3, size), -(2**30), 2**30)
    far = random.integers(-(2**30), 2**30, size, endpoint=True)
    scales = [rule.min_scale, rule.max_scale, *(scale for scale, _ in rule.low_scale_intervals)]
    return {
        "loss_scale": np.where(
            random.random(size) < 0.5,
            random.choice(scales, size),
            2.0 ** random.integers(-126, 127, size=size),
        ).astype(np.float32),
        "finite_steps": np.where(random.random(size) < 0.5, near, far).astype(np.int32),
        "overflows_left": np.where(
            random.random(size) < 0.5,
            np.clip(rule.hysteresis + random.integers(-2, 3, size), 0, 2**30),
            random.integers(0, 4, size),
        ).astype(np.int32),
        "grads_finite": random.random(size) < 0.5,
        "cause": random.integers(0, 7, size).astype(np.int32),
    }


def advanced(rule, drawn):
    """The states after a step of the rule itself, one by one, in one graph."""

    @tf.function
    def run(drawn):
        def one(each):
            state = DynamicLossScaleState(*(each[name] for name in STATE))
            return rule.advance(state, scaling.Verdict(each["grads_finite"], each["cause"]))

        return tf.vectorized_map(one, drawn)

    return [each.numpy() for each in run(drawn)]


@pytest.mark.parametrize(
    ("rules", "steps"),
    [(10, 5_000), pytest.param(200, 5_000, marks=pytest.mark.slow)],
)
def test_the_formulas_are_what_runs(rules, steps, record_property):
    """L23: random steps of rules with random constants end in the bits that the formulas give."""
    random = np.random.default_rng(0)
    different = 0
    formulas = {variant: step_of(*variant).after for variant in VARIANTS}
    for _ in range(rules):
        rule = drawn_rule(random)
        drawn = drawn_states(random, rule, steps)
        low = rule.low_scale_intervals
        constants = {
            name: (np.float32 if kind == "float" else np.int32)(getattr(rule, name))
            for name, kind in CONSTANTS.items()
        }
        for at, (scale, interval) in enumerate(low):
            constants |= {f"scale_{at}": np.float32(scale), f"interval_{at}": np.int32(interval)}
        after = formulas[rule.hysteresis_refill, len(low)]
        for found, name in zip(advanced(rule, drawn), STATE, strict=True):
            wanted = np.broadcast_to(evaluate(after[name], drawn | constants), [steps])
            assert wanted.dtype == found.dtype
            different += int(np.sum(wanted.view(np.int32) != found.view(np.int32)))
    record_property("steps", rules * steps)

    assert different == 0


def test_presets_are_among_what_is_proved():
    """The constants of every preset that is such a rule are valid, in the words of the proofs."""
    step = step_of()
    rules = [make() for versions in PRESETS.values() for make in versions.values()]
    proved = [rule for rule in rules if type(rule) is DynamicLossScale]
    for rule in proved:
        values = [
            (term, z3.FPVal(getattr(rule, name), FLOAT))
            if CONSTANTS[name] == "float"
            else (term, z3.BitVecVal(getattr(rule, name), 32))
            for name, term in step.constants.items()
        ]
        for demand in valid_constants(step):
            assert z3.is_true(z3.simplify(z3.substitute(demand, *values))), rule
    assert len(proved) >= 5


def test_powers_of_two_are_told_from_others():
    """The formula for a power of two, on numbers at its edges."""
    yes, no = [2.0**-126, 0.5, 1.0, 2.0**126], [0.0, -1.0, 3.0, 2.0**-127, 2.0**127, np.inf, np.nan]
    for numbers, wanted in ((yes, True), (no, False)):
        for number in numbers:
            found = z3.simplify(power_of_two(z3.FPVal(number, z3.Float32())))
            assert z3.is_true(found) == wanted, number
