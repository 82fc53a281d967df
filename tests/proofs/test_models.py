"""Every rule is proved for all constants and states, the proofs can fail, and what is proved is what
runs.
"""

import inspect

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("z3", reason="needs the extra: pip install -e '.[proofs]'")

import z3

import scaling
import scaling.float8
from proofs import constant, dynamic, float8, headroom, logmax, tolerant
from proofs.evaluate import evaluate
from proofs.formulas import FLOAT
from proofs.prove import answer
from proofs.search import searched_variance
from proofs.transition import power_of_two
from scaling.rules.logmax import log2, newest_weight
from scaling.rules.named import PRESETS

pytestmark = pytest.mark.thorough

MODELS = {
    "dynamic": dynamic,
    "constant": constant,
    "tolerant": tolerant,
    "headroom": headroom,
    "logmax": logmax,
    "float8": float8,
}
SECONDS = {  # claims of other rules that take a solver more than one second, or wait for others
    *("grows_on_time", "backs_off_when_due", "counts_steps", "moves_the_interval"),
    *("zero_tolerates_nothing", "never_wraps", "bounded", "searches", "means_stay"),
    *("finds_the_largest_that_fits", "grows_only_with_headroom", "backs_off_at_once"),
    *("is_the_smallest_that_fits", "nothing_is_nan", "halves_at_least"),
}
CLAIMS = [
    pytest.param(
        name,
        variant,
        claim,
        marks=[pytest.mark.slow]
        if variant != model.VARIANTS[0] or (claim in SECONDS and name != "dynamic")
        else [],
        id=f"{name}-{variant}-{claim}",
    )
    for name, model in MODELS.items()
    for variant in model.VARIANTS
    for claim in model.claims(variant)
]


@pytest.mark.parametrize(("name", "variant", "claim"), CLAIMS)
def test_a_claim_holds_for_all_constants_and_states(name, variant, claim):
    """L23: no constants, no state, no verdict and no magnitude break it."""
    model = MODELS[name]
    step = model.step_of(variant)

    found = answer(model.claims(variant)[claim](step), model.given(step))

    assert found.verdict == "proved", found


@pytest.mark.parametrize("name", MODELS)
def test_what_is_given_can_be(name):
    """There are constants, states and verdicts of every kind, so that no claim holds for want of any."""
    model = MODELS[name]
    step = model.step_of(model.VARIANTS[0])
    kinds = [z3.BoolVal(True)]
    if name != "float8":
        kinds = [step.finite, step.overflowed, z3.Not(step.moves)]
    for kind in kinds:
        found = answer(z3.Not(kind), model.given(step))

        assert found.verdict == "refuted", found


@pytest.mark.slow
@pytest.mark.parametrize("margin", [-64, 1, 64])
def test_a_margin_moves_the_scale_of_float8(margin):
    """The claims hold with every margin that is tried."""
    step = float8.step_of(float8.VARIANTS[1], margin=margin)
    for name, claim in float8.claims().items():
        found = answer(claim(step), float8.given(step))

        assert found.verdict == "proved", (name, found)


@pytest.mark.parametrize("variant", float8.VARIANTS[:1])
def test_a_scale_of_float8_rises_with_magnitudes(variant):
    """Larger magnitudes never give a smaller scale."""
    found = answer(*float8.rises_with(float8.step_of(variant)))

    assert found.verdict == "proved", found


@pytest.mark.slow
def test_a_running_variance_stays_within_its_limit():
    """No float32 weight brings the variance of a float32's logarithm above 2^18."""
    assert searched_variance().verdict == "searched over all weights"


