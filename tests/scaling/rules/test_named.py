"""Rules by name, and presets compared step by step with the systems that they reproduce."""

import dataclasses

import numpy as np
import pytest
import references
import tensorflow as tf

import scaling
from scaling import DynamicLossScale, FixedLossScale, HeadroomLossScale, parse_rule, preset

# Preset, version, and the system it is compared with.
SYSTEMS = [
    ("keras3", "3.15", references.Keras3),
    ("tf_keras", None, references.TFKeras),
    ("pytorch", "2.13", references.PyTorch),
    ("deepspeed", "0.16", references.OldDeepSpeed),
    ("deepspeed", "0.19", references.DeepSpeed),
    ("megatron", None, references.Megatron),
    ("fairseq", None, references.Fairseq),
    ("metaseq", None, references.Metaseq),
    ("flax", "0.12", references.Flax),
    ("jmp", "0.0.4", references.Jmp),
]
IDS = [f"{name} {version}" if version else name for name, version, _ in SYSTEMS]


def skip_without(reference):
    """Skips the test if the real system, or a package that it needs, is not installed."""
    if reference.package:
        reason = f"needs {reference.package}: pip install 'halfstep[oracles]'"
        pytest.importorskip(reference.package, reason=reason)


@dataclasses.dataclass
class Tally:
    """Counts what happened to a reference system over all histories."""

    steps: int = 0
    growths: int = 0
    backoffs: int = 0
    restarts: int = 0
    forced: int = 0  # of the restarts, those after `OutOfBounds`

    def __str__(self):
        return (
            f"{self.steps:,} steps, {self.growths:,} growths, {self.backoffs:,} backoffs, "
            f"{self.restarts:,} restarts ({self.forced:,} forced)"
        )


def random_moves(rng, interval):
    """Yields pairs (whether both sides restart, whether the step overflows) without end.

    Each segment has one overflow rate: zero for up to three intervals or more, so that every
    system grows and some reach their ceiling; up to 5%; up to half; or more, to reach floors.
    """
    while True:
        length = int(400 ** rng.random())
        least, most = [(0, 0), (0, 0.05), (0, 0.5), (0.5, 1)][rng.integers(4)]
        if most == 0:
            length += interval * rng.integers(1, 4)
        again = [rng.random() < 2 / 3] + [False] * (length - 1)
        yield from zip(again, rng.random(length) < rng.uniform(least, most), strict=True)


def record(system, moves, steps, tally):
    """Runs a reference; returns for each step whether it restarted, whether it overflowed, its scale.

    A step at which the reference leaves its bounds is left out, and the next one restarts.
    """
    rows, starts = [], True
    while len(rows) < steps:
        again, overflow = next(moves)
        if starts := starts or again:
            system.restart()
        before = system.scale
        try:
            system.step(bool(overflow))
        except references.OutOfBounds:
            tally.forced += 1
            starts = True
            continue
        rows.append((starts, overflow, system.scale))
        tally.restarts += starts
        tally.growths += system.scale > before
        tally.backoffs += system.scale < before
        starts = False
    tally.steps += steps
    return map(np.array, zip(*rows, strict=True))


# XLA runs thousands of steps in a millisecond; L15 shows that it agrees with eager mode.
@tf.function(jit_compile=True, autograph=False)
def play(rule, starts, overflows):
    """Returns the rule's scale after each step: shape (steps,), float32."""
    start = rule.initial_state()

    def step(state, inputs):
        again, overflow = inputs
        state = tf.nest.map_structure(lambda new, old: tf.where(again, new, old), start, state)
        return rule.advance(state, ~overflow)

    return tf.scan(step, (starts, overflows), start).loss_scale