MUTANTS = {  # the claim that notices a change, and the change
    "dynamic": {
        "grows a step late": ("grows_on_time", "finite_steps >= self", "finite_steps > self"),
        "grows after an overflow": (
            "grows_on_time",
            "verdict.grads_finite & (finite",
            "verdict.moves_scale & (finite",
        ),
        "counts in twos": (
            "counts_finite_steps",
            "state.finite_steps + 1",
            "state.finite_steps + 2",
        ),
        "forgets that the hysteresis was shortened": (
            "refills",
            "tf.minimum(state.overflows_left, self.hysteresis)",
            "state.overflows_left",
        ),
        "counts overflows below 0": ("never_wraps", "tf.maximum(left - 1, 0)", "left - 1"),
        "backs off an overflow late": (
            "backs_off_when_due",
            "(overflows_left == 0)",
            "(left == 0)",
        ),
        "swaps what refills": ("refills", '== "growth" else', '!= "growth" else'),
        "backs off by the growth factor": (
            "backs_off_when_due",
            "(backs_off, self.backoff",
            "(backs_off, self.growth",
        ),
        "does not clip": ("bounded", "tf.clip_by_value(", "(lambda scale, low, high: scale)("),
        "clips at the bottom only": ("bounded", ", self.max_scale)", ", 2.0**126)"),
        "has no grace": ("counts_finite_steps", "-self.grace_steps, tf", "0, tf"),
        "goes on counting after growth": (
            "grows_on_time",
            "tf.where(grows, 0, finite_steps)",
            "finite_steps",
        ),
        "never refills": ("refills", "            self.hysteresis,\n", "            left,\n"),
        "loses an overflow": (
            "ends_at_the_bottom",
            "(verdict.overflowed, overflows_left, left)",
            "(verdict.overflowed, left, left)",
        ),
        "moves on every verdict": (
            "unmoved",
            "select_state(verdict.moves_scale,",
            "select_state(tf.constant(True),",
        ),
    },
    "tolerant": {
        "grows beside the interval": ("grows_on_time", "phase == 0", "phase == 1"),
        "grows after an overflow": (
            "grows_on_time",
            "verdict.grads_finite & (phase",
            "verdict.moves_scale & (phase",
        ),
        "counts an overflow twice": (
            "counts_steps",
            "tf.cast(overflowed, tf.int32)",
            "2 * tf.cast(overflowed, tf.int32)",
        ),
        "tolerates one more": (
            "backs_off_when_due",
            "share >= self.tolerance",
            "share > self.tolerance",
        ),
        "backs off by the growth factor": (
            "backs_off_when_due",
            "(backs_off, self.backoff",
            "(backs_off, self.growth",
        ),
        "does not clip": ("bounded", "tf.clip_by_value(", "(lambda scale, low, high: scale)("),
        "counts an overflow as finite": (
            "counts_steps",
            "overflowed, 0, tf.where(fin",
            "overflowed, 1, tf.where(fin",
        ),
        "counts on after growth": (
            "counts_steps",
            "grows | backs_off, 0, steps",
            "backs_off, 0, steps",
        ),
        "keeps its overflows": ("counts_steps", "tf.where(backs_off, 0, overflows)", "overflows"),
        "counts steps without end": (
            "never_wraps",
            "tf.minimum(state.steps, MAX_COUNT - 1) + 1",
            "state.steps + 1",
        ),
        "counts finite steps without end": (
            "never_wraps",
            "tf.where(finite_steps < MAX_COUNT, finite_steps, phase)",
            "finite_steps",
        ),
        "loses its place in the interval": (
            "keeps_the_phase",
            "finite_steps, phase)",
            "finite_steps, 0)",
        ),
        "shrinks the interval to 0": (
            "never_wraps",
            "tf.maximum(interval // backoff, 1)",
            "interval // backoff",
            1,
        ),
        "lets the interval overflow": (
            "never_wraps",
            "tf.minimum(interval, MAX_COUNT // growth) * growth",
            "interval * growth",
            1,
        ),
        "lengthens the interval": (
            "moves_the_interval",
            "(backs_off, shorter,",
            "(backs_off, longer,",
            1,
        ),
        "forgets the moved interval": (
            "grows_on_time",
            "state.growth_interval if self.scale",
            "self.growth_interval if self.scale",
            1,
        ),
        "moves on every verdict": ("unmoved", "(verdict.moves_scale,", "(tf.constant(True),"),
    },
    "headroom": {
        "believes a contradiction": (
            "contradiction_moves_nothing",
            "select_state(moves_by_magnitude(verdict, magnitude)",
            "select_state(verdict.moves_scale",
        ),
        "searches the wrong way": (
            "searches",
            "1.0 / SEARCH_FACTOR, SEARCH_FACTOR",
            "SEARCH_FACTOR, 1.0 / SEARCH_FACTOR",
        ),
        "takes no power of two": ("bounded", "floor_power_of_two(self", "(self"),
        "leaves a bit too little": (
            "finds_the_largest_that_fits",
            "() / magnitude)",
            "() / magnitude * 2.0)",
        ),
        "leaves a bit too much": (
            "finds_the_largest_that_fits",
            "() / magnitude)",
            "() / magnitude * 0.5)",
        ),
        "finds zeros": ("searches", "found=~overflowed & ~flushed", "found=~overflowed"),
        "counts in twos": (
            "counts_finite_steps",
            "state.finite_steps + 1",
            "state.finite_steps + 2",
        ),
        "forgets the peak": (
            "counts_finite_steps",
            "tf.maximum(state.peak, magnitude)",
            "magnitude",
        ),
        "grows a step late": (
            "grows_only_with_headroom",
            ">= self.growth_interval",
            "> self.growth_interval",
        ),
        "grows without room": (
            "grows_only_with_headroom",
            "checks_growth & has_room",
            "checks_growth",
        ),
        "asks for room before growth": (
            "grows_only_with_headroom",
            "peak * self.growth_factor <=",
            "peak <=",
        ),
        "grows on an overflow": (
            "backs_off_at_once",
            "tf.where(overflowed, self.backoff",
            "tf.where(overflowed, self.growth",
        ),
        "goes on counting": (
            "counts_finite_steps",
            "tf.where(restarts, 0, finite_steps)",
            "finite_steps",
        ),
        "keeps the peak": ("counts_finite_steps", "tf.where(restarts, 0.0, peak)", "peak"),
        "does not clip": (
            "bounded",
            "tf.clip_by_value(loss_scale, self.min_scale, self.max_scale)",
            "loss_scale",
        ),
        "searches what it has found": (
            "counts_finite_steps",
            "select_state(state.found,",
            "select_state(~state.found,",
        ),
    },
    "logmax": {
        "believes a contradiction": (
            "contradiction_moves_nothing",
            "select_state(moves_by_magnitude(verdict, magnitude)",
            "select_state(verdict.moves_scale",
        ),
        "does not halve": (
            "halves_at_least",
            "tf.minimum(fitting, self._clip(scale * 0.5))",
            "fitting",
        ),
        "halves below the bound": ("bounded", "self._clip(scale * 0.5)", "scale * 0.5"),
        "quadruples": ("zeros_double", "scale * 2.0", "scale * 4.0"),
        "counts without end": (
            "never_wraps",
            "tf.minimum(state.steps, MAX_COUNT - 1) + 1",
            "state.steps + 1",
        ),
        "takes the logarithm of 0": ("zeros_double", "| measured", "| (magnitude >= 0)"),
        "leaves out overflows": ("counts_steps", "overflowed | measured", "measured"),
        "does not clip the exponent": (
            "bounded",
            "tf.clip_by_value(tf.floor(LOG2_FITS - x), lowest, highest)",
            "tf.floor(LOG2_FITS - x)",
        ),
        "moves the mean away": ("means_stay", "state.mean + weight", "state.mean - weight"),
        "moves the slow mean away": (
            "means_stay",
            "state.slow_mean + slow",
            "state.slow_mean - slow",
        ),
        "takes twice the power": (
            "bounded",
            "two_to_the(tf.cast(exp",
            "2.0 * two_to_the(tf.cast(exp",
        ),
        "moves zeros down": ("zeros_double", "self._clip(scale * 2.0)", "self._clip(scale / 2.0)"),
    },
    "constant": {
        "keeps a fixed scale that was saved": (
            "never_moves",
            'with another one."""\n        del state, verdict\n        return self.initial_state()',
            'with another one."""\n        return state',
        ),
        "keeps a scale that was saved": (
            "never_moves",
            'this rule."""\n        del state, verdict\n        return self.initial_state()',
            'this rule."""\n        return state',
            1,
        ),
        "scales": ("never_moves", "tf.constant(1.0))", "tf.constant(2.0))", 1),
    },
    "float8": {
        "takes the margin off": (
            "is_the_smallest_that_fits",
            "limit) + margin",
            "limit) - margin",
        ),
        "is an octave too large": (
            "is_the_smallest_that_fits",
            "above = tf.bitwise.bitwise_and(bits, fraction) >",
            "above = tf.bitwise.bitwise_and(bits, fraction) >=",
        ),
        "does not clip": ("bounded", "tf.clip_by_value(exponent, -126, 126)", "exponent"),
        "goes by 0": (
            "zeros_keep_the_scale",
            "(bits > 0) & (bits < INFINITE)",
            "(bits >= 0) & (bits < INFINITE)",
        ),
        "remembers inf": (
            "nonfinite_moves_nothing",
            "finite = tf.math.is_finite(newest)",
            "finite = newest >= 0",
        ),
        "turns the ring": (
            "remembers",
            "state.history[2:], state.history[:1]",
            "state.history[1:]",
            1,
        ),
        "goes by another magnitude": (
            "is_the_smallest_that_fits",
            'if self.algorithm == "max"',
            'if self.algorithm != "max"',
            1,
        ),
        "always goes by the newest": (
            "is_the_smallest_that_fits",
            "if self.includes_newest",
            "if True",
            4,
        ),
        "adds the exponents": (
            "is_the_smallest_that_fits",
            "shift(bits, 23) - shift",
            "shift(bits, 23) + shift",
        ),
    },
}
IN_CI = {"moves on every verdict", "believes a contradiction", "scales", "remembers inf"}
CASES = [
    pytest.param(name, what, marks=[] if what in IN_CI or name == "dynamic" else pytest.mark.slow)
    for name, mutants in MUTANTS.items()
    for what in mutants
]


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_still_has_its_place_in_the_code(name):
    """Most are tried by night only; a change of the code must not leave them without a line to change."""
    modules = [each for each in vars(MODELS[name]).values() if inspect.ismodule(each)]
    sources = [inspect.getsource(each) for each in modules if each.__name__.startswith("scaling.")]
    for what, (_, old, *_) in MUTANTS[name].items():
        assert sum(source.count(old) for source in sources) == 1, what