def assert_same_moves(rule, system, rng, steps, tally):
    """Asserts that the rule and the reference have the same scale after every step."""
    moves = random_moves(rng, rule.growth_interval)
    starts, overflows, expected = record(system, moves, steps, tally)
    actual = play(rule, tf.constant(starts), tf.constant(overflows)).numpy().astype(np.float64)
    wrong = np.flatnonzero(expected != actual)
    if wrong.size:
        step = wrong[0]
        begin = np.flatnonzero(starts[: step + 1])[-1]
        history = "".join("x" if overflow else "." for overflow in overflows[begin : step + 1])

        assert expected[step] == actual[step], (
            f"{rule} diverged at step {step}, {step - begin} after a start: {history}"
        )


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize(("name", "version", "reference"), SYSTEMS, ids=IDS)
def test_a_preset_moves_as_its_system(name, version, reference, full, capsys):
    """L16: in random histories, with random growth intervals and with the default one, the scale
    of a preset equals the scale of its system at every step, while that is within its bounds.
    """
    skip_without(reference)
    rng, tally = np.random.default_rng(0), Tally()
    # With an interval of 1, ceilings are reached soon.
    for interval in [1, *rng.integers(1, 51, size=8 if full else 1).tolist()]:
        rule = preset(name, version=version, growth_interval=interval)
        steps = 2500 if full else 1500
        assert_same_moves(rule, reference(growth_interval=interval), rng, steps, tally)
    before = tally.growths
    for _ in range(2 if full else 1):
        rule = preset(name, version=version)
        assert_same_moves(rule, reference(), rng, 6000, tally)

    assert tally.growths > before, "no growth at the default interval"
    assert min(tally.growths, tally.backoffs, tally.restarts) >= (150 if full else 30), str(tally)
    if full:
        version = f" {version}" if version else ""
        label = f"{name}{'' if reference.package else version} {reference.kind()}"
        with capsys.disabled():
            print(f"\nL16 {label}: {tally}, 0 mismatches", end="")  # noqa: T201 - the result of the full run


HYSTERESIS = DynamicLossScale(
    2.0**16, min_scale=2.0**-126, max_scale=2.0**126, hysteresis_refill="finite_step"
)
COLOSSAL = DynamicLossScale(2.0**16, min_scale=1.0, max_scale=2.0**32)


# Rule, reference, and the settings of the reference that match the rule.
OVERRIDES = [
    (
        preset("deepspeed", hysteresis_refill="finite_step"),
        references.DeepSpeed,
        {"consecutive": True},
    ),
    (
        preset("deepspeed", version="0.16", hysteresis=3, hysteresis_refill="finite_step"),
        references.OldDeepSpeed,
        {"hysteresis": 3, "consecutive": True},
    ),
    # With this setting DeepSpeed stays at its floor, like the preset, instead of raising.
    (
        preset("deepspeed", hysteresis=1, min_scale=16.0),
        references.DeepSpeed,
        {"hysteresis": 1, "min_scale": 16.0, "raises_at_floor": False},
    ),
    (preset("deepspeed"), references.DeepSpeed, {"raises_at_floor": False}),
    (preset("megatron", hysteresis=1), references.Megatron, {"hysteresis": 1}),
    (preset("megatron", hysteresis=4), references.Megatron, {"hysteresis": 4}),
    (preset("fairseq", tolerance=0.05), references.Fairseq, {"tolerance": 0.05}),
    (preset("fairseq", tolerance=0.2), references.Fairseq, {"tolerance": 0.2}),
    (preset("fairseq", tolerance=1 / 3), references.Fairseq, {"tolerance": 1 / 3}),
    (
        preset("fairseq", tolerance=0.2, min_scale=0.5),
        references.Fairseq,
        {"tolerance": 0.2, "threshold": 0.5},
    ),
    (preset("metaseq", tolerance=0.05), references.Metaseq, {"tolerance": 0.05}),
    (preset("metaseq", tolerance=0.2), references.Metaseq, {"tolerance": 0.2}),
    (preset("metaseq", tolerance=1 / 3), references.Metaseq, {"tolerance": 1 / 3}),
    (dataclasses.replace(HYSTERESIS, hysteresis=2), references.ApexHysteresis, {}),
    (
        dataclasses.replace(HYSTERESIS, hysteresis=3),
        references.ApexHysteresis,
        {"hysteresis": 3},
    ),
    (dataclasses.replace(COLOSSAL, hysteresis=2), references.ColossalAI, {}),
    (dataclasses.replace(COLOSSAL, hysteresis=3), references.ColossalAI, {"hysteresis": 3}),
]
OVERRIDE_IDS = [f"{reference.__name__} {constants}" for _, reference, constants in OVERRIDES]


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize(("rule", "reference", "constants"), OVERRIDES, ids=OVERRIDE_IDS)
def test_overrides_move_as_the_system_does_with_the_same_settings(rule, reference, constants, full):
    """L16: with another hysteresis, refill, floor or tolerance, the scale equals that of the system
    with the same settings at every step. So it does for Apex's kernel and ColossalAI's scaler,
    which have no preset.
    """
    rng, tally = np.random.default_rng(0), Tally()
    for interval in [1, 50, *rng.integers(1, 51, size=10 if full else 0).tolist()]:
        # In all of these the rule counts its interval like the system.
        varied = dataclasses.replace(rule, growth_interval=interval)
        system = reference(growth_interval=interval, **constants)
        assert_same_moves(varied, system, rng, 2500, tally)

    assert min(tally.growths, tally.backoffs) >= (100 if full else 10), str(tally)


# Computed by hand: system, interval, steps (x overflows), exponent of the scale after each.
KNOWN = [
    ("keras3 3.15", 3, ".........", [15, 15, 16, 16, 16, 17, 17, 17, 18]),
    ("tf_keras", 3, ".........", [15, 15, 16, 16, 16, 17, 17, 17, 18]),
    ("pytorch 2.13", 3, ".........", [16, 16, 17, 17, 17, 18, 18, 18, 19]),
    ("deepspeed 0.16", 3, ".........", [16, 16, 17, 17, 17, 18, 18, 18, 19]),
    # DeepSpeed 0.19 and flax first grow on step 4; then DeepSpeed every 3 steps, flax every 4.
    ("deepspeed 0.19", 3, ".........", [16, 16, 16, 17, 17, 17, 18, 18, 18]),
    ("flax 0.12", 3, ".........", [16, 16, 16, 17, 17, 17, 17, 18, 18]),
    ("megatron", 3, ".........", [32, 32, 33, 33, 33, 34, 34, 34, 35]),
    ("fairseq", 3, ".........", [15, 15, 16, 16, 16, 17, 17, 17, 18]),
    # Its interval is 6 after the first growth and 12 after the second, on step 6.
    ("metaseq", 3, ".........", [2, 2, 3, 3, 3, 4, 4, 4, 4]),
    ("jmp 0.0.4", 3, ".........", [15, 15, 16, 16, 16, 17, 17, 17, 18]),
    # An overflow restarts the count.
    ("keras3 3.15", 2, ".x..x", [15, 14, 14, 15, 14]),
    ("flax 0.12", 2, "..x...", [16, 16, 15, 15, 15, 16]),
    # Hysteresis that is used up stays used up until growth.
    ("megatron", 2, "xx.x..x.x", [32, 31, 31, 30, 30, 31, 31, 31, 30]),
    ("deepspeed 0.16", 2, "xx.x..x.x", [16, 15, 15, 14, 14, 15, 15, 15, 14]),
    ("deepspeed 0.19", 2, "xx.x...x.x", [16, 15, 15, 14, 14, 14, 15, 15, 15, 14]),
    # The interval shrinks with the scale to 1, and doubles from there.
    ("metaseq", 2, "x......", [1, 2, 3, 3, 4, 4, 4]),
    # Floors, and flax's, the smallest normal float32.
    ("metaseq", 4, "x" * 9, [1, 0, -1, -2, -3, -4, -5, -5, -5]),
    ("tf_keras", 4, "x" * 17, [*range(14, -1, -1), 0, 0]),
    ("flax 0.12", 4, "x" * 144, [*range(15, -127, -1), -126, -126]),
]
KNOWN_IDS = [f"{system} {history}" for system, _, history, _ in KNOWN]