@pytest.mark.parametrize(("name", "what"), CASES)
def test_a_mutant_is_refuted(name, what):
    """A claim fails on every change of the code, with an example."""
    model, (claim, old, new, *at) = MODELS[name], MUTANTS[name][what]
    variant = model.VARIANTS[at[0] if at else 0]
    margin = {"margin": 1} if name == "float8" else {}
    step = model.step_of(variant, (old, new), **margin)

    found = answer(model.claims(variant)[claim](step), model.given(step))

    assert found.verdict == "refuted", found
    assert found.example


def powers(random, size=None):
    """Powers of two over the whole range of scales."""
    return 2.0 ** random.integers(-126, 127, size=size)


def counts(random, edges, size):
    """Counts from 0 to 2^30: half of them near the numbers where a rule decides."""
    near = np.clip(random.choice(edges, size) + random.integers(-2, 3, size), 0, 2**30)
    far = random.integers(0, 2**30, size, endpoint=True)
    return np.where(random.random(size) < 0.5, near, far).astype(np.int32)


def scales(random, rule, size):
    """Scales over the whole range, half of them at the bounds of a rule."""
    lower = [scale for scale, _ in getattr(rule, "low_scale_intervals", ())]
    edges = random.choice([rule.min_scale, rule.max_scale, *lower], size)
    return np.where(random.random(size) < 0.5, edges, powers(random, size)).astype(np.float32)


def magnitudes(random, size):
    """Magnitudes of all sizes; and 0, inf and NaN. None is subnormal: processors may flush them."""
    usual = random.random(size, np.float32) + np.float32(1.0)
    usual *= (2.0 ** random.integers(-126, 127, size)).astype(np.float32)
    odd = random.choice(np.array([0, 1, 65504, np.inf, np.nan], np.float32), size)
    return np.where(random.random(size) < 0.7, usual, odd)


def factors(random):
    """The fields that many rules share."""
    low, initial, high = sorted(powers(random, 3))
    return {
        "initial_scale": initial,
        "min_scale": low,
        "max_scale": high,
        "growth_factor": 2.0 ** random.integers(1, 127),
        "backoff_factor": 2.0 ** -random.integers(1, 127),
    }


def drawn_dynamic(random, size):
    """A rule, the formulas of its step, and what they are computed from."""
    count = lambda: int(random.choice([1, 2, 3, 2**30, random.integers(1, 2**30)]))  # noqa: E731
    pairs = int(random.choice([0, 2]))
    rule = scaling.DynamicLossScale(
        **factors(random),
        growth_interval=count(),
        hysteresis=count(),
        hysteresis_refill=str(random.choice(["growth", "finite_step"])),
        grace_steps=count() - 1,
        low_scale_intervals=tuple((powers(random), count()) for _ in range(pairs)),
    )
    shorter = [each for _, each in rule.low_scale_intervals]
    near = random.choice([rule.growth_interval, *shorter, -rule.grace_steps, 0], size)
    near = np.clip(near + random.integers(-2, 3, size), -(2**30), 2**30)
    far = random.integers(-(2**30), 2**30, size, endpoint=True)
    state = {
        "loss_scale": scales(random, rule, size),
        "finite_steps": np.where(random.random(size) < 0.5, near, far).astype(np.int32),
        "overflows_left": counts(random, [rule.hysteresis, 0, 1], size),
    }
    return rule, dynamic.step_of((rule.hysteresis_refill, pairs)).after, state