@pytest.mark.extras  # most of these systems are installed by an extra only
@pytest.mark.parametrize(("system", "interval", "history", "exponents"), KNOWN, ids=KNOWN_IDS)
def test_known_histories(system, interval, history, exponents):
    """L16: presets and references agree with short histories that were computed by hand."""
    name, version, reference = SYSTEMS[IDS.index(system)]
    rule = preset(name, version=version, growth_interval=interval)
    overflows = np.array([step == "x" for step in history])
    ours = play(rule, np.zeros_like(overflows), overflows).numpy()

    assert exponents == np.log2(ours).tolist()
    skip_without(reference)
    theirs = reference(growth_interval=interval)
    for step, (overflow, exponent) in enumerate(zip(overflows, exponents, strict=True)):
        theirs.step(overflow)

        assert 2.0**exponent == theirs.scale, f"diverged at step {step}"


@pytest.mark.parametrize(
    ("reference", "steps"),
    [(references.DeepSpeed, 18), (references.Fairseq, 29), (references.Keras3, 142)],
)
def test_a_reference_raises_where_it_leaves_its_bounds(reference, steps):
    """L16: DeepSpeed raises at 1, fairseq below 2^-13, and Keras falls below 2^-126."""
    system = reference()
    for _ in range(steps - 1):
        system.step(overflow=True)

    with pytest.raises(references.OutOfBounds):
        system.step(overflow=True)


@pytest.mark.parametrize(("name", "version", "reference"), SYSTEMS, ids=IDS)
def test_the_newest_version_is_the_default(name, version, reference):
    """L16: without a version, the preset of the newest version is returned."""
    del reference
    newest = [other for system, other, _ in SYSTEMS if system == name][-1]

    assert (version == newest) == (preset(name) == preset(name, version=version))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("1024", FixedLossScale(1024.0)),
        ("2^-3", FixedLossScale(0.125)),
        ("dynamic:growth_interval=2^9", DynamicLossScale(growth_interval=512)),
        ("fixed:loss_scale=2^4", FixedLossScale(16.0)),
        ("none", scaling.NoLossScale()),
        ("dynamic", DynamicLossScale()),
        (
            "dynamic:growth_interval=7:hysteresis_refill=finite_step:initial_scale=2^20",
            DynamicLossScale(2.0**20, 7, hysteresis_refill="finite_step"),
        ),
        (
            "dynamic:low_scale_intervals=((2.0,25),)",
            DynamicLossScale(low_scale_intervals=((2.0, 25),)),
        ),
        ("headroom:headroom_bits=2", HeadroomLossScale(headroom_bits=2)),
        ("logmax", scaling.LogMaxLossScale()),
        ("tolerant:scale_interval=True", scaling.TolerantLossScale(scale_interval=True)),
        ("deepspeed:version=0.16", scaling.preset("deepspeed", version="0.16")),
        ("deepspeed", scaling.preset("deepspeed", version="0.19")),
        (
            "flax:growth_interval=9",
            DynamicLossScale(2.0**16, 10, min_scale=2.0**-126, max_scale=2.0**126),
        ),
    ],
)
def test_rules_are_parsed_from_text(text, rule):
    """A text may be a name, a number or a power of two, and may set fields."""
    assert rule == parse_rule(text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("dynamix", "`loss_scale`"),
        ("1000", "`loss_scale`"),
        ("2^999", "`loss_scale`"),
        ("dynamic:growth_interval=500,initial_scale=2^20", "`growth_interval`"),
        ("headroom:bits=3", "bits"),
        ("jmp:intial_scale=8", "intial_scale"),
        ("flax:growth_interval=-1", "`growth_interval`"),
        ("deepspeed:version=0.17", "`version`"),
        ("megatron:version=0.9", "`version`"),
        ("2^10:growth_interval=5", "growth_interval"),
    ],
)
def test_texts_of_no_rule_are_errors(text, word):
    """They are refused by the rule's own checks, or by Python's."""
    with pytest.raises((TypeError, ValueError), match=word):
        parse_rule(text)