def drawn_tolerant(random, size):
    """See `drawn_dynamic`."""
    tolerance = float(random.choice([0.0, 0.05, 0.5, 1 - 2.0**-53, random.random()]))
    rule = scaling.TolerantLossScale(
        **factors(random),
        growth_interval=int(random.choice([1, 2, 3, 2**30, random.integers(1, 2**30)])),
        tolerance=tolerance,
        scale_interval=bool(random.integers(2)),
    )
    edges = [rule.growth_interval - 1, 0, 2**30]
    state = {
        "loss_scale": scales(random, rule, size),
        "finite_steps": counts(random, edges, size),
        "steps": counts(random, [0, 20, 2**30], size),
        "overflows": counts(random, [0, 1, 2**30], size),
        "growth_interval": np.maximum(counts(random, edges, size), 1).astype(np.int32),
    }
    return rule, tolerant.step_of(rule.scale_interval, exact=True).after, state


def drawn_headroom(random, size):
    """See `drawn_dynamic`."""
    rule = scaling.HeadroomLossScale(
        **factors(random),
        growth_interval=int(random.choice([1, 2, 2**30, random.integers(1, 2**30)])),
        headroom_bits=int(random.integers(41)),
    )
    peak = magnitudes(random, size)
    state = {
        "loss_scale": scales(random, rule, size),
        "finite_steps": counts(random, [rule.growth_interval - 1, 0], size),
        "peak": np.where(np.isfinite(peak), peak, np.float32(0.0)),
        "found": random.random(size) < 0.6,
    }
    return rule, headroom.step_of().after, state


def drawn_logmax(random, size):
    """See `drawn_dynamic`."""
    bounds = {name: each for name, each in factors(random).items() if "factor" not in name}
    rule = scaling.LogMaxLossScale(
        **bounds,
        mean_decay=float(random.choice([0.0, 0.5, 0.99, random.random()])),
        deviation_decay=float(random.choice([0.0, 0.999, random.random()])),
        deviations=float(random.choice([0.0, 3.09, 100.0])),
    )
    state = {
        "loss_scale": scales(random, rule, size),
        "steps": counts(random, [0, 1, 100, 2**30], size),
        "mean": random.uniform(-150, 150, size).astype(np.float32),
        "slow_mean": random.uniform(-150, 150, size).astype(np.float32),
        "variance": (random.uniform(0, 1000, size) * random.integers(2, size=size)).astype(
            np.float32
        ),
    }
    return rule, logmax.step_of(exact=True).after, state


def not_fields(name, rule, before):
    """The values of what a model has in the place of a rule's fields."""
    if name == "dynamic":
        pairs = enumerate(rule.low_scale_intervals)
        return {
            f"{what}_{at}": kind(value)
            for at, pair in pairs
            for what, kind, value in zip(
                ("scale", "interval"), (np.float32, np.int32), pair, strict=True
            )
        }
    if name == "headroom":
        return {"limit": np.float32(65504 / 2.0**rule.headroom_bits)}
    if name == "logmax":
        steps = tf.minimum(before["steps"], 2**30 - 1) + 1
        decays = "mean_decay", "deviation_decay"
        return {name: newest_weight(getattr(rule, name), steps).numpy() for name in decays}
    return {}


DRAWN = {
    "dynamic": drawn_dynamic,
    "tolerant": drawn_tolerant,
    "headroom": drawn_headroom,
    "logmax": drawn_logmax,
}
KINDS = {"float": np.float32, "double": np.float64, "int": np.int32}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize(
    ("rules", "steps"), [(4, 5_000), pytest.param(200, 5_000, marks=pytest.mark.slow)]
)
def test_the_formulas_are_what_runs(name, rules, steps, record_property):
    """L23: random steps of rules with random constants end in the bits that the formulas give."""
    random, different = np.random.default_rng(1), 0
    for _ in range(rules):
        rule, after, state = DRAWN[name](random, steps)
        finite, cause = random.random(steps) < 0.6, random.integers(0, 7, steps)
        size = magnitudes(random, steps)
        constants = {
            field: KINDS[kind](getattr(rule, field))
            for field, kind in MODELS[name].CONSTANTS.items()
            if hasattr(rule, field)
        }
        for verdict in [(True, 0), *((False, cause) for cause in range(7))]:
            # Of whole vectors, as a logarithm's last bit depends on its place in one.
            chosen = (finite == verdict[0]) & (finite | (cause == verdict[1]))
            before = {field: tf.constant(value[chosen]) for field, value in state.items()}
            moved = rule.advance(
                type(rule.initial_state())(**before),
                scaling.Verdict(verdict[0], scaling.Cause(verdict[1]), tf.constant(size[chosen])),
            )
            named = {f"state.{field}": value.numpy() for field, value in before.items()}
            named |= {"grads_finite": verdict[0], "cause": verdict[1], "magnitude": size[chosen]}
            values = constants | not_fields(name, rule, before) | named
            different += differences(moved, after, values)
    record_property("steps", rules * steps)

    assert different == 0


def differences(moved, after, values):
    """How many numbers of a state are not, bit for bit, what formulas give."""
    different = 0
    for field, found in moved._asdict().items():
        wanted = evaluate(after[field], values, {"Log": lambda x: log2(x).numpy()})
        wanted = np.broadcast_to(wanted, found.shape)
        assert wanted.dtype == found.dtype
        different += int(np.sum(bits(wanted) != bits(found.numpy())))
    return different


def bits(values):
    """The bits of floats, of which every NaN counts as one."""
    if values.dtype != np.float32:
        return values
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.int32)


@pytest.mark.parametrize("variant", float8.VARIANTS)
@pytest.mark.parametrize("steps", [5_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_the_formulas_of_float8_are_what_runs(variant, steps):
    """Random steps of float8 scales end in the bits that the formulas give."""
    random = np.random.default_rng(2)
    dtype, length, algorithm, newest = variant
    margin = int(random.integers(-64, 65))
    rule = scaling.float8.DelayedScaling(
        dtype, length, algorithm=algorithm, margin=margin, includes_newest=newest
    )
    scale, amax = powers(random, steps).astype(np.float32), magnitudes(random, steps)
    history = magnitudes(random, length * steps).reshape(length, steps)
    history = np.where(np.isfinite(history), history, np.float32(0.0))
    state = scaling.float8.DelayedScalingState(scale, history)
    moved = tf.function(rule.advance)(state, amax)
    step = float8.step_of(variant, margin=margin)
    values = {"scale": scale, "amax": amax}
    values |= {f"history_{at}": row for at, row in enumerate(history)}
    pairs = [
        (moved.scale, step.after),
        *zip(tf.unstack(moved.history), step.history_after, strict=True),
    ]
    for found, formula in pairs:
        wanted = np.broadcast_to(evaluate(formula, values), [steps])

        np.testing.assert_array_equal(bits(found.numpy()), bits(wanted))


@pytest.mark.parametrize(
    ("model", "kind", "least"),
    [(dynamic, scaling.DynamicLossScale, 5), (tolerant, scaling.TolerantLossScale, 2)],
)
def test_presets_are_among_what_is_proved(model, kind, least):
    """The constants of every preset that is such a rule are valid, in the words of the proofs."""
    rules = [make() for versions in PRESETS.values() for make in versions.values()]
    found = [rule for rule in rules if type(rule) is kind]
    assert len(found) >= least
    for rule in found:
        step = model.step_of(model.VARIANTS[0])
        values = {"float": FLOAT, "double": z3.Float64()}
        pairs = [
            (term, z3.FPVal(getattr(rule, name), values[sort]))
            if (sort := model.CONSTANTS[name]) in values
            else (term, z3.BitVecVal(getattr(rule, name), 32))
            for name, term in step.constants.items()
        ]
        for demand in model.valid_constants(step):
            assert z3.is_true(z3.simplify(z3.substitute(demand, *pairs))), rule


def test_powers_of_two_are_told_from_others():
    """The formula for a power of two, on numbers at its edges."""
    yes, no = [2.0**-126, 0.5, 1.0, 2.0**126], [0.0, -1.0, 3.0, 2.0**-127, 2.0**127, np.inf, np.nan]
    for numbers, wanted in ((yes, True), (no, False)):
        for number in numbers:
            found = z3.simplify(power_of_two(z3.FPVal(number, z3.Float32())))
            assert z3.is_true(found) == wanted, number
